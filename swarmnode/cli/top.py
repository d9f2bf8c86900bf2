"""`swarmnode top`: live status of the node on this machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from swarmnode.cli.option.param import DURATION, home_option
from swarmnode.errors import UsageError


@click.command(short_help="status of the node on this machine, live")
@click.option("--every", "every_s", type=DURATION, default=1.0, show_default="1s", help="Time between two updates.")
@click.option("--times", type=click.IntRange(1), help="Number of updates.  [default: until Ctrl-C]")
@home_option
def command(every_s: float, times: int | None, home: Path) -> None:
    """Show stage, state, speed, losses, limits and peers of the node in --home, until Ctrl-C.

    Needs a terminal; `status --json` is for programs.
    """
    from rich.console import Console
    from rich.live import Live

    from swarmnode.control import client
    from swarmnode.local.swarm_view import NodeWatch, picture

    console = Console()
    if not console.is_terminal and times is None:
        raise UsageError("top needs a terminal: use `swarmnode status --json`, or --times 1")
    watch, left = NodeWatch(), times
    with Live(console=console, auto_refresh=False, screen=times is None and sys.stdout.isatty()) as live:
        while left is None or left > 0:
            watch.add(time.monotonic(), client.status(home))
            live.update(picture(watch), refresh=True)
            left = None if left is None else left - 1
            if left != 0:
                time.sleep(every_s)
    if not console.is_terminal:
        console.print()  # rich leaves the last line open there

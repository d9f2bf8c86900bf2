"""`swarmnode snooze 2h`: pause the node for a time."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.option.param import DURATION, FOLDER
from swarmnode.user_folders import default_home


@click.command(short_help="pause the node for a time")
@click.argument("duration", metavar="DURATION", type=DURATION)
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
def command(duration: float, home: Path | None) -> None:
    """Pause for DURATION (90s, 30m, 2h), then resume automatically. Peers are told when to expect it back."""
    from swarmnode.cli.output.limits import ask_limits

    ask_limits(home or default_home("node"), "pause", for_s=duration, reason="snoozed")

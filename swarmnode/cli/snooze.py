"""`swarmnode snooze 2h`: stand aside for a time."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.duration import Duration
from swarmnode.cli.options import FOLDER
from swarmnode.place import default_home


@click.command(short_help="let the node stand aside for a time")
@click.argument("duration", metavar="DURATION", type=Duration())
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
def command(duration: float, home: Path | None) -> None:
    """Pause for DURATION (90s, 30m, 2h), then go on by itself. Peers are told when to expect it back."""
    from swarmnode.cli.verdict import ask_limits
    from swarmnode.wire.control_pb2 import PauseRequest

    ask_limits(home or default_home("node"), "Pause", PauseRequest(for_s=duration, reason="snoozed"))

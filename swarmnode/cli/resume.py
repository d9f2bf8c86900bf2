"""`swarmnode resume`: go on."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.options import FOLDER
from swarmnode.place import default_home


@click.command(short_help="take a pause back")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
def command(home: Path | None) -> None:
    """Take back `pause` and `snooze`. Limits still hold: outside its hours a node stays paused."""
    from swarmnode.cli.verdict import ask_limits
    from swarmnode.wire.control_pb2 import ResumeRequest

    ask_limits(home or default_home("node"), "Resume", ResumeRequest())

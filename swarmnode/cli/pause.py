"""`swarmnode pause`: stand aside."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.options import FOLDER
from swarmnode.place import default_home


@click.command(short_help="let the node stand aside until it is told to resume")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
def command(home: Path | None) -> None:
    """Finish what is held and take no new work until `swarmnode resume`. The stage stays in memory; peers are told.

    Exit code 69 when no node lives in --home.
    """
    from swarmnode.cli.verdict import ask_limits
    from swarmnode.wire.control_pb2 import PauseRequest

    ask_limits(home or default_home("node"), "Pause", PauseRequest(reason="asked to pause"))

"""`swarmnode pause`: pause the node."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.option.param import FOLDER
from swarmnode.user_folders import default_home


@click.command(short_help="pause the node until `resume`")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
def command(home: Path | None) -> None:
    """Finish held work and take no new work until `swarmnode resume`. The stage stays in memory; peers are told.

    Exit code 69 if no node runs in --home.
    """
    from swarmnode.cli.output.limits import ask_limits

    ask_limits(home or default_home("node"), "pause", reason="asked to pause")

"""`swarmnode resume`: end a pause."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.option.param import FOLDER
from swarmnode.user_folders import default_home


@click.command(short_help="end a pause")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
def command(home: Path | None) -> None:
    """End `pause` and `snooze`. Limits still apply: outside its hours a node stays paused."""
    from swarmnode.cli.output.limits import ask_limits

    ask_limits(home or default_home("node"), "resume")

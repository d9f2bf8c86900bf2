"""`swarmnode finish`: finish all held work, then stop."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.option.param import FOLDER
from swarmnode.user_folders import default_home


@click.command(short_help="finish all held work, then leave")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
def command(home: Path | None) -> None:
    """Take no new work, finish all held work however long it takes, save, leave. Returns at once; `status` shows
    progress.

    To leave faster: `swarmnode leave`.
    """
    from swarmnode.control import client

    client.ask(home or default_home("node"), "finish", reason="swarmnode finish")
    click.echo("finishing: the node takes no new work and leaves when all is done", err=True)

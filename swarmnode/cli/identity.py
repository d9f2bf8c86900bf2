"""`swarmnode identity`: this machine's peer id."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.option.param import FOLDER
from swarmnode.user_folders import default_home


@click.command(short_help="this machine's peer id")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
def command(home: Path | None) -> None:
    """Print the peer id of the node in --home; its key is made if there is none."""
    from swarmnode.transport.key_file import load_or_create

    click.echo(load_or_create((home or default_home("node")) / "node.key").peer_id)

"""`swarmnode identity`: this machine's peer id."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.option.param import home_option


@click.command(short_help="this machine's peer id")
@home_option
def command(home: Path) -> None:
    """Print the peer id of the node in --home; its key is made if there is none."""
    from swarmnode.transport.key_file import load_or_create

    click.echo(load_or_create(home / "node.key").peer_id)

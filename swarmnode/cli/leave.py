"""`swarmnode leave`: leave now."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.option.param import FOLDER
from swarmnode.user_folders import default_home


@click.command(short_help="leave in order, within seconds")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
def command(home: Path | None) -> None:
    """Finish held work within seconds, save, announce the leave, stop. Returns when leaving has begun."""
    from swarmnode.control import client

    client.ask(home or default_home("node"), "leave", reason="swarmnode leave")
    click.echo("leaving", err=True)

"""`swarmnode leave`: go now."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.options import FOLDER
from swarmnode.place import default_home


@click.command(short_help="leave cleanly, within seconds")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
def command(home: Path | None) -> None:
    """Finish what is held within seconds, save, say goodbye, stop. Returns when leaving has begun."""
    from swarmnode.control import client

    client.leave(home or default_home("node"), "swarmnode leave")
    click.echo("leaving", err=True)

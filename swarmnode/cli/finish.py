"""`swarmnode finish`: drain, then stop."""

from __future__ import annotations

from pathlib import Path

import click

from swarmnode.cli.options import FOLDER
from swarmnode.place import default_home


@click.command(short_help="finish all that is held, then leave")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
def command(home: Path | None) -> None:
    """Take no new work, finish all that is held however long it takes, save, leave. Returns at once; `status` shows it.

    In a hurry: `swarmnode leave`.
    """
    from swarmnode.control import client
    from swarmnode.wire.control_pb2 import FinishRequest

    client.ask(home or default_home("node"), "Finish", FinishRequest(reason="swarmnode finish"))
    click.echo("finishing: no new work is taken; it leaves when all is done", err=True)

"""`swarmnode status`: what the node on this machine does."""

from __future__ import annotations

import json
from pathlib import Path

import click

from swarmnode.cli.options import FOLDER
from swarmnode.cli.paper import paper
from swarmnode.place import default_home


@click.command(short_help="what the node on this machine does")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
@click.option("--json", "as_json", is_flag=True, help="Print the whole status as one JSON object.")
def command(home: Path | None, as_json: bool) -> None:
    """Ask the node that lives in --home through its control socket, and print its answer.

    Exit code 69 when no node lives there.
    """
    from swarmnode.control import client

    reply = client.status(home or default_home("node"))
    if as_json:
        from google.protobuf.json_format import MessageToDict

        found = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        click.echo(json.dumps(found, sort_keys=True))
        return
    from swarmnode.local.view import status_tables

    paper().print(*status_tables(reply), sep="\n")

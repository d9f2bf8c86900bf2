"""`swarmnode status`: status of the node on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import click

from swarmnode.cli.option.param import FOLDER
from swarmnode.cli.output.console import paper
from swarmnode.user_folders import default_home


@click.command(short_help="status of the node on this machine")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
@click.option("--json", "as_json", is_flag=True, help="Print the whole status as one JSON object.")
def command(home: Path | None, as_json: bool) -> None:
    """Query the node in --home through its control socket, and print its status.

    Exit code 69 if no node runs there.
    """
    from swarmnode.control import client

    reply = client.status(home or default_home("node"))
    if as_json:
        from google.protobuf.json_format import MessageToDict

        found = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        click.echo(json.dumps(found, sort_keys=True))
        return
    from swarmnode.local.swarm_view import status_tables

    paper().print(*status_tables(reply), sep="\n")

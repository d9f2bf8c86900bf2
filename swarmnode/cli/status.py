"""`swarmnode status`: status of the node on this machine."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import click

from swarmnode.cli.option.param import home_option
from swarmnode.cli.output.console import paper
from swarmnode.errors import Unavailable

METRICS_TIMEOUT_S = 5.0


@click.command(short_help="status of the node on this machine")
@home_option
@click.option("--json", "as_json", is_flag=True, help="Print the whole status as one JSON object.")
@click.option("--metrics", is_flag=True, help="Print its metrics, in Prometheus's text format.")
def command(home: Path, as_json: bool, metrics: bool) -> None:
    """Query the node in --home through its control socket, and print its status.

    Exit code 69 if no node runs there.
    """
    from swarmnode.control import client

    if as_json and metrics:
        raise click.UsageError("--json and --metrics are two forms of the status: give one")
    reply = client.status(home)
    if as_json:
        from google.protobuf.json_format import MessageToDict

        status = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        click.echo(json.dumps(status, sort_keys=True))
        return
    if metrics:
        address = f"http://{reply.metrics_address}/metrics"
        try:
            with urllib.request.urlopen(address, timeout=METRICS_TIMEOUT_S) as page:
                click.echo(page.read().decode(), nl=False)
        except (OSError, ValueError) as error:
            raise Unavailable(f"{address} does not answer ({error}): try again") from None
        return
    from swarmnode.local.swarm_view import NodeWatch, picture

    watch = NodeWatch()
    watch.add(0.0, reply)
    paper().print(picture(watch))

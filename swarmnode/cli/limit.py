"""`swarmnode limit --max-up 20Mbit`: the limits of the running node."""

from __future__ import annotations

import json
from pathlib import Path

import click

from swarmnode.cli.option.param import FOLDER, given_limits, limit_options
from swarmnode.user_folders import default_home


@click.command(short_help="show or change the limits of the running node")
@limit_options
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(home: Path | None, as_json: bool, **limits: str | None) -> None:
    """Change limits of the node in --home ("none" removes one), at once and until it stops; print all of them.

    To keep them, give them to `join` or put them into the config file. Without options nothing changes.
    """
    from swarmnode.cli.output.limits import ask_limits

    reply = ask_limits(home or default_home("node"), "limit", changed=given_limits(limits))
    if as_json:
        click.echo(json.dumps(reply, sort_keys=True))
        return
    for name, text in sorted(reply["limits"].items()):
        click.echo(f"{name} {text}")

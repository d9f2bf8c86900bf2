"""`swarmnode config show --origin`: settings, and where each comes from."""

from __future__ import annotations

import json
from pathlib import Path

import click

from swarmnode.cli.options import FOLDER
from swarmnode.cli.origin import bind, config_path, defaults_for, origins
from swarmnode.errors import NoDaemon
from swarmnode.place import default_home


@click.group(short_help="settings, and where each comes from")
def command() -> None:
    """A flag counts most, then SWARMNODE_* (--max-up is SWARMNODE_MAX_UP), then the config file, then the default."""


@command.command()
def path() -> None:
    """Print where the config file is, whether or not it exists."""
    click.echo(config_path())


@command.command()
@click.option("--origin", is_flag=True, help="Also say where each value comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--home", type=FOLDER, help="The node's own folder.  [default: ~/.local/share/swarmnode/node]")
def show(origin: bool, as_json: bool, home: Path | None) -> None:
    """Print the settings of the node that runs in --home, the run's manifest with them; without a node, those that
    `swarmnode join` would have here and now."""
    from swarmnode.control import client
    from swarmnode.wire.control_pb2 import ConfigRequest

    try:
        reply = client.ask(home or default_home("node"), "Config", ConfigRequest())
        rows = [(setting.name, setting.value, setting.origin) for setting in reply.settings]
    except NoDaemon:
        rows = list(_of_join())
        click.echo("no node runs there: this is what `swarmnode join` would have", err=True)
    if as_json:
        click.echo(json.dumps({name: {"value": value, "origin": where} for name, value, where in rows}, indent=1))
        return
    width = max(len(name) for name, _, _ in rows)
    for name, value, where in rows:
        click.echo(f"{name:<{width}}  {value}" + (f"  ({where})" if origin else ""))


def _of_join() -> tuple[tuple[str, str, str], ...]:
    from swarmnode.cli.join import command as join

    bind(join)
    with join.make_context("join", [], resilient_parsing=False, default_map=defaults_for("join", join)) as ctx:
        return origins(ctx)

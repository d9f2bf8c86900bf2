"""`swarmnode config show --origin`: settings and their origin; `completion SHELL`."""

from __future__ import annotations

import json
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from swarmnode.app.cli.option.config_file import bind, config_path, defaults_for, origins
from swarmnode.app.cli.option.param import home_option
from swarmnode.app.cli.output.listed import ListedGroup
from swarmnode.base.errors import NoDaemon


@click.group(cls=ListedGroup, short_help="settings and their origin")
def command() -> None:
    """A flag takes precedence, then SWARMNODE_* (--max-up is SWARMNODE_MAX_UP), then the config file, then the
    default."""


@command.command()
def path() -> None:
    """Print the path of the config file, whether or not it exists."""
    click.echo(config_path())


@command.command()
@click.option("--origin", is_flag=True, help="Also print the origin of each value.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@home_option
def show(origin: bool, as_json: bool, home: Path) -> None:
    """Print the settings of the node that runs in --home, including the run's manifest; without a node, those that
    `swarmnode join` would use here and now."""
    from swarmnode.app.control import client

    try:
        settings = client.ask(home, "config")["settings"]
        rows = [(setting["name"], setting["value"], setting["origin"]) for setting in settings]
    except NoDaemon:
        rows = list(_of_join())
        click.echo("no node runs there: these are the settings of `swarmnode join`", err=True)
    if as_json:
        click.echo(json.dumps({name: {"value": value, "origin": where} for name, value, where in rows}, indent=1))
        return
    width = max(len(name) for name, _, _ in rows)
    for name, value, where in rows:
        click.echo(f"{name:<{width}}  {value}" + (f"  ({where})" if origin else ""))


def _of_join() -> tuple[tuple[str, str, str], ...]:
    from swarmnode.app.cli.join import command as join

    bind(join)
    with join.make_context("join", [], resilient_parsing=False, default_map=defaults_for("join", join)) as ctx:
        return origins(ctx)


@click.command(short_help="print a shell completion script")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print the completion script of SHELL. In bash: eval "$(swarmnode completion bash)". To keep it, put that line
    into ~/.bashrc (or ~/.zshrc); for fish: swarmnode completion fish > ~/.config/fish/completions/swarmnode.fish"""
    from swarmnode.app.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "swarmnode", "_SWARMNODE_COMPLETE").source())

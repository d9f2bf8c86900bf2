"""`swarmnode bench swarm|transport`: numbers of this machine."""

from __future__ import annotations

import importlib
import json
from typing import Any

import click

JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(short_help="measure this machine")
def command() -> None:
    """Measure this machine. Each command runs both sides of its comparison, and prints what it measured."""


@command.command()
@JSON
def swarm(as_json: bool) -> None:
    """Tokens per second of a local swarm of 6 processes, against one plain PyTorch process that trains the same model
    with the same global batch on the same cores, and where the rest goes."""
    _print(_run("swarm"), as_json)


@command.command()
@JSON
def transport(as_json: bool) -> None:
    """Tensors of 1, 4, 16 and 64 MiB between two processes, against a bare libp2p stream of the same bytes."""
    _print(_run("transport"), as_json)


def _run(what: str) -> dict[str, Any]:
    found: dict[str, Any] = importlib.import_module(f"swarmnode.bench.{what}").run()
    return found


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for key, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            table = Table(*value[0], title=key, title_justify="left")
            for row in value:
                table.add_row(*map(_text, row.values()))
            console.print(table)
        elif isinstance(value, dict):
            table = Table("", "", title=key, title_justify="left", show_header=False)
            for name, inner in value.items():
                table.add_row(name, _text(inner))
            console.print(table)
        else:
            console.print(f"{key}: {_text(value)}", highlight=False)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""`swarmnode bench WHAT`: the benchmarks of one machine. A checkout of the sources adds those of `benchmarks/`."""

from __future__ import annotations

import json
from typing import Any

import click

from swarmnode.cli.output.console import paper


def show(found: dict[str, Any], as_json: bool) -> None:
    """Print `found` as one JSON object, or as tables: a list of rows is a table, a dict one with two columns."""
    if as_json:
        click.echo(json.dumps(found))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console = paper()
    for key, value in found.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = _without_empty(value)
            heads = (name.replace("_", " ").replace("/", " / ") for name in value[0])
            table = Table(*heads, title=key, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
            table.columns[0].no_wrap = True  # the name; other columns wrap, and nothing is cut
            for column in table.columns[1:]:
                column.overflow = "fold"
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


def _without_empty(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rows` without the columns that are empty in all of them."""
    said = [name for name in rows[0] if any(row[name] == row[name] for row in rows)]
    return [{name: row[name] for name in said} for row in rows]


def _text(value: object) -> str:
    if value != value:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(short_help="measure this machine")
def command() -> None:
    """Benchmarks on this machine. Each command measures both sides of its comparison and prints the results."""


@command.command()
@click.option("--device", default="auto", metavar="auto|cpu|cuda|cuda:1", help="Device.")
@click.option("--small", is_flag=True, help="A model of a few megabytes; seconds on a CPU.")
@JSON
def gpu(device: str, small: bool, as_json: bool) -> None:
    """A stage on a device: speed beside that of its layers alone and of plain PyTorch's, share of the device's own
    speed, bytes, waits, codecs, and equality with the CPU. One table to paste."""
    from swarmnode.bench import gpu as measured
    from swarmnode.model.device import resolve_device

    show(measured.run(device=resolve_device(device), small=small), as_json)

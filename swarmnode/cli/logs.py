"""`swarmnode logs -f`: events of a node, running or stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from swarmnode.cli.option.param import home_option
from swarmnode.errors import NoDaemon
from swarmnode.metrics.event import LEVELS
from swarmnode.metrics.events import digits
from swarmnode.untrusted_text import printable

POLL_S = 0.2
TAIL_BYTES = 1 << 20


@click.command(short_help="print the node's events")
@click.option("--follow", "-f", is_flag=True, help="Print new events as they come, until Ctrl-C.")
@click.option(
    "--lines", "-n", type=click.IntRange(0, 100_000), default=20, show_default=True, help="Number of last events."
)
@click.option("--level", type=click.Choice(LEVELS), default="info", show_default=True, help="This level and above.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON lines unchanged.")
@home_option
def command(follow: bool, lines: int, level: str, as_json: bool, home: Path) -> None:
    """Print the events of the node in --home, running or stopped (its events.jsonl)."""
    path = home / "events.jsonl"
    if not path.is_file():
        raise NoDaemon(f"no node has run in {path.parent}: give its folder with --home")
    worse = LEVELS[LEVELS.index(level) :]
    shown = [text for text in _last(path) if (row := _parse(text)) is not None and row.get("level") in worse]
    for text in shown[len(shown) - min(lines, len(shown)) :]:
        _show(text, as_json)
    if follow:
        for text in _coming(path):
            row = _parse(text)
            if row is not None and row.get("level") in worse:
                _show(text, as_json)


def _last(path: Path) -> list[str]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()


def _coming(path: Path) -> Iterator[str]:
    """Lines written from now on, across rotations (the file is renamed and a new one begun)."""
    file = path.open("rb")
    file.seek(0, os.SEEK_END)
    rest = b""
    while True:
        more = file.read(64 << 10)
        if more:
            *whole, rest = (rest + more).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
            continue
        try:
            if path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                file.close()
                file = path.open("rb")
                continue
        except FileNotFoundError:
            pass
        time.sleep(POLL_S)


def _parse(text: str) -> dict[str, Any] | None:
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def _show(text: str, as_json: bool) -> None:
    row = _parse(text)
    if as_json or row is None:
        click.echo(printable(text, len(text)))
        return
    fields = row.get("fields")
    said = " ".join(f"{key}={_short(value)}" for key, value in fields.items()) if isinstance(fields, dict) else ""
    said = printable(said, len(said))
    colour = {"warning": "yellow", "error": "red", "debug": "bright_black"}.get(str(row.get("level")))
    no_colour = bool(os.environ.get("NO_COLOR"))
    event = click.style(printable(str(row.get("event", "?"))), fg=None if no_colour else colour)
    click.echo(
        f"{printable(str(row.get('ts', '')))[11:19]} {event} {said}".rstrip(), color=False if no_colour else None
    )


def _short(value: object) -> str:
    text = digits(value) if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 120 else text[:119] + "…"

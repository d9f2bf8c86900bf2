"""Verbs that look at the node of this machine, running or not: status, top, logs, receipts, identity."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import json
import os
import time
import urllib.request
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarmnode.app.cli.option.param import DURATION, FOLDER, home_option
from swarmnode.app.cli.output.console import paper
from swarmnode.app.control import client
from swarmnode.base.errors import NoDaemon, Unavailable, UsageError, cause_of
from swarmnode.base.metrics.event import LEVELS, told
from swarmnode.base.metrics.events import digits, tail
from swarmnode.base.untrusted_text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from swarmnode.base.wire.call_pb2 import Receipt

METRICS_TIMEOUT_S = 5.0
INPUT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="status of the node on this machine, once or live")
@home_option
@click.option("--live", is_flag=True, help="Show it at each change, on a terminal, until Ctrl-C.")
@click.option("--every", "every_s", type=DURATION, default=1.0, show_default="1s", help="With --live: between updates.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole status as one JSON object.")
@click.option("--metrics", is_flag=True, help="Print its metrics, in Prometheus's text format.")
def status(home: Path, live: bool, every_s: float, as_json: bool, metrics: bool) -> None:
    """Query the node in --home through its control socket, and print its stage, state, speed, losses, limits and peers.

    Exit code 69 if no node runs there.
    """
    if live + as_json + metrics > 1:
        raise click.UsageError("--live, --json and --metrics are forms of the status: give one")
    if live:
        _show_live(home, every_s)
        return
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
            raise Unavailable(f"{address} does not answer ({cause_of(error)}): try again") from None
        return
    from swarmnode.app.local.swarm_view import NodeWatch, picture

    watch = NodeWatch()
    watch.add(0.0, reply)
    paper().print(picture(watch))


def _show_live(home: Path, every_s: float) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        raise UsageError("--live needs a terminal: use `swarmnode status`, with --json for programs")
    asyncio.run(_follow(console, every_s, home))


async def _follow(console: Console, every_s: float, home: Path) -> None:
    from rich.live import Live

    from swarmnode.app.control.watch import watch
    from swarmnode.app.local.swarm_view import NodeWatch, picture

    looks = NodeWatch()
    with Live(console=console, auto_refresh=False, screen=True) as live:
        async for status in watch(home, every_s):
            looks.add(time.monotonic(), status)
            live.update(picture(looks), refresh=True)


POLL_S = 0.2


@click.command(short_help="print the node's events")
@click.option("--follow", "-f", is_flag=True, help="Print new events as they come, until Ctrl-C.")
@click.option("--lines", "-n", type=click.IntRange(0, 100_000), default=20, help="Number of last events.")
@click.option("--level", type=click.Choice(LEVELS), default="info", help="This level and above.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON lines unchanged.")
@home_option
def logs(follow: bool, lines: int, level: str, as_json: bool, home: Path) -> None:
    """Print the events of the node in --home, running or stopped (its events.jsonl)."""
    path = home / "events.jsonl"
    if not path.is_file():
        raise NoDaemon(f"no node has run in {path.parent}: give its folder with --home")
    worse = LEVELS[LEVELS.index(level) :]
    last = deque(_of_levels(tail(path), worse), maxlen=lines)
    for text, row in itertools.chain(last, _of_levels(_coming(path), worse) if follow else ()):
        _show(text, row, as_json)


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


def _of_levels(texts: Iterable[str], levels: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of these levels, as they are and parsed."""
    for text in texts:
        with contextlib.suppress(ValueError):
            if isinstance(row := json.loads(text), dict) and row.get("level") in levels:
                yield text, row


def _show(text: str, row: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(printable(text, len(text)))
        return
    fields = row.get("fields")
    said = (
        " ".join(f"{key}={_short(told(key, value))}" for key, value in fields.items())
        if isinstance(fields, dict)
        else ""
    )
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


@click.command(short_help="receipts for this node's work, signed by its clients")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, with signatures.")
@click.option("--check", "checked_file", type=INPUT, metavar="FILE", help="Verify a file of --json, of any machines.")
@click.option(
    "--page",
    "folder",
    type=FOLDER,
    metavar="DIR",
    help="Write a static page, a card and the receipts there, for any web host.",
)
@click.option("--with", "others", type=INPUT, multiple=True, metavar="FILE", help="With --page: others' --json, too.")
@click.option("--name", help="With --page: a name for this machine.")
@home_option
def receipts(
    as_json: bool,
    checked_file: Path | None,
    folder: Path | None,
    others: tuple[Path, ...],
    name: str | None,
    home: Path,
) -> None:
    """Print the receipts of the node in --home, running or not, verified again: the client and the number of samples.

    A client signs what was done for it; anybody can check that with its peer id alone. Receipts add up over runs:
    --page makes a page of them, of this machine and, with --with, of a whole team.
    """
    from swarmnode.app.local import contribution
    from swarmnode.net.membership.receipt import receipt_to_json

    now_s = time.time()
    if (others or name) and folder is None:
        raise click.UsageError("--with and --name belong to --page DIR")
    if checked_file is not None:
        for one in contribution.given_works(contribution.read_file(checked_file)):
            click.echo(f"{one.peer}  {contribution.weekly(one, int(now_s) // contribution.DAY_S)}")
        return
    kept = list(_kept_receipts(home))
    if folder is not None:
        given = [receipt for file in others for receipt in contribution.read_file(file)]
        names = {receipt.server: name for receipt in kept} if name else {}
        click.echo(contribution.write_page(folder, [*kept, *given], names, now_s))
        return
    for receipt in kept:
        click.echo(json.dumps(receipt_to_json(receipt)) if as_json else _receipt_line(receipt))
    click.echo(f"{sum(receipt.samples for receipt in kept):,} samples in all", err=True)
    for one in contribution.given_works(kept):
        click.echo(contribution.weekly(one, int(now_s) // contribution.DAY_S), err=True)


def _kept_receipts(home: Path) -> Iterator[Receipt]:
    """The receipts in `home` that verify; the others are told."""
    from swarmnode.app.machine.receipt_store import checked

    for receipt, fault in checked(home):
        if fault:
            click.echo(f"left out: {fault}", err=True)
        else:
            yield receipt


def _receipt_line(receipt: Receipt) -> str:
    until = datetime.datetime.fromtimestamp(receipt.until_unix_s).strftime("%Y-%m-%d %H:%M")
    return (
        f"{until}  run {receipt.run_id[:16]}  {receipt.client}  "
        f"{receipt.microbatches:,} microbatches, {receipt.samples:,} samples"
    )


@click.command(short_help="this machine's peer id")
@home_option
def identity(home: Path) -> None:
    """Print the peer id of the node in --home; its key is made if there is none."""
    from swarmnode.net.transport.key_file import load_or_create

    click.echo(load_or_create(home / "node.key").peer_id)

"""The run's data set and base model on a real node: this machine's cache, the folders its user named, the web, and
meeting points."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import stage_name
from swarmnode.base.metrics.events import Echo
from swarmnode.data.chunk_store import ChunkCache, other_set
from swarmnode.data.index import Index
from swarmnode.keep.transfer.chunk_set import (
    BlobSource,
    ChunkServer,
    ChunkSet,
    ServeLimits,
    SetIndex,
    SetPorts,
    WebReader,
    base_set_of,
    data_set_of,
)
from swarmnode.net.membership.state_line import lost_text
from swarmnode.net.transport.address import parse_bootstraps

if TYPE_CHECKING:
    from swarmnode.app.daemon.control_api import DaemonContext
    from swarmnode.data.base_index import BaseIndex

CACHE_FOLDER = "chunks"
GIVING = ServeLimits(asker_burst=256 << 20, asker_rate=16 << 20, all_burst=1 << 30, all_rate=64 << 20, yields=False)
"""For a node that trains nothing (guess): 500 Mbit/s, less with --max-give or a slower line. It sees nobody at work:
those whose signed records it heard count as members."""


FROM = {
    "ring": "a neighbour's copy",
    "pieces": "stages as they were before",
    "own": "its own memory",
    "checkfree": "made from its neighbours",
    "base": "the model that the run starts from",
}
"""For people, where a state came from; other ways are plain words already."""


def told_on_terminal(then: Echo) -> Echo:
    """`then`, and on stderr what whoever started this machine should read."""

    def echo(level: str, event: str, fields: Mapping[str, object]) -> None:
        then(level, event, fields)
        if event == "data.refused":
            click.echo(f"this machine does not feed the run: {fields.get('reason')}", err=True)
        elif event in ("clock.wrong", "clock.right"):
            click.echo(fields.get("reason", "this machine's clock is right again"), err=True)
        elif event == "recovery.waiting":
            click.echo(f"{_stage(fields)} waits: {fields.get('reason')}", err=True)
        elif event == "recovery.done" and (way := str(fields.get("method"))) != "replica":
            click.echo(
                f"{_stage(fields)} goes on from round {fields.get('round')}, {fields.get('behind')} samples"
                f" behind the newest known ({FROM.get(way, way)}: {fields.get('reason')}):"
                f" {lost_text(fields.get('behind'))}",
                err=True,
            )
        elif event == "node.twin" and fields.get("stays"):
            click.echo(
                "this machine goes on: another process runs with its key (was its home copied?), which began later and"
                " is to stand aside",
                err=True,
            )
        elif event == "state.kept":
            said = f"{fields.get('reason')}: {lost_text(fields.get('lost'))}"
            click.echo(f"this machine goes on with the state it had: {said}", err=True)
        elif event == "state.behind":
            click.echo(f"this machine takes the newer state of its stage: {fields.get('reason')}", err=True)

    return echo


def _stage(fields: Mapping[str, object]) -> str:
    stage = fields.get("stage")
    return stage_name(stage) if isinstance(stage, int) else "a stage"


def data_ports(process: DaemonContext, stack: contextlib.AsyncExitStack) -> SetPorts[Index] | None:
    """Data ports of a node that may feed; None if the run's text is not a data set. Opens nothing yet."""
    if (data := _data(process, process.options.data_root, "its chunks are fetched")) is None:
        return None
    return _ports(process, stack, data, process.manifest.data.locations)


def base_ports(process: DaemonContext, stack: contextlib.AsyncExitStack) -> SetPorts[BaseIndex] | None:
    """Ports of the base model of a node that trains; None if the run starts from random weights. Opens nothing yet."""
    if (base := _base(process)) is None:
        return None
    return _ports(process, stack, base, process.manifest.base.locations)


def _data(process: DaemonContext, folder: Path | None, then: str) -> ChunkSet[Index] | None:
    """The run's data set, if it has one. Tells on stderr where --data-root holds another; `then` is what follows."""
    options = process.options
    data = process.manifest.data
    if data.source != "index":
        return None
    if (
        options.data_root is not None
        and (reason := other_set(options.data_root, bytes.fromhex(data.index))) is not None
    ):
        click.echo(f"--data-root: {reason}: {then}", err=True)
    return data_set_of(process.manifest, _cache(process), folder, process.telemetry)


def _base(process: DaemonContext) -> ChunkSet[BaseIndex] | None:
    """The model that the run starts from, if it does."""
    if not process.manifest.base.index:
        return None
    return base_set_of(process.manifest, _cache(process), process.options.base_folder, process.telemetry)


def _ports(
    process: DaemonContext, stack: contextlib.AsyncExitStack, of: ChunkSet[SetIndex], locations: Sequence[str]
) -> SetPorts[SetIndex]:
    points = [peer for peer, _ in parse_bootstraps(process.options.bootstrap)]
    return SetPorts(of, _web(process, stack) if locations else None, lambda: points)


def _web(process: DaemonContext, stack: contextlib.AsyncExitStack) -> WebReader:
    from swarmnode.net.transport import web as http  # brings aiohttp

    rules = http.AddressRules(private=process.options.allow_private_addresses)
    reader = http.HttpRangeReader(rules, process.transport.throttle)
    stack.push_async_callback(reader.close)
    return reader


async def give_chunks(process: DaemonContext, folder: Path | None) -> None:
    """Serve the chunks in `folder`, in the folder of the base model and in this machine's cache to members, from a
    bootstrap or coordinator."""
    sources = list[BlobSource]()
    for each in (_data(process, folder, "members get no chunks of it from here"), _base(process)):
        with contextlib.suppress(Unavailable):
            if each is not None:
                await each.open()
                sources.append(each)
    if sources:
        limits = replace(GIVING, day_nbytes=process.options.max_give_nbytes)
        heard = process.directory.contacts.known
        ChunkServer(sources, process.transport, process.telemetry, limits, heard.__contains__).serve()


def _cache(process: DaemonContext) -> ChunkCache:
    return ChunkCache(process.options.cache / CACHE_FOLDER, process.options.data_cache_nbytes)

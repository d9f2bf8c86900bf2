"""Runs a dashboard: assembles board, history, collector, heartbeat and server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnode import __version__
from swarmnode.dashboard import view
from swarmnode.dashboard.board import Board
from swarmnode.dashboard.collector import Collector
from swarmnode.dashboard.downloads import ModelDownloads
from swarmnode.dashboard.heartbeat import Heartbeat
from swarmnode.dashboard.history import History
from swarmnode.dashboard.server import DashboardServer
from swarmnode.ids import RunId
from swarmnode.machine.run_archive import Archive
from swarmnode.manifest import Manifest
from swarmnode.ports import Clock, Directory, Telemetry, Transport
from swarmnode.wire import record_pb2


@dataclass(frozen=True, slots=True)
class PageAddress:
    """The address of the page and the join lines that it shows. `public` lets other machines read it."""

    host: str = "127.0.0.1"
    port: int = 0
    public: bool = False
    join: Sequence[str] = ()
    publish: bool = True  # the page offers the archive's model for download


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A running dashboard. `url` is the page's address."""

    url: str
    live: Heartbeat
    collector: Collector
    archive: Archive | None = None


def history_path(home: Path, run_id: RunId) -> Path:
    """The file in a coordinator's home that holds the history of a run."""
    return home / f"history-{run_id[:16]}.sqlite"


@contextlib.asynccontextmanager
async def dashboard(
    manifest: Manifest,
    run_id: RunId,
    signed: record_pb2.SignedManifest,
    home: Path,
    place: PageAddress,
    *,
    transport: Transport,
    directory: Directory,
    clock: Clock,
    telemetry: Telemetry,
    archive_of: Callable[[Callable[[int], float | None]], Archive | None] = lambda reported: None,
) -> AsyncIterator[Dashboard]:
    """Serve the page of a run as long as the context is open. `archive_of` gets a function from a sample count to the
    nearest validation loss that the swarm reported. Raises UsageError (port), LocalFault (history), and whatever
    `archive_of` raises."""

    def refused(reason: str) -> None:
        telemetry.event("dashboard.history_failed", level="warning", reason=reason)

    board = Board(manifest, run_id)
    history = History.open(history_path(home, run_id), run_id, refused)
    try:
        history.restore(board)
        archive = archive_of(board.validation_near)
        offer = None if archive is None else ModelDownloads(archive, download=place.publish)
        live = Heartbeat(board, history, clock, offer)
        facts = view.run(board, run_id, place.join, __version__)
        server = DashboardServer(live, facts, signed, public=place.public)
        url = await server.start(place.host, place.port)
        collector = Collector(board, run_id, transport, directory, clock)
        try:
            async with asyncio.TaskGroup() as tasks:
                working = [tasks.create_task(collector.run()), tasks.create_task(live.run())]
                telemetry.event("dashboard.serving", url=url)
                yield Dashboard(url, live, collector, archive)
                await server.close()
                for task in working:
                    task.cancel()
        finally:
            await server.close()
    finally:
        history.close()

"""A running dashboard on given ports: board, history, collector, heartbeat and server put together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnode import __version__
from swarmnode.dashboard import view
from swarmnode.dashboard.board import Board
from swarmnode.dashboard.collect import Collector
from swarmnode.dashboard.history import History
from swarmnode.dashboard.live import Live
from swarmnode.dashboard.server import DashboardServer
from swarmnode.ids import RunId
from swarmnode.manifest import Manifest
from swarmnode.ports import Clock, Directory, Telemetry, Transport
from swarmnode.wire import record_pb2


@dataclass(frozen=True, slots=True)
class Place:
    """Where the page is served, and what it tells people who want to join. `public` lets other machines look."""

    host: str = "127.0.0.1"
    port: int = 0
    public: bool = False
    join: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`url` is the page's address."""

    url: str
    live: Live
    collector: Collector


def history_path(home: Path, run_id: RunId) -> Path:
    """The file in a coordinator's home that holds the history of a run."""
    return home / f"history-{run_id[:16]}.sqlite"


@contextlib.asynccontextmanager
async def dashboard(
    manifest: Manifest,
    run_id: RunId,
    signed: record_pb2.SignedManifest,
    home: Path,
    place: Place,
    *,
    transport: Transport,
    directory: Directory,
    clock: Clock,
    telemetry: Telemetry,
) -> AsyncIterator[Dashboard]:
    """Serve the page of a run as long as the context is open. Raises UsageError (port), LocalFault (history)."""

    def refused(reason: str) -> None:
        telemetry.event("dashboard.history_failed", level="warning", reason=reason)

    board = Board(manifest, run_id)
    history = History.open(history_path(home, run_id), run_id, refused)
    try:
        history.restore(board)
        live = Live(board, history, clock)
        server = DashboardServer(live, view.run(board, run_id, place.join, __version__), signed, public=place.public)
        url = await server.start(place.host, place.port)
        collector = Collector(board, run_id, transport, directory, clock)
        try:
            async with asyncio.TaskGroup() as tasks:
                working = [tasks.create_task(collector.run()), tasks.create_task(live.run())]
                telemetry.event("dashboard.serving", url=url)
                yield Dashboard(url, live, collector)
                await server.close()
                for task in working:
                    task.cancel()
        finally:
            await server.close()
    finally:
        history.close()

"""Cost of the dashboard with a thousand nodes, to the coordinator and to the browser.

The nodes are simulated (benchmarks/swarm/fake_fleet.py); the rest is real: verification of signed records, calls for
reports, alarms, SQLite, HTTP and server-sent events, and Debian's Chromium with the page. The simulated nodes' own
arithmetic runs in the same thread; it is timed and subtracted.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.memory_network import MemoryTransport
from benchmarks.swarm.fake_fleet import FakeFleet
from swarmnode.app.dashboard.server import load_assets
from swarmnode.app.dashboard.start import Dashboard, PageAddress, dashboard
from swarmnode.app.machine.run_archive import Archive
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId
from swarmnode.run.manifest import GossipSpec, LimitsSpec, Manifest, ModelSpec, PipelineSpec, sign

RUN = RunId("ab" * 32)
STEP_S = 2.0  # between two updates of the simulated nodes
WARM_S = 20.0  # until the history has some points and most nodes have reported
WINDOW_S = 30.0
CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

LIMITS = {
    "update_ms": 100.0,
    "server_share": 0.05,
    "first_paint_ms": 1000.0,
    "assets_bytes": 1_000_000,
}
"""Targets."""


class SilentTelemetry:
    """ports.Telemetry that keeps nothing."""

    def event(self, event: str, *, level: str = "info", **fields: object) -> None: ...

    def count(self, metric: str, value: float = 1.0, **labels: str) -> None: ...

    def gauge(self, metric: str, value: float, **labels: str) -> None: ...

    def observe(self, metric: str, value: float, **labels: str) -> None: ...


def manifest_for(nodes: int) -> Manifest:
    """A run with about 40 nodes per stage at most, with an announce period as long as a large swarm's."""
    stages = max(2, min(24, nodes // 40 or 3))
    slow = nodes > 100
    return Manifest(
        name="meadow",
        model=ModelSpec(layers=max(6, stages), width=256),
        pipeline=PipelineSpec(stages=stages),
        gossip=GossipSpec(round_samples=2048 if not slow else 65_536),
        limits=LimitsSpec(announce_period_s=10.0 if slow else 2.0, record_ttl_s=60.0 if slow else 15.0),
    )


@contextlib.asynccontextmanager
async def watched(
    fake_fleet: FakeFleet, home: Path, port: int = 0, archive: Archive | None = None
) -> AsyncIterator[Dashboard]:
    """A dashboard of `fake_fleet`, which works while the context is open."""
    transport = MemoryTransport(fake_fleet.network, Identity.of_seed(b"w" * 32).peer_id, RUN)
    signed = sign(fake_fleet.manifest, Ed25519PrivateKey.from_private_bytes(b"o" * 32))
    await fake_fleet.announce(fake_fleet.manifest.limits.record_ttl_s)
    async with (
        dashboard(
            fake_fleet.manifest,
            RUN,
            signed,
            home,
            PageAddress(port=port, join=("swarmnode join swarm1.MADEUP",)),
            transport=transport,
            directory=fake_fleet.directory,
            clock=fake_fleet.clock,
            telemetry=SilentTelemetry(),
            archive_of=lambda reported: archive,
        ) as board,
        asyncio.TaskGroup() as tasks,
    ):
        working = tasks.create_task(_work(fake_fleet))
        yield board
        working.cancel()


async def _work(fake_fleet: FakeFleet) -> None:
    """Let all nodes work; publish a few records at a time, as in a real swarm."""
    period_s = fake_fleet.manifest.limits.announce_period_s
    share = max(1, round(len(fake_fleet.nodes) * STEP_S / period_s))
    at = 0
    while True:
        fake_fleet.train(STEP_S)
        for fake_node in (fake_fleet.nodes * 2)[at : at + share]:
            if fake_node.identity.peer_id in fake_fleet.network.nodes:
                await fake_fleet.directory.announce(
                    fake_fleet.record(fake_node, fake_fleet.manifest.limits.record_ttl_s)
                )
        at = (at + share) % len(fake_fleet.nodes)
        await asyncio.sleep(STEP_S)


def run(nodes: int, tell: Callable[[str], None], look_s: float = 0.0, port: int = 0) -> dict[str, Any]:
    """Measure; or with `look_s` only serve the page that long."""
    return asyncio.run(_run(nodes, tell, look_s, port))


async def _run(nodes: int, tell: Callable[[str], None], look_s: float, port: int) -> dict[str, Any]:
    fake_fleet = FakeFleet(manifest_for(nodes), RUN, nodes)
    for _ in range(30):
        fake_fleet.train(STEP_S)
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as home:
        async with watched(fake_fleet, Path(home), port) as board:
            tell(f"dashboard {board.url}")
            if look_s:
                await asyncio.sleep(look_s)
                return {"nodes": nodes}
            await asyncio.sleep(WARM_S)
            reason = no_browser()
            browsing = None if reason else asyncio.create_task(asyncio.to_thread(_browse, board.url))  # noqa: TID251
            cpu_s = time.thread_time()
            fake_fleet_s = fake_fleet.cpu_s
            wall_s = time.perf_counter()
            await asyncio.sleep(WINDOW_S)
            fake_fleet_s = fake_fleet.cpu_s - fake_fleet_s
            cpu_s = time.thread_time() - cpu_s - fake_fleet_s
            wall_s = time.perf_counter() - wall_s
            seen = {"skipped": reason} if browsing is None else await browsing
    assets = load_assets()
    found = {
        "nodes": nodes,
        "stages": fake_fleet.manifest.pipeline.stages,
        "server_share": cpu_s / wall_s,
        "crowd_share": fake_fleet_s / wall_s,
        "assets_bytes": sum(len(asset.body) for asset in assets.values()),
        "assets_packed_bytes": sum(len(asset.packed) for asset in assets.values()),
        **seen,
    }
    found["within_limits"] = all(found[key] < limit for key, limit in LIMITS.items() if key in found)
    return found


def no_browser() -> str:
    """Reason why no page can be opened here; "" if one can."""
    if importlib.util.find_spec("playwright") is None:
        return "the Python package playwright is not installed"
    return "" if shutil.which(CHROMIUM) else f"{CHROMIUM} is not there (apt-get install chromium)"


def _browse(url: str) -> dict[str, Any]:
    """Cost of the page to a browser: first paint, main-thread time per update, longest task."""
    playwright = importlib.import_module("playwright.sync_api")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.add_init_script(
            "window.longest = 0; new PerformanceObserver((list) => { for (const task of list.getEntries())"
            " window.longest = Math.max(window.longest, task.duration); }).observe({type: 'longtask'});"
        )
        page.goto(url)
        for _ in range(600):  # the page's security policy forbids waiting for a condition inside it
            if page.evaluate("performance.getEntriesByName('swarmnode-update').length") >= 3:
                break
            page.wait_for_timeout(100)
        paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        session = page.context.new_cdp_session(page)
        # The main thread's own time: on a loaded machine wall time includes waits for a core.
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        page.evaluate("performance.clearMeasures(); window.longest = 0")
        before = _metrics(session)
        page.wait_for_timeout(1000 * (WINDOW_S - 8))
        after = _metrics(session)
        measured = page.evaluate("performance.getEntriesByName('swarmnode-update').map((each) => each.duration)")
        spent = [float(each) for each in measured]
        longest = float(page.evaluate("window.longest"))
        browser.close()
    updates = max(1, len(spent))
    return {
        "first_paint_ms": float(paint),
        "updates": len(spent),
        "update_ms": 1000.0 * (after["TaskDuration"] - before["TaskDuration"]) / updates,
        "update_script_ms_mean": sum(spent) / updates,
        "update_script_ms_max": max(spent, default=0.0),
        "longest_task_ms": longest,
        "heap_mb": after["JSHeapUsedSize"] / 1e6,
    }


def _metrics(session: Any) -> dict[str, float]:
    return {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}

"""Local swarms of processes for benchmarks: how one is set up, what is waited for and counted."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from swarmnode import manifest as manifests
from swarmnode.errors import LocalFault
from swarmnode.local.child import Child
from swarmnode.local.fleet import Fleet, FleetPlan
from swarmnode.local.place import default_cache
from swarmnode.local.summary import count
from swarmnode.manifest import SIGNED_FILE, Manifest
from swarmnode.metrics import name
from swarmnode.wire.record_pb2 import NODE_STATE_TRAINING

POLL_S = 0.05
BOUND_S = 120.0


@contextlib.contextmanager
def fleet_of(manifest: Manifest, nodes: int) -> Iterator[Fleet]:
    """A fleet of a fresh run of `manifest`, not started, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder_name:
        folder = Path(folder_name)
        manifests.init(folder, manifest)
        manifests.sign_folder(folder)
        plan = FleetPlan(folder, folder / SIGNED_FILE, nodes, manifest.pipeline.stages, default_cache(), manifest.seed)
        yield Fleet(plan, lambda text: None)


def done(fleet: Fleet) -> int:
    """Microbatches whose gradient came back to a feeder."""
    return count(fleet.facts(), name.MICROBATCHES, outcome="done")


def replicas(fleet: Fleet, stage: int) -> list[Child]:
    """Living nodes that train `stage`, in the order they were started."""
    return [
        child
        for child in fleet.alive
        if child.status is not None and child.status.state == NODE_STATE_TRAINING and child.stage == stage
    ]


async def until(fleet: Fleet, condition: Callable[[], bool], what: str) -> None:
    """Poll `fleet` until `condition`. Raises LocalFault that names `what` after BOUND_S."""
    try:
        async with asyncio.timeout(BOUND_S):
            while not condition():
                await fleet.poll()
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise LocalFault(f"not within {BOUND_S:g} s: {what}") from None


def spread(values: list[float]) -> dict[str, float]:
    """p50, p95 and max of `values`, of which there is at least one."""
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))],
        "max": ordered[-1],
    }

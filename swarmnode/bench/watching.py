"""What benchmarks of a local swarm of processes wait for and count."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable

from swarmnode.errors import LocalFault
from swarmnode.local.child import Child
from swarmnode.local.fleet import Fleet
from swarmnode.local.summary import count
from swarmnode.metrics import name
from swarmnode.wire.record_pb2 import NODE_STATE_TRAINING

POLL_S = 0.05
BOUND_S = 120.0


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

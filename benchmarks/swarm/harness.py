"""Local swarms of processes for benchmarks and tests: setup, waits, counts and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.swarm.laws import told
from swarmnode.app.local.child import Child, NodePlan, node_command
from swarmnode.app.local.fleet import START_TIMEOUT_S, Command, Fleet, FleetPlan, Note
from swarmnode.app.local.summary import count, totals
from swarmnode.base.errors import LocalFault
from swarmnode.base.metrics import name
from swarmnode.base.user_folders import default_cache
from swarmnode.base.wire.record_pb2 import NODE_STATE_TRAINING
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.folder import SIGNED_FILE, init, sign_folder

POLL_S = 0.3
FINE_S = 0.05
"""Time between two polls in measurements of seconds. A poll asks every node, at a cost to each."""

LOOK_S = 1.0
"""Time between two searches for processes: each reads the parents of all processes of this machine."""

BOUND_S = 120.0
"""Longest wait for one condition, on a loaded machine."""


LOAD = "30%"
"""Load of each device in tests of anything but speed: a swarm at full speed takes the machine from other programs.
Measured, five tests of tests/live: 124 CPU s in 109 s without a limit, 96 in 118 s with 30 %, 93 in 180 s with 10 %."""


class SwarmHarness:
    """A local swarm, waits for conditions on it, and a record of every process that it ever had."""

    def __init__(self, fleet: Fleet, bound_s: float = BOUND_S) -> None:
        self.fleet = fleet
        self.bound_s = bound_s
        self._processes: dict[int, psutil.Process] = {}
        self._looked_s = -math.inf

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start the fleet; end it by process id on exit, also after errors. Raises LocalFault if it does not start."""
        try:
            await self.fleet.start(asyncio.Event())
            yield
        finally:
            self._look()
            await self.fleet.stop("it is over")
            await self.fleet.reap()

    async def until(self, condition: Callable[[], bool], what: str, poll_s: float = POLL_S) -> None:
        """Poll until `condition`. Raises LocalFault, with what every node is at, after `bound_s`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.bound_s):
                while True:
                    await self.fleet.poll()
                    if loop.time() >= self._looked_s + LOOK_S:
                        self._looked_s = loop.time()
                        self._look()
                    await self.meanwhile()
                    if condition():
                        return
                    await asyncio.sleep(poll_s)
        except TimeoutError:
            at = "; ".join(f"{c.name} stage {c.stage} {c.reason or _state(c)}" for c in self.fleet.everybody)
            raise LocalFault(f"not within {self.bound_s:g} s: {what} ({at})") from None

    async def meanwhile(self) -> None:
        """Called at every poll."""

    async def progress(self, samples: int, what: str) -> None:
        """Wait until `samples` more have been trained."""
        await self.fleet.poll()
        before = self.samples()
        await self.until(lambda: self.samples() >= before + samples, f"{samples} more samples {what}")

    def done(self) -> int:
        """Microbatches whose gradient came back to a feeder."""
        return count(self.fleet.facts(), name.MICROBATCHES, outcome="done")

    def samples(self) -> int:
        return totals(self.fleet.facts()).samples

    def training(self, stage: int | None = None) -> list[Child]:
        """Living nodes that train, of `stage` or of all, in the order of their start."""
        return [child for child in self.fleet.alive if trains(child) and stage in (None, child.stage)]

    def keeps(self, stage: int) -> bool:
        """True if a living node has a snapshot of `stage`. Without one, a lost stage starts from scratch."""
        kept = (fields for child in self.fleet.alive for fields in told(child.plan.home, "recovery.kept"))
        return any(fields["of_stage"] == stage and fields["nbytes"] for fields in kept)

    def left_running(self) -> list[str]:
        """A sentence for every process of the swarm, p2pd included, that outlives it."""
        _, alive = psutil.wait_procs(list(self._processes.values()), timeout=self.bound_s)
        left = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        return [f"process {process.pid} was left running" for process in left]

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of all processes that the swarm ever had."""
        return frozenset(self._processes)

    def _look(self) -> None:
        for child in self.fleet.everybody:
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.alive:
                    process = psutil.Process(child.pid)
                    for each in (process, *process.children(recursive=True)):
                        self._processes.setdefault(each.pid, each)


def trains(child: Child) -> bool:
    """True if the node reports that it trains."""
    return _state(child) == NODE_STATE_TRAINING


def resting(plan: NodePlan, load: str = LOAD) -> Sequence[str]:
    """Command line of a node that computes for a share `load` of the time."""
    return [*node_command(plan), *([] if plan.bootstrap else ["--max-load", load])]


def fleet_in(
    folder: Path,
    manifest: Manifest,
    nodes: int,
    note: Note = lambda text: None,
    command: Command = node_command,
    cache: Path | None = None,
    dashboard_port: int | None = None,
    stage_of: tuple[int, ...] = (),
    data_root: Path | None = None,
    devices: tuple[str, ...] = (),
    start_timeout_s: float = START_TIMEOUT_S,
) -> Fleet:
    """Fleet of a fresh run of `manifest` in `folder`, not started. `cache` None: this user's. `stage_of`: each node's
    stage, if not assigned in turn; `devices`: as in FleetPlan."""
    init(folder, manifest)
    sign_folder(folder)
    stages = manifest.pipeline.stages
    seed = manifest.seed
    plan = FleetPlan(folder, folder / SIGNED_FILE, nodes, stages, cache or default_cache(), seed, command)
    plan = dataclasses.replace(plan, dashboard_port=dashboard_port, stage_of=stage_of, data_root=data_root)
    plan = dataclasses.replace(plan, devices=devices, start_timeout_s=start_timeout_s)
    return Fleet(plan, note)


@contextlib.contextmanager
def swarm_of(manifest: Manifest, nodes: int) -> Iterator[SwarmHarness]:
    """A swarm of a fresh run of `manifest`, not started, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder:
        yield SwarmHarness(fleet_in(Path(folder), manifest, nodes))


def spread(values: list[float]) -> dict[str, float]:
    """p50, p95 and max of `values`, which must not be empty."""
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))],
        "max": ordered[-1],
    }


def _state(child: Child) -> int | None:
    return child.status.state if child.status is not None else None

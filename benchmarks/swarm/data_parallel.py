"""Nodes that average gradients before each step, beside plain PyTorch on the same model, batch and text, at the same
time: samples a core second of both.

Two nodes run beside two processes of DistributedDataParallel over gloo, four beside one plain process, a thread each.
Both sides share the machine in every window, so its other load slows both. A node's core seconds are those of its
process and its p2pd.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.swarm.harness import SwarmHarness, fleet_in, trains
from benchmarks.swarm.pytorch_ddp import DdpTask
from swarmnode.app.local.child import Child
from swarmnode.app.local.fleet import Note
from swarmnode.app.local.summary import NodeFacts, count, parse_series
from swarmnode.app.planner.plan_search import together
from swarmnode.base.metrics import name
from swarmnode.base.user_folders import default_cache
from swarmnode.model.device import autocasts
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.folder import SIGNED_FILE
from swarmnode.run.manifest.recipe import parameters_of

PROCESSES = {2: 2}  # of DDP beside so many nodes; one plain process beside others
WARM_SAMPLES = 128  # guess: both sides train steadily by then
POLL_S = 2.0  # guess: a poll costs each node a millisecond


def of_one_stage(manifest: Manifest, nodes: int, batch: int) -> Manifest:
    """`manifest` in one stage, whose `nodes` share batches of `batch` samples and average gradients before a step."""
    inner = dataclasses.replace(
        manifest.inner,
        inner_batch=batch,
        inner_batch_max=0,
        microbatch=min(manifest.inner.microbatch, max(1, batch // nodes)),
        replica_batch_min=1,
    )
    pipeline = dataclasses.replace(manifest.pipeline, stages=1)
    return together(dataclasses.replace(manifest, pipeline=pipeline, inner=inner))


@dataclass(frozen=True, slots=True)
class SideWork:
    """Samples that one side has trained, and its core seconds."""

    samples: int
    core_s: float
    compute_s: float = 0.0  # of core_s: of nodes, what their compute threads worked
    p2pd_s: float = 0.0

    def since(self, before: SideWork) -> SideWork:
        mine = dataclasses.astuple(self)
        theirs = dataclasses.astuple(before)
        return SideWork(*(b - a for a, b in zip(theirs, mine, strict=True)))

    @property
    def rate(self) -> float:
        """Samples a core second."""
        return self.samples / max(self.core_s, 1e-9)


class PlainProcesses:
    """Processes of `pytorch_ddp`, ended by process id."""

    def __init__(self, folder: Path, manifest: Manifest, world: int, bf16: bool) -> None:
        task = DdpTask(str(folder / SIGNED_FILE), str(default_cache()), 0, world, _free_port(), 0, bf16)
        task = dataclasses.replace(task, batch=manifest.inner.inner_batch)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._logs: list[IO[str]] = []
        self._processes = []
        for rank in range(world):
            self._logs.append((folder / f"plain-{rank}.json").open("w+"))
            line = [
                sys.executable,
                "-m",
                "benchmarks.swarm.pytorch_ddp",
                dataclasses.replace(task, rank=rank).to_json(),
            ]
            self._processes.append(subprocess.Popen(line, env=environment, stdout=self._logs[-1], text=True))

    def read(self) -> SideWork:
        """The work until the last step that each has told of; of other steps where one is a step ahead."""
        said = [self._last(log) for log in self._logs]
        return SideWork(min(one["samples"] for one in said), sum(one["core_s"] for one in said))

    @staticmethod
    def _last(log: IO[str]) -> dict[str, Any]:
        log.seek(0)
        lines = [line for line in log.read().splitlines(keepends=True) if line.endswith("\n")]
        return json.loads(lines[-1]) if lines else {"samples": 0, "core_s": 0.0}

    def alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for log in self._logs:
            log.close()


def run(
    preset: Manifest, nodes: Sequence[int], batch: int, seconds: float, windows: int, note: Note
) -> list[dict[str, Any]]:
    """A row for each number of `nodes`: both sides' samples a core second and their ratio, the median of `windows`
    windows of `seconds` each, and the least and most ratio."""
    return [asyncio.run(_race(preset, many, batch, seconds, windows, note)) for many in nodes]


async def _race(preset: Manifest, nodes: int, batch: int, seconds: float, windows: int, note: Note) -> dict[str, Any]:
    manifest = of_one_stage(preset, nodes, batch)
    bf16 = autocasts("cpu")
    world = PROCESSES.get(nodes, 1)
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name_:
        folder = Path(name_)
        swarm = SwarmHarness(fleet_in(folder, manifest, nodes, note))
        async with swarm.running():
            plain = PlainProcesses(folder, manifest, world, bf16)
            try:
                await swarm.until(
                    lambda: (
                        all(map(trains, swarm.fleet.nodes))
                        and swarm.samples() >= WARM_SAMPLES
                        and (plain.read().samples >= WARM_SAMPLES or not plain.alive())
                    ),
                    f"{nodes} nodes and {world} plain processes train",
                )
                assert plain.alive(), f"plain PyTorch ended: {(folder / 'plain-0.json').read_text()[-300:]}"
                found = [await _window(swarm, plain, seconds) for _ in range(windows)]
                resident_mb = max(psutil.Process(child.pid).memory_info().rss for child in swarm.fleet.nodes) / 1e6
            finally:
                plain.end()
    note(f"{nodes} nodes: " + ", ".join(f"{ours.rate / theirs.rate:.2f}" for ours, theirs in found))
    return _row(nodes, world, manifest, bf16, found, resident_mb)


async def _window(swarm: SwarmHarness, plain: PlainProcesses, seconds: float) -> tuple[SideWork, SideWork]:
    """(the work of the nodes, of plain PyTorch) in a window."""
    before = await _read(swarm), plain.read()
    end_s = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end_s:
        await asyncio.sleep(POLL_S)
        await swarm.fleet.poll()
    return (await _read(swarm)).since(before[0]), plain.read().since(before[1])


async def _read(swarm: SwarmHarness) -> SideWork:
    await swarm.fleet.poll()
    facts = swarm.fleet.facts()
    node_s = sum(_cpu_s(psutil.Process(child.pid)) for child in swarm.fleet.nodes)
    p2pd_s = sum(map(_children_s, swarm.fleet.nodes))
    return SideWork(count(facts, name.SAMPLES), node_s + p2pd_s, sum(map(_compute_s, facts)), p2pd_s)


def _compute_s(node: NodeFacts) -> float:
    counters = node.status.counters if node.status is not None else {}
    return sum(value for key, value in counters.items() if parse_series(key)[0] == name.COMPUTE_SECONDS)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _children_s(child: Child) -> float:
    return sum(_cpu_s(process) for process in psutil.Process(child.pid).children(recursive=True))


def _row(
    nodes: int,
    world: int,
    manifest: Manifest,
    bf16: bool,
    found: Sequence[tuple[SideWork, SideWork]],
    resident_mb: float,
) -> dict[str, Any]:
    ratios = [ours.rate / theirs.rate for ours, theirs in found]
    ours = [work for work, _ in found]
    core_s = sum(work.core_s for work in ours)
    return {
        "nodes": nodes,
        "batch": manifest.inner.inner_batch,
        "codec": manifest.gossip.codec,
        "products": "bfloat16" if bf16 else "float32",
        "beside": f"DDP, {world} processes" if world > 1 else "one plain process",
        "samples a core second": statistics.median(work.rate for work in ours),
        "plain": statistics.median(work.rate for _, work in found),
        "ratio": statistics.median(ratios),
        "ratios": [min(ratios), max(ratios)],
        "samples": sum(work.samples for work in ours),
        "parameters": parameters_of(manifest.model),
        "MB of a node": resident_mb,
        "of the core seconds": {
            "compute": sum(work.compute_s for work in ours) / core_s,
            "p2pd": sum(work.p2pd_s for work in ours) / core_s,
        },
    }


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])

"""Throughput of a local swarm relative to plain PyTorch: tokens per second of 6 node processes (3 stages, 2 replicas
each) over those of one process that trains the same model with the same global batch on the same cores, alternating in
one run.

Plain training is measured before and after the swarm, with two threads and with one process per core, with the whole
global batch at once and in the swarm's microbatches. The swarm is compared with the fastest two-thread result. `python
-m benchmarks.swarm.throughput` prints everything.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from swarmnode.app.local.child import Child
from swarmnode.app.local.fleet import Fleet, FleetPlan
from swarmnode.app.local.summary import count
from swarmnode.base.metrics import name
from swarmnode.base.user_folders import default_cache
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.folder import SIGNED_FILE, init, sign_folder
from swarmnode.run.manifest.recipe import PRESETS

NODES = 6
WARM_SAMPLES = 256
MEASURE_S = 40.0
PLAIN_S = 12.0
TARGET_RATIO = 0.6
AIM_RATIO = 0.9
RATE = "tokens_per_s"
UNITS = (RATE, "tokens_per_core_s")


def run(measure_s: float = MEASURE_S, plain_s: float = PLAIN_S, preset: str = "demo") -> dict[str, Any]:
    """{"ratio", "target_ratio", "swarm", "plain", "where"}: see the module."""
    manifest = PRESETS[preset]
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as name_:
        folder = Path(name_)
        init(folder, manifest)
        sign_folder(folder)
        signed = folder / SIGNED_FILE
        batch = manifest.inner.inner_batch * NODES // manifest.pipeline.stages
        before = _plain_all(signed, batch, manifest, plain_s)
        measured = asyncio.run(_swarm(folder, signed, manifest, measure_s))
        after = _plain_all(signed, batch, manifest, plain_s)
    plain = {key: {unit: (before[key][unit] + after[key][unit]) / 2 for unit in UNITS} for key in before}
    best = max(plain["two threads, whole batch"][RATE], plain["two threads, microbatches"][RATE])
    return {
        "ratio": measured["tokens_per_s"] / best,
        "target_ratio": TARGET_RATIO,
        "aim_ratio": AIM_RATIO,
        "ratio to two plain processes of one thread": measured["tokens_per_s"]
        / plain["two processes of one thread"][RATE],
        "ratio of tokens per core second": measured["tokens_per_core_s"]
        / plain["two processes of one thread"]["tokens_per_core_s"],
        "swarm": measured["swarm"],
        "plain tokens/s": {key: found[RATE] for key, found in plain.items()},
        "plain tokens per core second": {key: found["tokens_per_core_s"] for key, found in plain.items()},
        "where the cores' time goes": measured["where"],
    }


def _plain_all(signed: Path, batch: int, manifest: Manifest, seconds: float) -> dict[str, dict[str, float]]:
    micro = manifest.inner.microbatch
    two = _plain(signed, batch, micro, seconds, 1, 2)
    return {
        "two threads, whole batch": _plain(signed, batch, batch, seconds, 2, 1),
        "two threads, microbatches": _plain(signed, batch, micro, seconds, 2, 1),
        "two processes of one thread": two,
    }


def _plain(signed: Path, batch: int, micro: int, seconds: float, threads: int, processes: int) -> dict[str, float]:
    """Tokens per second of `processes` plain processes at once, and per core second (mean)."""
    command = [sys.executable, "-m", "benchmarks.swarm.pytorch_baseline", str(signed), str(default_cache())]
    command += [str(batch), str(micro), str(seconds), str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    children = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    try:
        found = [json.loads(child.communicate(timeout=seconds * 20 + 120)[0]) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    return {
        RATE: sum(float(each[RATE]) for each in found),
        "tokens_per_core_s": sum(float(each["tokens_per_core_s"]) for each in found) / processes,
    }


async def _swarm(folder: Path, signed: Path, manifest: Manifest, measure_s: float) -> dict[str, Any]:
    plan = FleetPlan(folder, signed, NODES, manifest.pipeline.stages, default_cache(), manifest.seed)
    fleet = Fleet(plan, lambda text: None)
    stopping = asyncio.Event()
    try:
        await fleet.start(stopping)
        while _samples(fleet) < WARM_SAMPLES:
            await fleet.poll()
            await asyncio.sleep(0.2)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        first = _Reading(fleet)
        await asyncio.sleep(measure_s)
        await fleet.poll()
        wall = loop.time() - begun
        last = _Reading(fleet)
        return _compare(first, last, wall, manifest)
    finally:
        await fleet.stop("measured")
        await fleet.reap()


def _samples(fleet: Fleet) -> int:
    return count(fleet.facts(), name.SAMPLES)


class _Reading:
    """Counters and processor times of a fleet at one moment."""

    def __init__(self, fleet: Fleet) -> None:
        facts = fleet.facts()
        self.tokens = count(facts, name.TOKENS)
        self.samples = count(facts, name.SAMPLES)
        self.recomputed = count(facts, name.RECOMPUTED_TAPES)
        self.busy = count(facts, name.BUSY)
        self.retried = count(facts, name.MICROBATCHES, outcome="retried")
        self.compute_s: dict[str, float] = {}
        for node in facts:
            if node.status is None:
                continue
            for key, value in node.status.counters.items():
                if key.startswith(name.COMPUTE_SECONDS):
                    kind = key.split('"')[1]
                    self.compute_s[kind] = self.compute_s.get(kind, 0.0) + value
        self.python_s = sum(_cpu_s(psutil.Process(child.pid)) for child in fleet.nodes)
        self.p2pd_s = sum(_p2pd_s(child) for child in fleet.everybody)
        self.bootstrap_s = _cpu_s(psutil.Process(fleet.bootstrap.pid)) if fleet.bootstrap else 0.0
        self.resident_mib = {child.name: _resident_mib(child) for child in fleet.nodes}
        self.used_s = sum(psutil.cpu_times()[:3])
        self.window = [n.status.counters.get(name.WINDOW, 0.0) for n in facts if n.status and n.status.stage == 0]


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _p2pd_s(child: Child) -> float:
    return sum(_cpu_s(process) for process in psutil.Process(child.pid).children(recursive=True))


def _resident_mib(child: Child) -> float:
    return float(psutil.Process(child.pid).memory_info().rss) / (1 << 20)


def _compare(first: _Reading, last: _Reading, wall_s: float, manifest: Manifest) -> dict[str, Any]:
    """Rates over the time between two readings, and shares of the cores' time."""
    cores = float(os.cpu_count() or 1)
    whole = cores * wall_s
    kinds = {kind: last.compute_s[kind] - first.compute_s.get(kind, 0.0) for kind in last.compute_s}
    compute = sum(kinds.values())
    python = last.python_s - first.python_s
    p2pd = last.p2pd_s - first.p2pd_s
    bootstrap = last.bootstrap_s - first.bootstrap_s
    samples = last.samples - first.samples
    microbatches = samples / manifest.inner.microbatch
    tapes = microbatches * (manifest.pipeline.stages - 1)
    ours = python + p2pd + bootstrap
    where = {f"compute, {kind}": seconds / whole for kind, seconds in sorted(kinds.items()) if seconds > 0}
    where |= {
        "python beside compute": (python - compute) / whole,
        "p2pd": p2pd / whole,
        "bootstrap": bootstrap / whole,
        "other programs on this machine": max(0.0, (last.used_s - first.used_s - ours) / whole),
    }
    where["idle"] = max(0.0, 1.0 - sum(where.values()))
    tokens_per_s = (last.tokens - first.tokens) / wall_s
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_core_s": (last.tokens - first.tokens) / max(ours, 1e-9),
        "swarm": {
            "tokens_per_s": tokens_per_s,
            "tokens per core second, everything counted": (last.tokens - first.tokens) / max(ours, 1e-9),
            "tokens_per_compute_s": (last.tokens - first.tokens) / max(compute, 1e-9),
            "tapes run twice (share)": (last.recomputed - first.recomputed) / max(tapes, 1.0),
            "busy answers per microbatch": (last.busy - first.busy) / max(microbatches, 1.0),
            "retries": last.retried - first.retried,
            "window of each feeder": str(last.window),
            "resident MiB of the largest node": max(last.resident_mib.values()),
        },
        "where": where,
    }


if __name__ == "__main__":
    json.dump(run(), sys.stdout, indent=1)
    sys.stdout.write("\n")

"""The swarm side of `bench learning`: real processes on this machine, and their loss by samples and seconds."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import math
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.swarm.harness import fleet_in
from benchmarks.swarm.laws import read_log
from swarmnode.app.local.fleet import Fleet
from swarmnode.app.local.summary import count, totals
from swarmnode.base.errors import LocalFault
from swarmnode.base.metrics import name
from swarmnode.base.ports import Clock
from swarmnode.run.manifest import Manifest

POLL_S = 0.5
LOOK_SAMPLES = 512  # guess: samples between validations, at most; two validators then cost a twelfth of the work
STILL_S = 120.0  # guess: a swarm without progress for this long is stuck
LATER_SHARE = 0.25  # guess: extra training until the loss is validated once more, as a share of the requested samples


@dataclass(frozen=True, slots=True)
class CounterReading:
    """Counters of a swarm at one moment; `core_s` covers all its processes, including p2pd and the bootstrap."""

    unix_s: float
    samples: int
    core_s: float


@dataclass(frozen=True, slots=True)
class Validation:
    """A held-out loss in nats per token, and the swarm's costs from its first sample to then."""

    samples: float
    nats: float
    core_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class SwarmRun:
    """A live swarm: its validations, oldest first, and its costs when it was stopped."""

    replicas: int
    seed: int
    samples: int
    core_s: float
    wall_s: float
    validations: tuple[Validation, ...]


def live(
    manifest: Manifest,
    replicas: int,
    samples: int,
    cache: Path,
    clock: Clock,
    say: Callable[[str], None],
    seed: int = 0,
    data: Path | None = None,
    device: str = "cpu",
) -> SwarmRun:
    """Train a fresh run of `manifest`, whose text lies in `data`, with `replicas` of each stage on `device` until
    `samples` samples are done and the loss was measured once more. Raises LocalFault when the swarm does not start,
    stands still, or measures no loss."""
    nodes = replicas * manifest.pipeline.stages
    often = min(manifest.pipeline.validation_every_samples, LOOK_SAMPLES)
    manifest = dataclasses.replace(
        manifest, pipeline=dataclasses.replace(manifest.pipeline, validation_every_samples=often)
    )
    devices = () if device == "cpu" else (device,)
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder:
        fleet = fleet_in(Path(folder), manifest, nodes, cache=cache, data_root=data, devices=devices)
        say(f"swarm of {nodes} nodes: starting")
        readings = asyncio.run(trained(fleet, samples, clock, lambda text: say(f"swarm of {nodes} nodes: {text}")))
        looks = validations([child.plan.home for child in fleet.nodes], readings)
    if not looks:
        raise LocalFault(f"the swarm of {nodes} nodes measured no held-out loss: are its rounds longer than the bench?")
    first = readings[0]
    last = readings[-1]
    return SwarmRun(replicas, seed, last.samples, last.core_s - first.core_s, last.unix_s - first.unix_s, tuple(looks))


async def trained(fleet: Fleet, samples: int, clock: Clock, say: Callable[[str], None]) -> list[CounterReading]:
    """Readings from the last one without a trained sample to the end."""
    meter = FleetMeter(fleet, clock)
    stopping = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(meter.read_on())  # nodes train before all of them are ready
            try:
                await fleet.start(stopping)
            finally:
                reading.cancel()
        await _until_done(fleet, samples, meter, say)
    finally:
        await fleet.stop("measured")
        await fleet.reap()
    return meter.readings


async def _until_done(fleet: Fleet, samples: int, meter: FleetMeter, say: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    told = 0
    most = -1
    moved_s = loop.time()
    while True:
        gone = await fleet.poll()
        meter.read()
        if gone:
            raise LocalFault(f"{gone[0].name} ended while the swarm trained: {gone[0].reason}")
        facts = fleet.facts()
        done = count(facts, name.SAMPLES)
        validated = max((node.status.loss_validation_samples for node in facts if node.status), default=0)
        if done >= samples and (validated >= samples or done >= samples * (1.0 + LATER_SHARE)):
            return
        if done > most:
            most = done
            moved_s = loop.time()
        elif loop.time() > moved_s + STILL_S:
            raise LocalFault(f"the swarm trained nothing for {STILL_S:g} s, after {done} samples")
        if done >= told + samples // 4:
            told = done
            loss = totals(facts).loss_validation
            say(f"{done} samples" + (f", {loss:.3f} nats" if loss else ""))
        await asyncio.sleep(POLL_S)


class FleetMeter:
    """Reads samples and processor seconds of a fleet repeatedly."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self.readings: list[CounterReading] = []
        self._fleet = fleet
        self._clock = clock
        self._below: dict[int, list[psutil.Process]] = {}

    async def read_on(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(POLL_S)

    def read(self) -> CounterReading:
        """One more reading, of what the last poll of the fleet showed."""
        samples = count(self._fleet.facts(), name.SAMPLES)
        if samples == 0:
            self.readings.clear()
        core_s = sum(self._core_s(child.pid) for child in self._fleet.everybody if child.alive)
        self.readings.append(CounterReading(self._clock.unix_s(), samples, core_s))
        return self.readings[-1]

    def _core_s(self, pid: int) -> float:
        """Core seconds of a node and of its child p2pd. The search for the child is slow, and repeated only until it
        exists."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            below = self._below.get(pid) or process.children(recursive=True)
            self._below[pid] = below
            for each in (process, *below):
                times = each.cpu_times()
                total += times.user + times.system
        return total


def validations(homes: Sequence[Path], readings: Sequence[CounterReading]) -> list[Validation]:
    """Validations of all nodes. Samples are those trained halfway between a measurement's begin and its end: the
    weights move meanwhile."""
    found = []
    first = readings[0]
    for home in homes:
        for event in read_log(home):
            nats = event["fields"].get("loss")
            if event["event"] != "validation.done" or not isinstance(nats, float) or not math.isfinite(nats):
                continue
            now = reading_at(readings, datetime.datetime.fromisoformat(event["ts"]).timestamp())
            if now.samples > 0 and first.unix_s < now.unix_s:
                samples = (min(event["fields"]["samples_total"], now.samples) + now.samples) / 2
                found.append(Validation(samples, nats, now.core_s - first.core_s, now.unix_s - first.unix_s))
    return sorted(found, key=lambda one: one.samples)


def reading_at(readings: Sequence[CounterReading], unix_s: float) -> CounterReading:
    """Reading at `unix_s`, interpolated linearly between two readings; outside them, the first or the last."""
    index = bisect_left(readings, unix_s, key=lambda reading: reading.unix_s)
    if index == 0:
        return readings[0]
    if index == len(readings):
        return readings[-1]
    left = readings[index - 1]
    right = readings[index]
    share = (unix_s - left.unix_s) / (right.unix_s - left.unix_s)
    samples = left.samples + round(share * (right.samples - left.samples))
    return CounterReading(unix_s, samples, left.core_s + share * (right.core_s - left.core_s))

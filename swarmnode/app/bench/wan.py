"""A swarm of real node processes behind home lines, beside the same swarm on loopback.

Each node takes as long for a microbatch as a device of the stated speed (app/machine/device_pace.py), so a few
processors show what as many cards would do, and a busy machine shows the same. Lines are TCP proxies (line_proxy.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from swarmnode.app.bench.line_proxy import HOST, LineProxies, LineSpec
from swarmnode.app.local.child import NodePlan, node_command
from swarmnode.app.local.fleet import FleetPlan
from swarmnode.app.local.session import Conditions, Session, SessionView
from swarmnode.app.local.summary import NodeFacts, count, parse_series
from swarmnode.app.planner.fitted import PROCESSOR_GB, fitted
from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.geography import Address
from swarmnode.base.concurrency import processors
from swarmnode.base.errors import LocalFault, UsageError
from swarmnode.base.metrics import name
from swarmnode.base.user_folders import default_cache
from swarmnode.model.split import stages_of
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.folder import SIGNED_FILE, init, manifest_at, sign_folder
from swarmnode.run.manifest.recipe import PRESETS, Recipe
from swarmnode.run.manifest.text import parse, template, with_value

FIRST_S = 30.0  # measured apart: connections are new, and nodes a part of a step apart
START_S = 300.0  # guess: twelve processes on two processors that others use, too
MEETING_BPS = 1e9  # of the bootstrap's line: it stands on a server
PROCESSOR_FLOPS = 3e10  # of training, one processor: measured, the demo's swarm on two
PROCESSOR_SHARE = 0.5  # of the processors that paced arithmetic may take
VALIDATIONS = 8  # in a run, each of so many samples, which devices are paced for, too
VALIDATION_SAMPLES = 16
MICROBATCH_KINDS = ("forward", "backward")
PURPOSES = ("pipeline", "gossip", "state", "control")


@dataclass(frozen=True, slots=True)
class WanSpec:
    """The fleet: `line` of each node, `flops` of each device, `leaves` of all nodes an hour, `for_s` of each run."""

    nodes: int
    line: LineSpec
    flops: float
    leaves: float
    for_s: float


@dataclass(frozen=True, slots=True)
class WanReading:
    """Sums over all nodes at a moment. `sent`: bytes by purpose; `busy_s`: seconds of devices at microbatches."""

    at_s: float
    samples: int
    round: int
    steps: int
    busy_s: float
    paired: int
    lone: int
    microbatches: Mapping[str, int]
    sent: Mapping[str, int]

    @classmethod
    def of(cls, at_s: float, view: SessionView) -> WanReading:
        seen = view.totals
        facts = view.nodes
        steps = count(facts, name.INNER_STEPS)
        paired = seen.exchanges["paired"]
        lone = seen.exchanges["lone"]
        samples = count(facts, name.SAMPLES)
        return cls(at_s, samples, seen.round, steps, busy_s(facts), paired, lone, seen.microbatches, seen.bytes)


def busy_s(facts: Sequence[NodeFacts]) -> float:
    """Seconds that all devices worked at microbatches."""
    total = 0.0
    for node in facts:
        for key, value in node.status.counters.items() if node.status else ():
            series, labels = parse_series(key)
            if series == name.COMPUTE_SECONDS and labels["kind"] in MICROBATCH_KINDS:
                total += value
    return total


@dataclass(eq=False)
class WanRecorder:
    """The screen of a session that notes a reading each second, from when all nodes train, and ends it in time."""

    nodes: int
    for_s: float
    tell: Callable[[str], None]
    stop: Callable[[str], None] = lambda reason: None
    readings: list[WanReading] = field(default_factory=list)
    curve: dict[int, float] = field(default_factory=dict)  # held-out loss by samples of the run
    failure: str = ""

    def show(self, picture: SessionView) -> None:
        now_s = asyncio.get_running_loop().time()
        for node in picture.nodes:
            if node.status is not None and node.status.loss_validation:
                self.curve[int(node.status.loss_validation_samples)] = node.status.loss_validation
        if not self.readings:
            trains = sum(node.training for node in picture.nodes)
            if picture.totals.samples and trains >= self.nodes:
                self.tell(f"all {self.nodes} nodes train")
            elif picture.ready_s is not None and picture.ready_s > START_S:
                self.failure = f"{trains} of {self.nodes} nodes train after {START_S:.0f} s"
                return self.stop(self.failure)
            else:
                return None
        self.readings.append(WanReading.of(now_s, picture))
        if now_s - self.readings[0].at_s >= self.for_s:
            self.stop("measured")
        return None

    def note(self, text: str) -> None:
        self.tell(text)

    def close(self) -> None:
        return None


def check(spec: WanSpec, manifest: Manifest) -> None:
    """Raises UsageError if the fleet cannot be shown here, with what to change."""
    stages = manifest.pipeline.stages
    if spec.nodes < stages:
        raise UsageError(f"--nodes {spec.nodes}: {stages} stages need at least as many nodes")
    most = PROCESSOR_SHARE * PROCESSOR_FLOPS * processors() / spec.nodes
    if not spec.flops <= most:
        raise UsageError(
            f"--flops {spec.flops:g}: a sample would take {sample_s(manifest, spec.flops):.2g} s on each of"
            f" {spec.nodes} devices, and the {processors()} processors here keep up to {most:.2g} FLOP/s each; give"
            " less, or fewer --nodes. A device that is k times as fast and takes steps of k times as many tokens has"
            " the same ratio of compute to bytes"
        )


def machines_of(spec: WanSpec) -> MachineKind:
    """The fleet as `swarmnode init` and `plan` know it."""
    line = spec.line
    place = Address("local", line.delay_s)
    return MachineKind(
        "home", spec.nodes, spec.flops, line.up_bps / 8, line.down_bps / 8, place, memory_gb=PROCESSOR_GB
    )


def sample_s(manifest: Manifest, flops: float) -> float:
    """Seconds that a device of `flops` takes to train one sample in all stages."""
    return 3.0 * sum(part.cost for part in stages_of(manifest)) * manifest.model.context / flops


def run(
    made: Sequence[Manifest],
    spec: WanSpec,
    tell: Callable[[str], None],
    *,
    data_root: Path | None = None,
) -> dict[str, Any]:
    """Two runs of each manifest, on loopback and behind lines. Raises UsageError, LocalFault, and KeyboardInterrupt
    once every process has ended after a signal."""
    for manifest in made:
        check(spec, manifest)
    seconds = sample_s(made[0], spec.flops)
    found: dict[str, Any] = {
        "fleet": {
            "nodes": spec.nodes,
            "line up / Mbit/s": spec.line.up_bps / 1e6,
            "line down / Mbit/s": spec.line.down_bps / 1e6,
            "round trip / ms": 2e3 * spec.line.delay_s,
            "loss": spec.line.loss,
            "leaves an hour": spec.leaves,
            "FLOP/s of a device": spec.flops,
            "s a sample": seconds,
            "FLOP a bit of the line": spec.flops / spec.line.up_bps,
        }
    }
    every = max(1, round(spec.for_s * spec.nodes / seconds / VALIDATIONS))
    for manifest in made:
        pipeline = dataclasses.replace(
            manifest.pipeline, validation_every_samples=every, validation_samples=VALIDATION_SAMPLES
        )
        manifest = dataclasses.replace(manifest, pipeline=pipeline)
        plain = asyncio.run(_swarm(manifest, spec, tell, shaped=False, data_root=data_root))
        shaped = asyncio.run(_swarm(manifest, spec, tell, shaped=True, data_root=data_root))
        stages = manifest.pipeline.stages
        found[f"{stages} stage{'s' if stages > 1 else ''}"] = compared(manifest, spec, shaped, plain)
    found["load of this machine"] = os.getloadavg()[0]
    return found


@dataclass(frozen=True, slots=True)
class WanRun:
    """The notes of a recorder, and the bytes of the lines. `killed`: nodes that left."""

    readings: Sequence[WanReading]
    curve: Mapping[int, float]
    killed: int
    line_nbytes: int = 0  # through the nodes' uplinks, everything counted
    unknown: int = 0


async def _swarm(
    manifest: Manifest, spec: WanSpec, tell: Callable[[str], None], *, shaped: bool, data_root: Path | None
) -> WanRun:
    with tempfile.TemporaryDirectory(prefix="swarmnode-wan-") as folder:
        init(Path(folder), manifest)
        sign_folder(Path(folder))
        recorder = WanRecorder(spec.nodes, spec.for_s, tell)
        proxies = LineProxies(manifest.seed)
        plan = FleetPlan(
            Path(folder),
            Path(folder) / SIGNED_FILE,
            spec.nodes,
            manifest.pipeline.stages,
            default_cache(),
            manifest.seed,
            lambda one: node_line(one, spec, proxies if shaped else None),
            data_root=data_root,
            start_timeout_s=START_S,
        )
        kill_every_s = 3600.0 / spec.leaves if shaped and spec.leaves else None
        session = Session(plan, Conditions(), recorder, run=manifest.name, kill_every_s=kill_every_s)
        recorder.stop = session.stop
        tell(f"{manifest.pipeline.stages} stages {'behind lines' if shaped else 'on loopback'}")
        try:
            summary = await session.run()
        finally:
            await proxies.close()
        if summary.failure or recorder.failure:
            raise LocalFault(summary.failure or recorder.failure)
        if summary.stopped != "measured":
            raise KeyboardInterrupt
        nbytes = sum(node.up.nbytes for one, node in proxies.nodes.items() if one != "bootstrap")
        return WanRun(recorder.readings, recorder.curve, summary.killed, nbytes, proxies.unknown)


def node_line(plan: NodePlan, spec: WanSpec, proxies: LineProxies | None) -> list[str]:
    """The command line of a node of `plan`: paced, and with `proxies` behind a line of its own."""
    words = list(node_command(plan))
    if not plan.bootstrap:
        words += ["--device-flops", repr(spec.flops)]
    if proxies is not None:
        fast = LineSpec(MEETING_BPS, MEETING_BPS, spec.line.delay_s)
        node = proxies.add(plan.name, fast if plan.bootstrap else spec.line)
        words[words.index("--listen") + 1] = f"/ip4/{HOST}/tcp/{node.port}"
        words += ["--announce", f"/ip4/{HOST}/tcp/{node.announced}"]
    return words


# The figures.


def compared(manifest: Manifest, spec: WanSpec, shaped: WanRun, plain: WanRun) -> dict[str, Any]:
    """The figures of a run behind lines, with its ratios to `plain`, the one on loopback."""
    wall, first, last = _span(shaped)
    before, after = _span(plain)[1:]
    rate, plain_rate = (_tokens_per_s(one, manifest) for one in (shaped, plain))
    done = {kind: last.microbatches[kind] - first.microbatches[kind] for kind in last.microbatches}
    size = manifest.inner.microbatch
    sent = {kind: 8e-6 * (last.sent[kind] - first.sent[kind]) / wall / spec.nodes for kind in PURPOSES}
    opening, rest = _step_ratios(shaped, spec)
    return {
        "busy": (last.busy_s - first.busy_s) / wall / spec.nodes,
        "busy on loopback": _busy(plain, spec),
        "tokens/s": rate,
        "tokens/s over loopback's": rate / plain_rate if plain_rate else float("nan"),
        "rounds met of rounds due": _met(first, last, spec),
        "the same on loopback": _met(before, after, spec),
        "rounds met of rounds tried": _share(last.paired - first.paired, last.lone - first.lone),
        "samples trained": last.samples - first.samples,
        "samples lost": done["lost"] * size,
        "samples retried": done["retried"] * size,
        "nodes that left": shaped.killed,
        "learning over loopback's at equal samples": learning(shaped.curve, plain.curve),
        **{f"Mbit/s up a node, {kind}": rate for kind, rate in sent.items()},
        "Mbit/s up a node, in all, from the start": 8e-6 * shaped.line_nbytes / (wall + 1e-9) / spec.nodes,
        "s a step": wall * spec.nodes / max(1, last.steps - first.steps),
        "a step over its bytes' time, first half minute": opening,
        "a step over its bytes' time, later": rest,
        "callers of no known line": shaped.unknown,
    }


def _span(run: WanRun) -> tuple[float, WanReading, WanReading]:
    first = run.readings[0]
    last = run.readings[-1]
    return max(1e-9, last.at_s - first.at_s), first, last


def _tokens_per_s(run: WanRun, manifest: Manifest) -> float:
    wall, first, last = _span(run)
    return (last.samples - first.samples) * manifest.model.context / wall


def _busy(run: WanRun, spec: WanSpec) -> float:
    wall, first, last = _span(run)
    return (last.busy_s - first.busy_s) / wall / spec.nodes


def _met(first: WanReading, last: WanReading, spec: WanSpec) -> float:
    due = (last.round - first.round) * spec.nodes
    return (last.paired - first.paired) / due if due else float("nan")


def _share(part: int, rest: int) -> float:
    return part / (part + rest) if part + rest else float("nan")


def _step_ratios(run: WanRun, spec: WanSpec) -> tuple[float, float]:
    """Seconds of a step over the time that its bytes take at the uplink's rate: in the first half minute, and later."""
    begun = run.readings[0].at_s
    cut = bisect_left([one.at_s for one in run.readings], begun + FIRST_S)
    middle = run.readings[min(cut, len(run.readings) - 1)]
    return _over_bytes(run.readings[0], middle, spec), _over_bytes(middle, run.readings[-1], spec)


def _over_bytes(first: WanReading, last: WanReading, spec: WanSpec) -> float:
    nbytes = sum(last.sent[kind] - first.sent[kind] for kind in ("pipeline", "gossip"))
    if not nbytes or last.steps == first.steps:
        return float("nan")
    return (last.at_s - first.at_s) * spec.nodes * spec.line.up_bps / (8.0 * nbytes)


def learning(curve: Mapping[int, float], reference: Mapping[int, float]) -> float:
    """The samples that `reference` took to the losses of `curve` over those that `curve` took: the median over the
    later half of it. Both map samples to held-out loss."""
    points = sorted(curve.items())
    ratios = [needed / samples for samples, loss in points[len(points) // 2 :] if (needed := _needed(reference, loss))]
    return median(ratios) if ratios else float("nan")


def _needed(reference: Mapping[int, float], loss: float) -> float:
    """Samples after which `reference` first had this loss, between its points on a line; 0.0: never."""
    before: tuple[int, float] | None = None
    for samples, value in sorted(reference.items()):
        if value <= loss:
            if before is None or before[1] <= value:
                return float(samples)
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (samples - before[0])
        before = (samples, value)
    return 0.0


def manifest_of(run: Path | None, stages: int, settings: Sequence[str], fleet: WanSpec | None = None) -> Manifest:
    """The manifest at `run` (None: the demo's) with so many `stages` and `settings`, each KEY=VALUE; with `fleet` as
    `swarmnode init` makes it for that. Raises ManifestError, UsageError."""
    manifest = PRESETS["demo"] if run is None else manifest_at(run)
    if fleet is not None:
        manifest = fitted(Recipe(manifest, {}), [machines_of(fleet)], stages=stages).recipe.manifest
    lines = with_value(template(manifest), "pipeline.stages", str(stages))
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting[:60]!r}: give KEY=VALUE, for example gossip.method=gradient")
        bare = re.fullmatch(r"-?[\d_.]+(e-?\d+)?|true|false|\[.*\]", value)
        lines = with_value(lines, key, value if bare else json.dumps(value))
    return parse(lines, f"{stages} stages")

"""Learning of a swarm per sample and per second, relative to the best of plain PyTorch.

Both sides train the same model on the same numbered samples and are evaluated on the same held-out ones. The plain side
is a grid of single processes (plain_grid.py); the swarms are real processes (learning_swarm.py). Learning efficiency is
the cost at which the best plain runs reach the swarm's loss, over the swarm's cost.

A curve is a list of points (cost, nats), ordered by cost. Costs are samples or seconds, all above zero. Between two
points nats are linear in the logarithm of the cost.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import tempfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.swarm.learning_page import page
from benchmarks.swarm.learning_swarm import SwarmRun, live
from benchmarks.swarm.plain_grid import (
    GRID,
    GridConditions,
    Journal,
    PlainRun,
    fast_settings,
    machine,
    measure,
    plain_run,
)
from swarmnode.base.errors import UsageError
from swarmnode.base.ports import Clock
from swarmnode.base.user_folders import default_cache
from swarmnode.model.device import autocasts, use_one_thread
from swarmnode.run.manifest import Manifest, ModelSpec
from swarmnode.run.manifest.folder import SIGNED_FILE, init, sign_folder

Point = tuple[float, float]
Curve = Sequence[Point]

WIDTH = 0.25
"""Width of the smoothing window. The error of one evaluation is 0.02 nats (plain AdamW, the demo's model, after
7,000 samples: measured), which is 7 % of the samples there."""


@dataclass(frozen=True, slots=True)
class BoundedNumber:
    """A number, or only a bound of it: `bound` is "", "<" or ">"."""

    value: float
    bound: str = ""

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "–"
        number = f"{self.value:,.0f}" if self.value >= 100 else f"{self.value:.3g}"
        return f"{self.bound} {number}" if self.bound else number

    def over(self, cost: float) -> BoundedNumber:
        """The ratio to `cost`, with the same bound."""
        return BoundedNumber(self.value / cost if cost > 0 else math.nan, self.bound)

    def under(self, cost: float) -> BoundedNumber:
        """`cost` over this; the bound is reversed."""
        turned = {"<": ">", ">": "<"}.get(self.bound, "")
        return BoundedNumber(cost / self.value if self.value > 0 else math.nan, turned)


UNKNOWN = BoundedNumber(math.nan)


def at(curve: Curve, cost: float) -> float:
    """Nats at `cost`; infinite outside the curve."""
    if not curve or not curve[0][0] <= cost <= curve[-1][0]:
        return math.inf
    for (left, before), (right, after) in pairwise(curve):
        if cost <= right:
            return before + (after - before) * _share(left, right, cost)
    return curve[-1][1]


def envelope(curves: Sequence[Curve]) -> list[Point]:
    """Least nats of any of `curves` at or before each cost: their common frontier."""
    found: list[Point] = []
    least = math.inf
    for cost in sorted({cost for curve in curves for cost, _ in curve}):
        least = min(least, *(at(curve, cost) for curve in curves))
        found.append((cost, least))
    return found


def needed(curve: Curve, nats: float) -> BoundedNumber:
    """Cost at which `curve` first reaches `nats`. It is a bound if the first point is already lower ("<") or no point
    is ("> its last cost"); NaN for an empty curve."""
    if not curve:
        return UNKNOWN
    if curve[0][1] < nats:
        return BoundedNumber(curve[0][0], "<")
    for (left, before), (right, after) in pairwise(curve):
        if before == nats:
            return BoundedNumber(left)
        if after <= nats:
            share = (before - nats) / (before - after)
            return BoundedNumber(math.exp(math.log(left) + share * (math.log(right) - math.log(left))))
    return BoundedNumber(curve[-1][0]) if curve[-1][1] == nats else BoundedNumber(curve[-1][0], ">")


def efficiency(plain: Curve, cost: float, nats: float) -> BoundedNumber:
    """Cost of `plain` to reach `nats`, over the `cost` spent for it."""
    return needed(plain, nats).over(cost)


def smoothed(points: Curve, width: float = WIDTH) -> list[Point]:
    """`points` in any order as a curve without the noise of single looks: at each cost the value there of the straight
    line, in nats over the logarithm of the cost, that fits best (least squares) within a factor 1 + `width` of it.

    A line has no bias at the end of a curve, where a mean of neighbours would be too high.
    """
    ordered = sorted(points)
    costs = [cost for cost, _ in ordered]
    reach = 1.0 + width
    found = []
    for cost in dict.fromkeys(costs):
        near = ordered[bisect_left(costs, cost / reach) : bisect_right(costs, cost * reach)]
        found.append((cost, _line_at(near, cost)))
    return found


def _line_at(points: Curve, cost: float) -> float:
    """Value at `cost` of the best-fitting line through `points`; their mean if all have the same cost."""
    xs = [math.log(each) - math.log(cost) for each, _ in points]
    mean_x = sum(xs) / len(xs)
    mean_y = sum(nats for _, nats in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread < 1e-12:
        return mean_y
    slope = sum((x - mean_x) * (nats - mean_y) for x, (_, nats) in zip(xs, points, strict=True)) / spread
    return mean_y - slope * mean_x


def _share(left: float, right: float, cost: float) -> float:
    """Position of `cost` between `left` and `right` on a logarithmic scale, 0 to 1."""
    return (math.log(cost) - math.log(left)) / (math.log(right) - math.log(left)) if right > left else 1.0


RESULTS = "learning.json"
PAGE = "learning.html"
OPTIMIZERS = ("adamw", "muon")
SPEED_S = 4.0  # guess: training time for the speed of one batch size
BUSY_S = 1.0  # guess: the load of other programs is measured for this long before the start
BUSY_MAX = 0.1  # guess: the allowed load, in cores
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Extent:
    """Extent of a bench. The best plain runs of each optimizer continue for `further` times their samples, so that
    their curves also reach the loss of a swarm that learns more per sample."""

    samples: int = 2500
    plain_s: float = 20.0
    thorough: bool = False
    seeds: int = 1
    further: float = 1.5


FAST_EXTENT = Extent()
THOROUGH_EXTENT = Extent(samples=7500, plain_s=60.0, thorough=True, further=2.5)


def replicas_of(text: str) -> tuple[int, ...]:
    """Numbers of replicas a stage from `1,2,4`. Raises UsageError."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise UsageError(f"--replicas {text!r}: use numbers of replicas per stage separated by commas, such as 1,2,4")
    return found


def differs_from_llama(model: ModelSpec) -> str | None:
    """The first field of `model` that the plain Llama does not have, as its value is not the default."""
    known = ("layers", "width", "heads", "kv_heads", "ffn", "context", "vocabulary", "rope_theta", "norm_eps")
    fields = (field.name for field in dataclasses.fields(model) if field.name not in known)
    return next((name for name in fields if getattr(model, name) != getattr(ModelSpec(), name)), None)


def run(
    manifest: Manifest,
    replicas: Sequence[int],
    extent: Extent,
    clock: Clock,
    say: Say,
    *,
    base: Path | None = None,
    journal: Path | None = None,
    fresh: bool = False,
    out: Path | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """{"swarms", "mean", "plain", "seconds", "curves", "machine", ...}: see the module. `replicas` may be empty.

    Paths of `manifest` lie below `base`. `out` gets learning.json and learning.html. Raises UsageError for a run whose
    documents are read apart or whose model is not a plain Llama, DataError and LocalFault."""
    if manifest.data.documents != "joined":
        raise UsageError('the plain PyTorch baseline reads whole windows: set data.documents = "joined"')
    if (own := differs_from_llama(manifest.model)) is not None:
        raise UsageError(f"the plain PyTorch baseline is Llama's architecture: leave model.{own} at its default")
    use_one_thread()
    others = psutil.cpu_percent(interval=BUSY_S) / 100.0
    if others > BUSY_MAX:
        say(f"other programs use {others:.0%} of this machine: results by samples stay valid, all seconds are too long")
    cache = default_cache()
    kept = Journal(cache / "bench-learning.jsonl" if journal is None else journal)
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder:
        signed = _signed(Path(folder), manifest)
        ground = GridConditions(signed, cache, manifest, autocasts(device), device, base)
        plain = [run for seed in range(extent.seeds) for run in _plain(ground, extent, seed, kept, say, fresh)]
        timed = _all_cores(ground, plain, extent.plain_s, say) if replicas else None
    swarms = []
    for seed in range(extent.seeds):
        for each in replicas:
            of_seed = dataclasses.replace(manifest, seed=manifest.seed + seed)
            swarms.append(live(of_seed, each, extent.samples, cache, clock, say, seed, base, device))
    found: dict[str, Any] = _without_nan(report(manifest, plain, timed, swarms, extent.samples))
    found["machine used by others"] = others
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / RESULTS).write_text(json.dumps(found, indent=1, allow_nan=False))
        (out / PAGE).write_text(page(found))
    return found


def _signed(folder: Path, manifest: Manifest) -> Path:
    init(folder, manifest)
    sign_folder(folder)
    return folder / SIGNED_FILE


def _plain(
    ground: GridConditions, extent: Extent, seed: int, journal: Journal, say: Say, fresh: bool
) -> list[PlainRun]:
    """Run every setting for the swarms' samples, and the best of each optimizer for longer."""
    further = round(extent.samples * extent.further)
    if not extent.thorough:
        return measure(
            ground, [(setting, further, seed) for setting in fast_settings(ground.manifest)], journal, say, fresh=fresh
        )
    found = measure(ground, [(setting, extent.samples, seed) for setting in GRID], journal, say, fresh=fresh)
    for optimizer in OPTIMIZERS:
        best = best_of(found, optimizer, extent.samples)
        found[found.index(best)] = measure(ground, [(best.setting, further, seed)], journal, say, fresh=fresh)[0]
    return found


def best_of(runs: Sequence[PlainRun], optimizer: str, samples: float) -> PlainRun:
    """The run of `optimizer` with the least loss after `samples` samples; there is one of each optimizer."""
    mine = [run for run in runs if run.setting.optimizer == optimizer]
    return min(mine, key=lambda run: at(samples_curve(run), samples))


def _all_cores(ground: GridConditions, runs: Sequence[PlainRun], seconds: float, say: Say) -> PlainRun:
    """Run one plain AdamW process with a thread per core for `seconds`. Its setting is the one with the least predicted
    loss: the best rate of each batch size, by its progress in the time."""
    threads = os.cpu_count() or 1
    mine = [run for run in runs if run.setting.optimizer == "adamw" and run.seed == 0]
    samples = mine[0].looks[-1].samples
    best = [
        min((run for run in mine if run.setting.batch == batch), key=lambda run: at(samples_curve(run), samples))
        for batch in sorted({run.setting.batch for run in mine})
    ]
    promised: list[tuple[float, PlainRun]] = []
    for run in best if len(best) > 1 else ():
        last = plain_run(ground, run.setting, seconds=SPEED_S, threads=threads).looks[-1]
        reach = min(last.samples / last.wall_s * seconds, run.looks[-1].samples)
        promised.append((at(samples_curve(run), reach), run))
    chosen = min(promised, key=lambda pair: pair[0])[1] if promised else best[0]
    found = plain_run(ground, chosen.setting, seconds=seconds, threads=threads)
    last = found.looks[-1]
    say(f"plain {chosen.setting}, {threads} threads: {last.nats:.4f} nats after {last.wall_s:.0f} s")
    return found


def samples_curve(run: PlainRun) -> list[Point]:
    """Nats of the running mean of the weights, over samples: also the measure of a swarm."""
    return smoothed([(look.samples, look.mean_nats) for look in run.looks])


def last_curve(run: PlainRun) -> list[Point]:
    """Nats of the last weights, over samples."""
    return smoothed([(look.samples, look.nats) for look in run.looks])


def core_curve(run: PlainRun) -> list[Point]:
    """Nats of the running mean, over core seconds."""
    return smoothed([(look.core_s, look.mean_nats) for look in run.looks])


def report(
    manifest: Manifest, plain: Sequence[PlainRun], timed: PlainRun | None, swarms: Sequence[SwarmRun], samples: int
) -> dict[str, Any]:
    """All measurements as one JSON object; see `run`."""
    here = machine()
    frontiers = {
        (optimizer, seed): {
            "samples": envelope([samples_curve(run) for run in plain if _is(run, optimizer, seed)]),
            "last": envelope([last_curve(run) for run in plain if _is(run, optimizer, seed)]),
            "core_s": envelope([core_curve(run) for run in plain if _is(run, optimizer, seed) and run.machine == here]),
        }
        for optimizer in OPTIMIZERS
        for seed in sorted({run.seed for run in plain})
    }
    wall = smoothed([(look.wall_s, look.mean_nats) for look in timed.looks]) if timed else []
    rows = [row(manifest, swarm, frontiers, wall) for swarm in swarms]
    found: dict[str, Any] = {
        "machine": here,
        "model": dataclasses.asdict(manifest.model),
        "swarms": rows,
        "mean": mean_rows(rows),
        "plain": [_best_row(plain, optimizer, samples) for optimizer in OPTIMIZERS],
        "curves": {
            "plain": [
                {"optimizer": optimizer, "seed": seed, **curves} for (optimizer, seed), curves in frontiers.items()
            ],
            "wall": wall,
            "swarms": [along(swarm, frontiers) for swarm in swarms],
        },
    }
    if timed is not None:
        last = timed.looks[-1]
        found["seconds"] = {
            "plain": f"{timed.setting}, {timed.threads} threads",
            "wall_s": last.wall_s,
            "nats": wall[-1][1],
            "samples": last.samples,
        }
    return found


Frontiers = dict[tuple[str, int], dict[str, list[Point]]]


def row(manifest: Manifest, swarm: SwarmRun, frontiers: Frontiers, wall: Sequence[Point]) -> dict[str, Any]:
    """Final results of one swarm. Numbers that may be only bounds are {"value", "bound"}."""
    samples, nats = smoothed([(one.samples, one.nats) for one in swarm.validations])[-1]
    core_s = smoothed([(one.core_s, one.nats) for one in swarm.validations])[-1][0]
    walls = smoothed([(one.wall_s, one.nats) for one in swarm.validations])
    adamw, muon = (frontiers[optimizer, swarm.seed] for optimizer in OPTIMIZERS)
    target_s = needed(walls, wall[-1][1]) if wall else UNKNOWN
    found = {
        "AdamW needs": needed(adamw["samples"], nats),
        "efficiency": efficiency(adamw["samples"], samples, nats),
        "of Muon": efficiency(muon["samples"], samples, nats),
        "of AdamW's last": efficiency(adamw["last"], samples, nats),
        "of Muon's last": efficiency(muon["last"], samples, nats),
        "of core s": efficiency(adamw["core_s"], core_s, nats),
        "of core s, Muon": efficiency(muon["core_s"], core_s, nats),
        "of wall s": efficiency(wall, walls[-1][0], nats),
        "s to plain's loss": target_s,
        "over plain's s": BoundedNumber(target_s.value / wall[-1][0], target_s.bound) if wall else UNKNOWN,
    }
    return {
        "replicas": swarm.replicas,
        "nodes": swarm.replicas * manifest.pipeline.stages,
        "seed": swarm.seed,
        "samples": round(samples),
        "nats": nats,
        **{key: dataclasses.asdict(value) for key, value in found.items()},
        "core_s": swarm.core_s,
        "wall_s": swarm.wall_s,
        "tokens_per_s": swarm.samples * manifest.model.context / swarm.wall_s,
    }


def along(swarm: SwarmRun, frontiers: Frontiers) -> dict[str, Any]:
    """A swarm's curves over the whole run, and its efficiency in samples at each of their points."""
    curve = smoothed([(one.samples, one.nats) for one in swarm.validations])
    return {
        "replicas": swarm.replicas,
        "seed": swarm.seed,
        "samples": curve,
        "core_s": smoothed([(one.core_s, one.nats) for one in swarm.validations]),
        "wall_s": smoothed([(one.wall_s, one.nats) for one in swarm.validations]),
        **{
            f"efficiency, {optimizer}": [
                (samples, dataclasses.asdict(efficiency(frontiers[optimizer, swarm.seed]["samples"], samples, nats)))
                for samples, nats in curve
            ]
            for optimizer in OPTIMIZERS
        },
    }


def mean_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over seeds, a row for each number of replicas; none with one seed."""
    found = []
    for replicas in dict.fromkeys(row["replicas"] for row in rows):
        mine = [row for row in rows if row["replicas"] == replicas]
        if len(mine) < 2:
            continue
        columns = {"nats": [row["nats"] for row in mine]}
        columns |= {key: [row[key]["value"] for row in mine] for key in ("efficiency", "of Muon", "of core s")}
        one: dict[str, Any] = {"replicas": replicas, "seeds": len(mine)}
        for key, values in columns.items():
            one |= {key: statistics.fmean(values), f"{key} ±": statistics.stdev(values)}
        one["bounds"] = "".join(sorted({row["efficiency"]["bound"] for row in mine} - {""}))
        found.append(one)
    return found


def _best_row(plain: Sequence[PlainRun], optimizer: str, samples: int) -> dict[str, Any]:
    best = best_of([run for run in plain if run.seed == 0], optimizer, samples)
    return {
        "best setting": str(best.setting),
        "samples": samples,
        "nats": at(samples_curve(best), samples),
        "CPU s": _cost_at(best, samples),
        "settings": len({run.setting for run in plain if run.setting.optimizer == optimizer}),
    }


def _cost_at(run: PlainRun, samples: int) -> float:
    """CPU seconds for `samples` samples; NaN if measured on another machine."""
    last = run.looks[-1]
    return last.core_s * samples / last.samples if run.machine == machine() else math.nan


def _without_nan(value: Any) -> Any:
    """`value` with None for numbers that are not finite, since JSON has none."""
    match value:
        case dict():
            return {key: _without_nan(one) for key, one in value.items()}
        case list() | tuple():
            return [_without_nan(one) for one in value]
        case float():
            return value if math.isfinite(value) else None
        case _:
            return value


def _is(run: PlainRun, optimizer: str, seed: int) -> bool:
    return run.setting.optimizer == optimizer and run.seed == seed


def shown(found: dict[str, Any]) -> dict[str, Any]:
    """The part of `found` shown in a terminal: no curves, and bounds as text."""
    rows = [
        {key: _shown(value) for key, value in row.items() if key != "seed" or found["mean"]} for row in found["swarms"]
    ]
    parts = {"swarms": rows, "over seeds": found["mean"], "plain": found["plain"], "seconds": found.get("seconds")}
    return {key: value for key, value in parts.items() if value}


def _shown(value: object) -> object:
    if isinstance(value, dict):
        return str(BoundedNumber(math.nan if value["value"] is None else value["value"], value["bound"]))
    return value

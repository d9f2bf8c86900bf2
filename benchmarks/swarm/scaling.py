"""`swarmnode bench scaling`: time to a loss of one machine and of many, as `swarmnode init` makes the run for them.

Real tensors in virtual time (swarmsim): a life for each number of machines and kind of line, on the demo's text, with
the manifest that `init` writes for that fleet, at the rate that is best for one machine. Each reaches the loss that one
machine has after half of its samples.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarmnode.manifest import PRESETS, Manifest, Recipe, fit
from swarmnode.planner.fitted import Fitted, fitted
from swarmnode.planner.fleet import MachineKind
from swarmnode.planner.geography import Address
from swarmsim.drawing import COLOURS, STYLE, Curve, drawing, table
from swarmsim.life import simulate
from swarmsim.scenario import RecoveryBounds, Scenario

FLOPS = 2e7  # a machine trains some ten samples of the tiny model a second, as a card does of a large one
LINES = {"LAN": (1e9, 1e9, 0.0005), "home": (20e6, 100e6, 0.025)}  # bit/s up, down, seconds to the network
RATE = 0.02
"""Of Muon and AdamW for one machine. Measured: nats of one machine with batches of 32 after 6,432 of 12,000 samples at
.0049, .0098, .02, .04 and .08: 1.839, 1.682, 1.586, 1.636 and 1.733."""
LOOKS = 40
SPARE = 1.15  # of a life's length over the plan's: joining, and speeds that differ


def run(
    counts: Sequence[int], lines: Sequence[str], samples: int, seed: int, out: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Rows of ratios; writes `out`/scaling.html with the curves. One machine alone is always the first."""
    begun = _manifest(samples, seed)
    first = _life(begun, 1, lines[0], seed, 0.5)
    target = _loss_at(first.losses, [count for _, _, count in first.looks], samples / 2)
    rows: list[dict[str, Any]] = []
    curves: list[Curve] = []
    alone_s = _reached(first, target)
    for place, line in enumerate(lines):
        for count in dict.fromkeys((1, *counts)):
            life = first if count == 1 else _life(begun, count, line, seed)  # alone, lines carry nothing
            rows.append(_row(life, target, alone_s))
            curves.append(Curve(f"{count} {line}", COLOURS[len(curves) % len(COLOURS)], life.points, place > 0))
            say(", ".join(f"{key} {value}" for key, value in rows[-1].items()))
    out.mkdir(parents=True, exist_ok=True)
    (out / "scaling.html").write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>swarmnode bench scaling</title><style>{STYLE}</style>"
        f"<h1>Loss over seconds</h1>{drawing(curves, 'virtual seconds', 'held-out nats a token')}{table(rows)}</html>",
        encoding="utf-8",
    )
    return {"nats": round(target, 3), "machines": rows, "page": str(out / "scaling.html")}


@dataclasses.dataclass(frozen=True, slots=True)
class _Life:
    count: int
    line: str
    made: Fitted
    looks: list[tuple[float, float, int]]  # virtual seconds, nats, samples

    @property
    def losses(self) -> list[float]:
        return [nats for _, nats, _ in self.looks]

    @property
    def points(self) -> list[tuple[float, float]]:
        return [(at_s, nats) for at_s, nats, _ in self.looks]


def _manifest(samples: int, seed: int) -> Manifest:
    start = dataclasses.replace(PRESETS["tiny"], seed=seed)
    pipeline = dataclasses.replace(
        start.pipeline, validation_every_samples=max(1, samples // LOOKS), rebalance_period_s=0.0
    )
    made = fit(dataclasses.replace(start, pipeline=pipeline), samples=samples).manifest
    return dataclasses.replace(made, inner=dataclasses.replace(made.inner, learning_rate=RATE, muon_learning_rate=RATE))


def _life(begun: Manifest, count: int, line: str, seed: int, share: float = 1.0) -> _Life:
    """A life of `share` of the run's samples."""
    up, down, access_s = LINES[line]
    kind = MachineKind(line, count, FLOPS, up / 8, down / 8, Address("local", access_s), memory_gb=16.0)
    made = fitted(Recipe(begun, {}), (kind,))
    manifest = made.recipe.manifest
    seconds = math.ceil(SPARE * share * begun.inner.decay_samples / made.best.plan.samples_per_s)
    scenario = Scenario(
        "scaling",
        seconds=float(seconds),
        join_s=1.0,
        tensors="torch",
        text="data",
        memory_gbps=1.0,
        fleet=(kind,),
        manifest=manifest,
        bounds=RecoveryBounds(window_s=1.0, throughput=0.0, training_s=1e6, served_s=1e6, spread=math.inf),
    )
    outcome = simulate(scenario, seed)
    return _Life(count, line, made, sorted(outcome.validations))


def _loss_at(losses: Sequence[float], places: Sequence[float], place: float) -> float:
    """The loss at `place`, on the line between its neighbours among `places`."""
    for (low, high), (before, after) in zip(itertools.pairwise(losses), itertools.pairwise(places), strict=True):
        if before <= place <= after:
            return low + (high - low) * (place - before) / max(1e-9, after - before)
    return losses[-1]


def _reached(life: _Life, target: float) -> float:
    """Virtual seconds until the loss is `target`; infinite if it never is."""
    for (at_s, nats), (later_s, less) in itertools.pairwise(life.points):
        if less <= target < nats:
            return at_s + (later_s - at_s) * (nats - target) / (nats - less)
    return math.inf


def _row(life: _Life, target: float, alone_s: float) -> dict[str, Any]:
    manifest, found = life.made.recipe.manifest, life.made.best.plan
    reached_s = _reached(life, target)
    (first_s, _, before), (last_s, _, after) = life.looks[0], life.looks[-1]
    rate = (after - before) / max(1e-9, last_s - first_s)
    return {
        "machines": life.count,
        "line": life.line,
        "stages": manifest.pipeline.stages,
        "inner batch": manifest.inner.inner_batch,
        "steps of a round": round(manifest.gossip.round_samples / manifest.inner.inner_batch),
        "samples/s": round(rate, 1),
        "of the plan's": round(rate / found.samples_per_s, 2),
        "nats at the end": round(life.losses[-1], 3),
        "s to the loss": round(reached_s, 1) if math.isfinite(reached_s) else "never",
        "times as fast": round(alone_s / reached_s, 2),
        "by the plan": round(found.learned_per_s / life.made.alone, 2),
    }

"""`swarmnode bench scaling`: time to a loss of one machine and of many, as `swarmnode init` makes the run for them.

Real tensors in virtual time (swarmsim): a life for each number of machines and kind of line, on the demo's text, with
the manifest that `init` writes for that fleet, at the rate that is best for one machine. Each is timed to the losses
that one machine has after TARGETS of the run's samples, and its time is taken apart:

    times as fast = machines * busy * batch * averaging
    busy          samples per second over those of so many machines alone
    batch         samples that one machine needs with its own batch over those that it needs with the swarm's: the
                  physical limit, as no swarm learns more from a batch than one machine does from the same batch
    averaging     samples that one machine needs with the swarm's batch over those of the swarm
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swarmnode.app.planner.fitted import fitted
from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.geography import Address
from swarmnode.app.planner.plan_search import with_values
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.recipe import PRESETS, Recipe, fit
from swarmsim.drawing import COLOURS, STYLE, Curve, drawing, table
from swarmsim.life import simulate
from swarmsim.scenario import RecoveryBounds, Scenario

FLOPS = 2e7  # a machine trains two samples of the tiny model in five seconds
CONTEXT = (
    128  # tokens: of the tiny preset's 32 a piece's fixed cost (app/planner/plan.py) would be more than its samples'
)
TARGETS = (1 / 8, 1 / 4, 3 / 8)
LINES = {"LAN": (1e9, 1e9, 0.0005), "home": (20e6, 100e6, 0.025)}  # bit/s up, down, seconds to the network
RATE = 0.02
"""Of Muon and AdamW for one machine. Measured at a context of 32: nats of one machine with batches of 32 after 6,432 of
12,000 samples at .0049, .0098, .02, .04 and .08: 1.839, 1.682, 1.586, 1.636 and 1.733."""
VALIDATED = 2048  # tokens held out
LOOKS = 20
SPARE = 1.15  # of a life's length over the plan's: joining, and speeds that differ


def run(
    counts: Sequence[int], lines: Sequence[str], samples: int, seed: int, out: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Rows of ratios; writes `out`/scaling.html with the curves. One machine alone is always the first."""
    begun = _manifest(samples, seed)
    made = [_made(begun, count, line) for line in lines for count in dict.fromkeys((1, *counts))]
    first = _life(made[0], 0.5)
    targets = [_loss_at(first, share * samples) for share in TARGETS]
    alone = {made[0].batch: first}  # one machine, by its batch; lines carry nothing there
    rows: list[dict[str, Any]] = []
    curves: list[Curve] = []
    for fleet in made:
        if fleet.batch not in alone:
            alone[fleet.batch] = _life(fleet.alone(), 1.0)
        life = _life(fleet, 1.0) if fleet.kind.count > 1 else first
        for target in targets if life is not first else ():
            rows.append(_row(life, first, alone[fleet.batch], target))
            say(", ".join(f"{key} {value}" for key, value in rows[-1].items()))
        colour = COLOURS[len(curves) % len(COLOURS)]
        title = f"{fleet.kind.count} {fleet.kind.name}"
        curves.append(Curve(title, colour, life.points, fleet.kind.name != lines[0]))
    out.mkdir(parents=True, exist_ok=True)
    (out / "scaling.html").write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>swarmnode bench scaling</title><style>{STYLE}</style>"
        f"<h1>Loss over seconds</h1>{drawing(curves, 'virtual seconds', 'held-out nats a token')}{table(rows)}</html>",
        encoding="utf-8",
    )
    return {"nats": [round(target, 3) for target in targets], "machines": rows, "page": str(out / "scaling.html")}


@dataclasses.dataclass(frozen=True, slots=True)
class _Fleet:
    """Machines and the run that `init` makes for them."""

    kind: MachineKind
    manifest: Manifest
    by_plan: float  # times as fast to a loss as one of them
    samples_per_s: float

    @property
    def batch(self) -> int:
        return self.manifest.inner.inner_batch

    def alone(self) -> _Fleet:
        """One of the machines with the same run."""
        per_s = self.samples_per_s / self.kind.count
        one = dataclasses.replace(self.kind, count=1)
        return _Fleet(one, with_values(self.manifest, stages=1, inner_batch_max=0), 1.0, per_s)


@dataclasses.dataclass(frozen=True, slots=True)
class _Life:
    fleet: _Fleet
    looks: list[tuple[float, float, int]]  # virtual seconds, nats, samples

    @property
    def points(self) -> list[tuple[float, float]]:
        return [(at_s, nats) for at_s, nats, _ in self.looks]

    @property
    def samples_per_s(self) -> float:
        first_s, _, before = self.looks[0]
        last_s, _, after = self.looks[-1]
        return (after - before) / max(1e-9, last_s - first_s)


def _manifest(samples: int, seed: int) -> Manifest:
    tiny = PRESETS["tiny"]
    pipeline = dataclasses.replace(
        tiny.pipeline,
        validation_every_samples=max(1, samples // LOOKS),
        validation_samples=VALIDATED // CONTEXT,
        rebalance_period_s=0.0,
    )
    model = dataclasses.replace(tiny.model, context=CONTEXT)
    made = fit(dataclasses.replace(tiny, seed=seed, model=model, pipeline=pipeline), samples=samples).manifest
    return dataclasses.replace(made, inner=dataclasses.replace(made.inner, learning_rate=RATE, muon_learning_rate=RATE))


def _made(begun: Manifest, count: int, line: str) -> _Fleet:
    up, down, access_s = LINES[line]
    kind = MachineKind(line, count, FLOPS, up / 8, down / 8, Address("local", access_s), memory_gb=16.0)
    made = fitted(Recipe(begun, {}), (kind,))
    found = made.best.plan
    return _Fleet(kind, made.recipe.manifest, found.learned_per_s / made.alone, found.samples_per_s)


def _life(fleet: _Fleet, share: float) -> _Life:
    """A life of `share` of the run's samples."""
    scenario = Scenario(
        "scaling",
        seconds=float(math.ceil(SPARE * share * fleet.manifest.inner.decay_samples / fleet.samples_per_s)),
        join_s=1.0,
        tensors="torch",
        text="data",
        memory_gbps=1.0,
        fleet=(fleet.kind,),
        manifest=fleet.manifest,
        bounds=RecoveryBounds(window_s=1.0, throughput=0.0, training_s=1e6, served_s=1e6, spread=math.inf),
    )
    return _Life(fleet, sorted(simulate(scenario, fleet.manifest.seed).validations))


def _loss_at(life: _Life, samples: float) -> float:
    """The loss after `samples`, on the line between the looks beside it."""
    for (_, low, before), (_, high, after) in itertools.pairwise(life.looks):
        if before <= samples <= after:
            return low + (high - low) * (samples - before) / max(1, after - before)
    return life.looks[-1][1]


def _reached(life: _Life, target: float) -> tuple[float, float]:
    """(virtual seconds, samples) until the loss is `target`; infinite if it never is."""
    for (at_s, nats, before), (later_s, less, after) in itertools.pairwise(life.looks):
        if less <= target < nats:
            way = (nats - target) / (nats - less)
            return at_s + (later_s - at_s) * way, before + (after - before) * way
    return math.inf, math.inf


def _row(life: _Life, first: _Life, alone: _Life, target: float) -> dict[str, Any]:
    """`first`: one machine with its own batch; `alone`: with that of `life`."""
    fleet = life.fleet
    count = life.fleet.kind.count
    (reached_s, samples), (first_s, least), (_, enough) = (_reached(one, target) for one in (life, first, alone))
    return {
        "machines": count,
        "line": fleet.kind.name,
        "stages": fleet.manifest.pipeline.stages,
        "inner batch": fleet.batch,
        "steps of a round": round(fleet.manifest.gossip.round_samples / fleet.batch, 1),
        "samples/s": round(life.samples_per_s, 2),
        "nats": round(target, 3),
        "samples to it": round(samples) if math.isfinite(samples) else "never",
        "busy": round(life.samples_per_s / first.samples_per_s / count, 2),
        "batch": round(least / enough, 2),
        "averaging": round(enough / samples, 2) if math.isfinite(samples) else 0.0,
        "limit": round(count * least / enough, 1),
        "times as fast": round(first_s / reached_s, 2),
        "by the plan": round(fleet.by_plan, 2),
    }

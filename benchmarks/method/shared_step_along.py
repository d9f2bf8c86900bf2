"""Points along runs of shared_step.py: is the loss by few bytes a share of a run, or a number of steps?

`swarmnode bench averaging --along`. Each run has a constant rate, and its running mean of weights (as nodes keep it,
inner.average_share) is judged at LOOKS numbers of steps, POINTS of which make rows. One process with all samples of a
step reads the same samples in the same order, so that the same noise is in both.

    steps lost   T - T0     the one process has at T0 steps the loss that members have at T; linear in log T0 between
                            two looks
    efficiency   T0 / T
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.method.gossip import in_processes
from benchmarks.method.replica_batch import FLAT, ToySpec
from benchmarks.method.shared_step import ALONE, SharedStep, StepRun, check_settings, efficiency
from swarmnode.model.running_mean import RunningMean
from swarmnode.run.manifest.spec import InnerSpec

FIRST = 1 / 32  # of a run's steps: the first look
LOOKS = 21  # four in each doubling
POINTS = (1 / 8, 1 / 4, 1 / 2, 1.0)


class FlatRun(StepRun):
    """A run at a constant rate."""

    @property
    def spec(self) -> ToySpec:
        """The network and optimizer of other runs; the rate does not fall at the end."""
        return replace(super().spec, decay=FLAT)


def looks(steps: int) -> list[int]:
    """Numbers of steps after which a run of so many is judged, ascending."""
    return sorted({max(1, round(steps * FIRST ** (1.0 - i / (LOOKS - 1)))) for i in range(LOOKS)})


def measure(run: StepRun) -> dict[str, Any]:
    """{"what", "replicas", "seed", "curve": [(steps, nats)], "bytes"}."""
    torch.set_num_threads(1)
    one = SharedStep(run)
    mean = RunningMean(InnerSpec().average_share)
    curve = []
    for steps in looks(run.steps):
        while one.steps < steps:
            one.learn(1)
            mean.see(one.theta.detach()[0], one.steps * run.samples)
        assert mean.value is not None
        curve.append((steps, one.nats(mean.value)))
    packets = 0.0 if run.what == ALONE else one.nbytes_of_step()[0]
    return {"what": run.what, "replicas": run.replicas, "seed": run.seed, "curve": curve, "bytes": packets}


def run(
    whats: Sequence[str],
    replicas: Sequence[int],
    *,
    width: int = 64,
    samples: int = 64,
    steps: int = 960,
    rate: float = 0.012,
    seeds: int = 1,
    jobs: int = 1,
    text: str | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """{"rows": [a row for each of `whats` and of POINTS], "runs": [...]}. Raises UsageError."""
    check_settings(whats, replicas, samples)
    order = [
        FlatRun(what, count, width, samples, steps, rate, seed, text)
        for seed in range(seeds)
        for count in replicas
        for what in (ALONE, *whats)
    ]
    runs = []
    for found in in_processes(measure, order, jobs):
        runs.append(found)
        say(f"{found['what']}, {found['replicas']} replicas, seed {found['seed']}: {found['curve'][-1][1]:.4f} nats")
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(runs, indent=1))
    return {"rows": [row for what in whats for count in replicas for row in rows_of(what, count, runs)], "runs": runs}


def rows_of(what: str, count: int, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `what` by so many replicas: means over seeds. `spread`: the standard deviation of steps lost."""
    of_count = [one for one in runs if one["replicas"] == count]
    alone = {one["seed"]: one["curve"] for one in of_count if one["what"] == ALONE}
    mine = [one for one in of_count if one["what"] == what]
    rows = []
    for share in POINTS:
        steps = min((at for at, _ in mine[0]["curve"]), key=lambda at: abs(at - share * mine[0]["curve"][-1][0]))
        nats = [dict(one["curve"])[steps] for one in mine]
        needed = [
            efficiency(loss, alone[one["seed"]]) * alone[one["seed"]][-1][0]
            for loss, one in zip(nats, mine, strict=True)
        ]
        rows.append(
            {
                "codec/F": what,
                "replicas": count,
                "steps": steps,
                "nats": statistics.fmean(nats),
                "of one process": statistics.fmean(dict(alone[one["seed"]])[steps] for one in mine),
                "steps lost": steps - statistics.fmean(needed),
                "spread": statistics.stdev(needed) if len(needed) > 1 else math.nan,
                "efficiency": statistics.fmean(needed) / steps,
                "bytes": mine[0]["bytes"],
            }
        )
    return rows

"""The price of a stage that is passed by while it is away, against waiting for it: plain PyTorch, equal wall time.

`swarmnode bench hole` trains bench boundary's small Llama in stages. An inner stage goes away in the middle of the run,
for a share of the time that the run takes:

    passed by    the other stages train on; the residual stream goes by as it is, and the stage comes back with the
                 weights that it left with
    waiting      nobody trains meanwhile: the run has so many steps less, over which its rate falls to zero
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.method.boundary import BASE, BoundaryRun, Pipeline
from benchmarks.method.gossip import in_processes
from swarmnode.base.errors import UsageError
from swarmnode.base.ids import stage_name


@dataclass(frozen=True, slots=True)
class HoleRun:
    """`run` with `stage`, counted from 1, passed by in `away` steps of its middle."""

    run: BoundaryRun
    stage: int = 1
    away: int = 0

    def passed_by(self, step: int) -> range:
        """The layers that are left out in `step`."""
        first = (self.run.steps - self.away) // 2
        if not first <= step < first + self.away:
            return range(0)
        layers = self.run.layers
        return range(round(layers * (self.stage - 1) / self.run.stages), round(layers * self.stage / self.run.stages))


def measure(one: HoleRun) -> dict[str, Any]:
    torch.set_num_threads(1)
    pipeline = Pipeline(one.run)
    pipeline.learn(passed_by=one.passed_by)
    return {"nats": pipeline.nats()}


def run(
    away: Sequence[int],
    stages_away: Sequence[int],
    *,
    stages: int = 8,
    width: int = 96,
    samples: int = 4,
    context: int = 128,
    steps: int = 160,
    rate: float = 0.006,
    seed: int = 0,
    jobs: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """{"rows": a row for each number of steps `away`}: nats of a held-out byte over a run without a hole. Raises
    UsageError."""
    if not all(1 < stage < stages for stage in stages_away) or not all(0 < count < steps for count in away):
        raise UsageError(f"inner stages are 2 to {stages - 1}; a stage is away for 1 to {steps - 1} of {steps} steps")

    def boundary_run(count: int) -> BoundaryRun:
        return BoundaryRun(BASE, stages, stages, width, samples, context, count, rate, seed, 1, None)

    waiting = [HoleRun(boundary_run(steps - count)) for count in away]
    passing = [HoleRun(boundary_run(steps), stage, count) for count in away for stage in stages_away]
    nats = []
    for one, found in zip(
        order := [HoleRun(boundary_run(steps)), *waiting, *passing], in_processes(measure, order, jobs), strict=True
    ):
        nats.append(found["nats"])
        what = f"{stage_name(one.stage - 1)} away for {one.away} of" if one.away else "no hole in"
        say(f"{what} {one.run.steps} steps: {nats[-1]:.4f} nats")
    rows = []
    for at, count in enumerate(away):
        row = {"steps away": count, "of the run": count / steps, "waiting": nats[1 + at] - nats[0]}
        first = 1 + len(away) + at * len(stages_away)
        for stage, found in zip(stages_away, nats[first:], strict=False):
            row[f"{stage_name(stage - 1)} passed by"] = found - nats[0]
        rows.append(row)
    return {"nats": nats[0], "rows": rows}

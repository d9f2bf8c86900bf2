"""CheckFree's experiment at toy size (arXiv 2506.15461, section 4): stages of a small byte model die at random, and
each recovery method trains on the same text with the same deaths. `swarmnode bench checkfree` prints loss against
simulated wall time.

All methods of one seed are rows of one batched training (the model of bench/method/replica_batch.py, one layer per
stage; the embedding, which is also the output head, is mirrored and never lost). Roll-back to checkpoints and redundant
computation follow the fault-free row exactly, only slower; they are computed from its curve.
"""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmnode.bench.method.replica_batch import ToySpec, initial, losses, read_text, shapes
from swarmnode.errors import UsageError
from swarmnode.ids import digest64
from swarmnode.model.stage import BUMP, BUMP_STEPS
from swarmnode.model.stage_swap import partner, swaps
from swarmnode.recovery.checkfree import combine

CHECKPOINT_STEPS = 100  # issue 5
DOWN_STEPS = 5.0  # guess: pause of training, in steps, while a loss is detected and the stage restored
REDUNDANT = 4.0 / 3.0  # computed: each stage's forward is done twice, and backward costs two forwards
RATES = (0.002, 0.004)  # issue 5: deaths of each stage in each step
WAYS = ("random", "copy", "average", "weighted", "swapped", "checkfree+", "identity")
CLIP, WEIGHT_DECAY, BETAS, EPS = 1.0, 0.1, (0.9, 0.95), 1e-8
EVERY = 20  # steps between two evaluations of the held-out loss
TARGET_SHARE = 0.7  # target loss: that of the fault-free run after this share of its steps

BASE = ToySpec(replicas=1, layers=6, batch=4, validation=96, warmup=40, learning_rate=3e-3)
PRESETS: dict[str, tuple[ToySpec, int, int]] = {
    "tiny": (replace(BASE, width=16, ffn=32, context=16, validation=16), 60, 1),
    "quick": (BASE, 400, 2),
    "standard": (replace(BASE, batch=8), 1000, 3),
}
"""(size, steps, seeds) of each preset."""


@dataclass(frozen=True, slots=True)
class CheckfreeRun:
    """Parameters of one seed with all its rows: the fault-free one, then each way at each rate."""

    size: ToySpec
    steps: int
    seed: int
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Death:
    step: int
    stage: int


def deaths(seed: int, rate: float, steps: int, stages: int) -> list[Death]:
    """Random deaths: each stage in each step with probability `rate`. If two neighbouring stages would die in one step,
    the second survives, since neither could be rebuilt from the other."""
    draw = np.random.Generator(np.random.Philox(key=digest64("deaths", seed, rate)))
    found: list[Death] = []
    for step in range(1, steps):
        for stage in np.flatnonzero(draw.random(stages) < rate):
            if not any(other.step == step and abs(other.stage - stage) <= 1 for other in found):
                found.append(Death(step, int(stage)))
    return found


def swapping(way: str, stages: int) -> tuple[tuple[int, int], ...]:
    """Stages that change places on odd microbatches. The paper's stages hold only layers, so that its CheckFree+ swaps
    the first two and the last two; here ("swapped") the first and last stage stay in place (pipeline/itinerary.py)."""
    if way == "checkfree+" and stages >= 4:
        return (0, 1), (stages - 2, stages - 1)
    return swaps(stages) if way == "swapped" else ()


def stands_in(way: str, stage: int, stages: int) -> int | None:
    """The stage that is copied for a lost one because it learnt the lost one's work: in the paper for the first and the
    last."""
    if way == "checkfree+":
        return {0: 1, stages - 1: stages - 2}.get(stage) if stages >= 4 else None
    return partner(stage, stages) if way == "swapped" else None


class ReplicaRows:
    """The rows of one seed: weights [R, P], and AdamW with a separate step count for every stage of every row."""

    def __init__(self, life: CheckfreeRun, ways: Sequence[tuple[str, float]]) -> None:
        size = self.size = life.size
        self.ways = ways
        start = initial(size, life.seed)
        self.theta = start.repeat(len(ways), 1).requires_grad_()
        self.mean, self.square = torch.zeros_like(self.theta), torch.zeros_like(self.theta)
        self.spans = spans(size)
        self.stage_of = torch.full((start.numel(),), size.layers)  # the last column: embedding and final norm
        for stage, span in enumerate(self.spans):
            self.stage_of[span] = stage
        self.count = torch.zeros(len(ways), size.layers + 1)
        self.bump = torch.zeros(len(ways), size.layers + 1)
        self.norms = torch.zeros(len(ways), size.layers + 1)
        self.swapped = {way: self._permutation(swapping(way, size.layers)) for way in ("swapped", "checkfree+")}
        self.seed = life.seed

    def _permutation(self, pairs: Sequence[tuple[int, int]]) -> Tensor:
        found = torch.arange(self.theta.shape[1])
        for a, b in pairs:
            found[self.spans[a]] = torch.arange(self.spans[b].start, self.spans[b].stop)
            found[self.spans[b]] = torch.arange(self.spans[a].start, self.spans[a].stop)
        return found

    def learn(self, step: int, microbatches: Sequence[Tensor]) -> None:
        """Take one inner step on two microbatches [B, T + 1]; ways that swap use the swapped order for the second."""
        rows = len(self.ways)
        gradient = torch.zeros_like(self.theta)
        for odd, tokens in enumerate(microbatches):
            theta = self.theta
            if odd:
                theta = torch.stack(
                    [row[self.swapped[way]] if way in self.swapped else row for row, (way, _) in zip(theta, self.ways)]  # noqa: B905
                )
            loss = losses(self.size, theta, tokens.expand(rows, *tokens.shape)).sum() / len(microbatches)
            gradient += torch.autograd.grad(loss, self.theta)[0]
        norms = torch.zeros_like(self.norms)
        for stage, span in enumerate(self.spans):
            norms[:, stage] = torch.linalg.vector_norm(gradient[:, span], dim=1)
        norms[:, -1] = torch.linalg.vector_norm(gradient[:, self.stage_of == self.size.layers], dim=1)
        self.norms = torch.where(self.count == 0, norms, 0.9 * self.norms + 0.1 * norms)
        clip = (CLIP / math.sqrt(self.size.layers) / (norms + 1e-6)).clamp_(max=1.0)
        gradient.mul_(clip[:, self.stage_of])
        self._adamw(gradient, self.size.learning_rate * min(1.0, step / self.size.warmup))

    @torch.no_grad()
    def _adamw(self, gradient: Tensor, rate: float) -> None:
        self.count += 1
        self.mean.lerp_(gradient, 1 - BETAS[0])
        self.square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        corrected = (1 - BETAS[1] ** self.count).sqrt() / (1 - BETAS[0] ** self.count)
        rates = rate * (1.0 + BUMP * self.bump / BUMP_STEPS)
        self.theta.mul_(1.0 - (rates * WEIGHT_DECAY)[:, self.stage_of])
        scale = (1 - BETAS[1] ** self.count).sqrt() * EPS
        step = self.mean / (self.square.sqrt() + scale[:, self.stage_of])
        self.theta.sub_(step.mul_((rates * corrected)[:, self.stage_of]))
        self.bump = (self.bump - 1).clamp_(min=0)

    @torch.no_grad()
    def die(self, row: int, stage: int, step: int) -> None:
        """Lose the stage in one row, and restore it by that row's method."""
        way, span, theta = self.ways[row][0], self.spans[stage], self.theta[row]
        if way in ("random", "identity"):
            theta[span] = initial(self.size, digest64(self.seed, step, stage) % (1 << 31))[span]
        if way == "identity":  # the layer adds nothing to the residual stream
            for piece in _outputs(self.size, stage):
                theta[piece] = 0.0
        if way in ("copy", "average", "weighted", "swapped", "checkfree+"):
            near = [other for other in (stage - 1, stage + 1) if 0 <= other < self.size.layers]
            norms = {other: float(self.norms[row, other]) for other in near}
            twin = stands_in(way, stage, self.size.layers)
            if twin is not None:
                theta[span] = theta[self.spans[twin]]
            else:
                _mix(theta, self.size, self.spans, stage, near, norms, "weighted" if way in self.swapped else way)
        for flat in (self.mean, self.square):
            flat[row, span] = 0.0
        self.count[row, stage] = 0
        self.bump[row, stage] = BUMP_STEPS

    @torch.no_grad()
    def validate(self, tokens: Tensor) -> list[float]:
        theta = self.theta.detach()
        return [float(losses(self.size, row[None], tokens[None])[0]) for row in theta]


def _mix(
    theta: Tensor,
    size: ToySpec,
    all_spans: Sequence[slice],
    stage: int,
    near: Sequence[int],
    norms: Mapping[int, float],
    way: str,
) -> None:
    """Combine tensor by tensor, as in recovery/checkfree.py."""
    at = 0
    for shape in shapes(size)[2:8]:
        length = math.prod(shape)
        sources = {other: theta[all_spans[other]][at : at + length].clone() for other in near}
        start = all_spans[stage].start + at
        theta[start : start + length] = combine(way, sources, norms, near[0])
        at += length


def spans(size: ToySpec) -> list[slice]:
    """Slice of each layer in a row."""
    first = sum(math.prod(shape) for shape in shapes(size)[:2])
    length = sum(math.prod(shape) for shape in shapes(size)[2:8])
    return [slice(first + i * length, first + (i + 1) * length) for i in range(size.layers)]


def _outputs(size: ToySpec, stage: int) -> list[slice]:
    """Slices of the two matrices that write into the residual stream."""
    at, found = spans(size)[stage].start, []
    for index, shape in enumerate(shapes(size)[2:8]):
        if index in (2, 5):
            found.append(slice(at, at + math.prod(shape)))
        at += math.prod(shape)
    return found


def live(life: CheckfreeRun) -> dict[str, Any]:
    """{"ways": [...], "steps": [...], "curves": [[nats of each row]], "deaths": {rate: [...]}, "cpu_s"}."""
    torch.set_num_threads(1)
    began = time.process_time()
    ways = [("fault-free", 0.0), *((way, rate) for rate in RATES for way in WAYS)]
    rows = ReplicaRows(life, ways)
    train, held = read_text(life.text)
    length = life.size.context + 1
    draw = np.random.Generator(np.random.Philox(key=digest64("text", life.seed)))

    def batch(data: Any, count: int, generator: np.random.Generator) -> Tensor:
        starts = generator.integers(0, len(data) - length, count)
        return torch.from_numpy(np.stack([data[s : s + length] for s in starts]).astype(np.int64))

    validation = batch(held, life.size.validation, np.random.Generator(np.random.Philox(key=7)))
    when = {rate: deaths(life.seed, rate, life.steps, life.size.layers) for rate in RATES}
    steps, curves = [0], [rows.validate(validation)]
    for step in range(1, life.steps + 1):
        for row, (_, rate) in enumerate(ways):
            for death in when.get(rate, ()):
                if death.step == step:
                    rows.die(row, death.stage, step)
        rows.learn(step, [batch(train, life.size.batch, draw) for _ in range(2)])
        if step % EVERY == 0:
            steps.append(step)
            curves.append(rows.validate(validation))
    found = {str(rate): [asdict(death) for death in when[rate]] for rate in RATES}
    return {
        "seed": life.seed,
        "ways": ways,
        "steps": steps,
        "curves": curves,
        "deaths": found,
        "cpu_s": time.process_time() - began,
    }


def rolled_back(steps: int, when: Sequence[Death]) -> list[float]:
    """Wall time, in steps, at which a run that goes back to its last checkpoint at every death has each step behind it
    for the last time."""
    wall = [0.0] * (steps + 1)
    now, at = 0.0, 0
    pending = sorted({death.step for death in when})
    while at < steps:
        at += 1
        now += 1.0
        if pending and at == pending[0]:  # a death in this step: the step does not count
            pending.pop(0)
            at = (at - 1) // CHECKPOINT_STEPS * CHECKPOINT_STEPS
            now += DOWN_STEPS
            continue
        wall[at] = now
    return wall


def curves_of(life: Mapping[str, Any]) -> dict[tuple[str, float], tuple[list[float], list[float]]]:
    """(way, rate) -> (wall time in steps, nats) of one seed, computed methods included."""
    steps, found = life["steps"], {}
    nats = list(zip(*life["curves"], strict=True))
    for (way, rate), curve in zip(life["ways"], nats, strict=True):
        when = [Death(**death) for death in life["deaths"].get(str(rate), [])]
        found[way, rate] = ([s + DOWN_STEPS * sum(d.step <= s for d in when) for s in steps], list(curve))
    free = found["fault-free", 0.0][1]
    for rate in RATES:
        when = [Death(**death) for death in life["deaths"][str(rate)]]
        wall = rolled_back(steps[-1], when)
        found["checkpoint", rate] = ([wall[s] for s in steps], free)
        found["redundant", rate] = ([REDUNDANT * s for s in steps], free)
    return found


def at_time(wall: Sequence[float], nats: Sequence[float], when: float) -> float:
    """Nats at wall time `when`, interpolated on the curve."""
    return float(np.interp(when, wall, nats))


def reached(wall: Sequence[float], nats: Sequence[float], target: float) -> float:
    """Wall time from which the loss stays at or below `target`; infinite if it never does."""
    above = [index for index, value in enumerate(nats) if value > target]
    after = above[-1] + 1 if above else 0
    return wall[after] if after < len(wall) else math.inf


def table(lives: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way and rate, means over the seeds."""
    rows: list[dict[str, Any]] = []
    everything = [curves_of(life) for life in lives]
    order = [("fault-free", 0.0), *((w, rate) for rate in RATES for w in ("checkpoint", "redundant", *WAYS))]
    for key in order:
        nats, times, jumps = [], [], []
        for life, curves in zip(lives, everything, strict=True):
            end = float(life["steps"][-1])
            free = curves["fault-free", 0.0][1]
            target = free[round(TARGET_SHARE * (len(free) - 1))]
            wall, curve = curves[key]
            nats.append(at_time(wall, curve, end))
            times.append(reached(wall, curve, target))
            jumps.append(nats[-1] - at_time(*curves["fault-free", 0.0], end))
        rows.append(
            {
                "way": key[0],
                "p": key[1],
                "nats at the same wall time": statistics.fmean(nats),
                "over fault-free": statistics.fmean(jumps),
                "its spread": statistics.stdev(jumps) if len(jumps) > 1 else math.nan,
                "wall steps to the target": statistics.fmean(times),
                "seeds": len(lives),
            }
        )
    return rows


def run(
    preset: str = "quick",
    seeds: int | None = None,
    jobs: int = 2,
    text: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """{"ways": [a row each], ...}. Raises UsageError."""
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}: use one of {', '.join(PRESETS)}")
    size, steps, count = PRESETS[preset]
    todo = [CheckfreeRun(size, steps, seed, text) for seed in range(seeds or count)]
    began, lives = time.perf_counter(), []
    for life in _all(todo, jobs):
        lives.append(life)
        say(f"seed {life['seed']}: {life['cpu_s']:.0f} CPU s, deaths {[len(d) for d in life['deaths'].values()]}")
    return {
        "ways": table(lives),
        "preset": preset,
        "stages": size.layers,
        "steps": steps,
        "checkpoint every": CHECKPOINT_STEPS,
        "standstill of a recovery, steps": DOWN_STEPS,
        "seconds": time.perf_counter() - began,
        "lives": lives,
    }


def _all(todo: Sequence[CheckfreeRun], jobs: int) -> Any:
    if jobs <= 1 or len(todo) == 1:
        yield from map(live, todo)
        return
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(live, todo)

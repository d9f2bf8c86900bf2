"""Learning efficiency by bytes, where members average gradients in parts before each step.

`swarmnode bench averaging` trains the replica bench's network (replica_batch.py) with real codecs. All members hold
equal weights, so one set of weights and one optimizer stand for all; each member has a gradient and a codec's rest of
its own. Each averages one part for all:

    member   sends C(D_j), the parts of R - 1 others                  D_j: gathered, the rows of this turn (turn.py)
    owner    sends C(M + rest) to R - 1 others, rest <- M + rest - C(M + rest)        M = mean_j C(D_j) of its part
    delay    the step by M comes when the gradients of the next one are there, and the weights look ahead (gradient.py)
    bytes    2 (R - 1) / R packets; beside them fragments of weights for healing, 2 / 127 byte a weight and message

Efficiency is the share of the samples that one process needs for the same loss, which takes all samples of a step
itself: runs of SHARES of the steps, each with its own warm-up and fall of the rate; between them, and beyond,
linear over the logarithm of the samples.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.method.gossip import in_processes
from benchmarks.method.inner_optimizer import MUON
from benchmarks.method.replica_batch import WSD, ReplicaBatch, ToySpec, losses, read_text
from swarmnode.base.errors import UsageError
from swarmnode.base.ids import digest64
from swarmnode.model.turn import Turn
from swarmnode.run.gossip_rules import codecs, methods
from swarmnode.run.manifest.check import odd
from swarmnode.run.manifest.spec import FRAGMENTS_MAX
from swarmnode.train.gossip.compression import Codec, codec
from swarmnode_methods.whitening import factor, unwhiten, whiten

SHARES = (0.5, 2 / 3, 5 / 6, 1.0)
FRAGMENT = 2 / 127  # bytes a weight of a fragment: bfloat16, swarmnode_methods/fragment.py
ALONE = "alone"
DELAY = "/delay"


@dataclass(frozen=True, slots=True)
class StepRun:
    """One run. `what`: CODEC/F, with /delay behind it for gossip.delay = 1, or ALONE: one process with all samples of
    a step."""

    what: str
    replicas: int
    width: int
    samples: int
    steps: int
    rate: float
    seed: int
    text: str | None = None

    @property
    def spec(self) -> ToySpec:
        """The network of this width, with heads of 32 and an FFN of 2.75 widths; Muon as in docs/learning.md."""
        return replace(
            ToySpec(),
            replicas=self.replicas,
            batch=self.samples // self.replicas,
            width=self.width,
            heads=max(2, self.width // 32),
            ffn=self.width * 11 // 4,
            inner_steps=1,
            rounds=self.steps,
            learning_rate=self.rate,
            optimizer=MUON,
            momentum=0.9,
            decay=WSD,
        )


def parts(what: str) -> tuple[Codec, int]:
    """The codec and F of CODEC or CODEC/F, with or without /delay. Raises UsageError."""
    name, _, turns = what.removesuffix(DELAY).partition("/")
    known = [one for one in methods()["gradient"].codecs if one in codecs()]
    if name not in known:
        raise UsageError(f"{what!r}: the codec is one of {', '.join(known)}")
    count = odd(1, FRAGMENTS_MAX).accept(int(turns)) if turns.isdigit() else None if turns else 1
    if not isinstance(count, int):
        raise UsageError(f"{what!r}: F of CODEC/F is odd, 1 to {FRAGMENTS_MAX}")
    return codec(name), count


class SharedStep(ReplicaBatch):
    """R members that average gradients in parts; the weights of the first stand for all. `in_parts` False: each sends
    its packet to all, so that nothing is coded twice."""

    def __init__(self, run: StepRun, *, in_parts: bool = True) -> None:
        super().__init__(run.spec, run.seed, None, read_text(run.text))
        self._codec: Codec | None = None
        self._turns = 1
        if run.what != ALONE:
            self._codec, self._turns = parts(run.what)
        self._in_parts = in_parts
        self._slow = self.theta.detach()[0].clone()
        self._delayed = run.what.endswith(DELAY)
        self._travels: tuple[Tensor, Turn] | None = None  # the mean that waits for the next gradients
        self._factors: list[Tensor | None] = []  # of the views of the step under way
        self._rest = torch.zeros(run.replicas + 1, self.parameters)  # of each member; of the parts' owners
        self._optimizer = self.optimizer(self.theta.detach()[:1])
        self.packet_nbytes = 0  # of all steps

    def learn(self, steps: int) -> None:
        """Steps of all members together."""
        for _ in range(steps):
            tokens = torch.stack([self._batch(member) for member in range(self.size.replicas)])
            weights = self.theta.detach()[:1].expand(self.size.replicas, -1).requires_grad_()
            (gradient,) = torch.autograd.grad(losses(self.size, weights, tokens).sum(), weights)
            turn = Turn(self.steps + 1, self._turns)
            if self._travels is not None:
                self._look_ahead(*self._travels)
            self.steps += 1
            mean = self._mean(gradient, turn) if self._codec is not None else gradient.mean(0)
            if self._delayed:
                self._travels = mean, turn
            else:
                self._step(self._optimizer, mean.unsqueeze(0), turn)

    def _look_ahead(self, mean: Tensor, turn: Turn) -> None:
        """Step by `mean` from the slow weights, and set the fast ones as far beyond."""
        theta = self.theta.detach()[0]
        before = self._slow.clone()
        theta.copy_(self._slow)
        self._step(self._optimizer, mean.unsqueeze(0), turn)
        self._slow.copy_(theta)
        torch.lerp(before, self._slow, 2.0, out=theta)

    def _mean(self, gradient: Tensor, turn: Turn) -> Tensor:
        """The mean gradient [P] of the rows in `turn`, as all decode it."""
        assert self._codec is not None
        self._rest[:-1].add_(gradient)
        *members, owners = (self._optimizer.views(rest, turn) for rest in self._rest)
        momenta = self._optimizer.views(self._optimizer.exp_avg[0], turn)
        self._factors = [factor(view) if self._codec.whitened else None for view in momenta]
        mean = torch.zeros(sum(view.numel() for view in owners))
        for number, views in enumerate(members):
            mean.add_(self._coded(views, torch.zeros_like(mean), number), alpha=1 / len(members))
        if self._in_parts:
            mean = self._coded(owners, mean, len(members))
        whole = torch.zeros(self.parameters)
        at = 0
        for view in self._optimizer.views(whole, turn):
            view.copy_(mean[at : at + view.numel()].view(view.shape))
            at += view.numel()
        unwhiten(self._optimizer.views(whole, turn), self._factors)
        return whole.mul_(self._turns**-0.5)  # as the product: swarmnode_methods/gradient.py

    def _coded(self, rest: Sequence[Tensor], more: Tensor, number: int) -> Tensor:
        """Code `rest` + `more`, which is whitened where the codec wants it, and leave in `rest` what the packet
        dropped. Returns the packet, decoded."""
        assert self._codec is not None
        whiten(rest, self._factors)
        wanted = torch.cat([view.reshape(-1) for view in rest]).add_(more)
        message = self._codec.encode(wanted, seed=digest64("rounding", self.seed, self.steps, number))
        self.packet_nbytes += sum(tensor.nbytes for tensor in message) if number == 0 else 0
        sent = torch.empty_like(wanted)
        self._codec.read(message, 0, sent)
        at = 0
        for view in rest:
            view.copy_((wanted - sent)[at : at + view.numel()].view(view.shape))
            at += view.numel()
        unwhiten(rest, self._factors)
        return sent

    @torch.no_grad()
    def nats(self, weights: Tensor | None = None) -> float:
        """Nats per held-out byte, of `weights` [P] or of the run's own."""
        judged = self.theta.detach()[0] if weights is None else weights
        return float(losses(self.size, judged[None], self._validation[None])[0])

    def nbytes_of_step(self) -> tuple[float, float]:
        """(bytes of packets; bytes of fragments) that a member sends, a weight and step."""
        messages = 2 * (self.size.replicas - 1) / self.size.replicas
        packets = messages * self.packet_nbytes / self.steps / self.parameters
        return packets, messages * FRAGMENT


def measure(run: StepRun) -> dict[str, Any]:
    torch.set_num_threads(1)
    one = SharedStep(run)
    one.learn(run.steps)
    packets, fragments = (0.0, 0.0) if run.what == ALONE else one.nbytes_of_step()
    return {
        "what": run.what,
        "replicas": run.replicas,
        "steps": run.steps,
        "seed": run.seed,
        "nats": one.nats(),
        "bytes": packets,
        "fragments": fragments,
    }


def efficiency(nats: float, curve: Sequence[tuple[int, float]]) -> float:
    """The samples that one process needs for `nats`, over those of the longest run of `curve`: (steps, nats),
    ascending."""
    pairs = list(itertools.pairwise(curve))
    (low, worse), (high, better) = next((pair for pair in pairs if nats >= pair[1][1]), pairs[-1])
    way = (worse - nats) / (worse - better)
    return math.exp(math.log(low) + way * math.log(high / low)) / curve[-1][0]


def check_settings(whats: Sequence[str], replicas: Sequence[int], samples: int) -> None:
    """Raises UsageError for a name in `whats` that is not known, and `samples` that cannot be shared alike."""
    for what in whats:
        parts(what)
    if any(samples % count for count in replicas):
        raise UsageError(f"{samples} samples a step are no multiple of {', '.join(map(str, replicas))} replicas")


def run(
    whats: Sequence[str],
    replicas: Sequence[int],
    *,
    width: int = 64,
    samples: int = 64,
    steps: int = 240,
    rate: float = 0.012,
    seeds: int = 1,
    jobs: int = 1,
    text: str | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """{"rows": [a row for each of `whats` and number of replicas], "curve": [...], "runs": [...]}. Raises
    UsageError."""
    check_settings(whats, replicas, samples)
    of = partial(StepRun, width=width, samples=samples, rate=rate, text=text)
    order = [of(ALONE, 1, steps=round(steps * share), seed=seed) for seed in range(seeds) for share in SHARES]
    order += [of(what, count, steps=steps, seed=seed) for seed in range(seeds) for what in whats for count in replicas]
    runs = []
    for found in in_processes(measure, order, jobs):
        runs.append(found)
        say(f"{found['what']}, {found['replicas']} replicas, seed {found['seed']}: {found['nats']:.4f} nats")
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(runs, indent=1))
    curve = []
    for share in SHARES:
        nats = [one["nats"] for one in runs if one["what"] == ALONE and one["steps"] == round(steps * share)]
        curve.append((round(steps * share), statistics.fmean(nats)))
    rows = [_row(what, count, runs, curve) for what in whats for count in replicas]
    return {"rows": rows, "curve": [{"steps": at, "nats": nats} for at, nats in curve], "runs": runs}


def _row(what: str, count: int, runs: Sequence[dict[str, Any]], curve: Sequence[tuple[int, float]]) -> dict[str, Any]:
    mine = [one for one in runs if one["what"] == what and one["replicas"] == count]
    nats = [one["nats"] for one in mine]
    return {
        "codec/F": what,
        "replicas": count,
        "nats": statistics.fmean(nats),
        "spread": statistics.stdev(nats) if len(nats) > 1 else math.nan,
        "efficiency": efficiency(statistics.fmean(nats), curve),
        "bytes": mine[0]["bytes"],
        "fragments": mine[0]["fragments"],
    }

"""A running mean of a replica's weights over the last samples of the run. It is exported, in place of a learning rate
decay.

    mean(t) = integral of tau^g theta(tau) d tau / integral of tau^g d tau,  tau from 0 to t;   g = 1 / share - 2

[Power function EMA: arXiv 2312.02696, eq. 1 and 2. Merging weights of a constant rate replaces the rate's decay: WSM,
arXiv 2507.17634.] Its weights are on average `share` of t old at any t. Unlike a decay it needs no end known in
advance. It takes no part in training. A replica that joins, moves or is rebuilt starts a new mean.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from swarmnode.model.tensor import to_host

PART = 1 << 24  # elements that are updated together
UPDATES = 16  # per mean age: the mean is then as old as it should be within a tenth [tests/model/test_running_mean.py]
CALLS = UPDATES // 2  # in which every part of large weights has its turn: twice as often as it is due


class RunningMean:
    """Mean of weights [P] by the run's samples, float32 in main memory, on average `share` of the samples old.

    Large weights are updated by parts, a few in each call, so that an inner step never waits long. Each part follows
    the same rule from its own last update on. `beside`: weights lie on a card; they are copied at once and added in a
    thread of its own, while the card goes on.
    """

    def __init__(self, share: float, *, beside: bool = False) -> None:
        assert 0.0 < share <= 0.5, f"share {share}; above 0 and at most a half"
        self.share = share
        self._mean: Tensor | None = None
        self._first = 0  # samples of the run at the first weights
        self._last: list[int] = []  # by part, at the newest
        self._adder = ThreadPoolExecutor(1, "running mean") if beside else None
        self._adding: list[Future[None]] = []

    @property
    def value(self) -> Tensor | None:
        """The mean; None before the first weights."""
        self._settle()
        return self._mean

    @property
    def span(self) -> int:
        """Samples of the run between the first weights in the mean and the newest."""
        return min(self._last, default=0) - self._first

    def copied(self) -> tuple[memoryview, int] | None:
        """A copy of the mean's bytes, and its span; None before the first weights."""
        mean = self.value
        return None if mean is None else (mean.clone().numpy().data.cast("B"), self.span)

    def forget(self) -> None:
        """Restart the mean, because the weights are replaced."""
        self._settle()
        self._mean = None

    @torch.no_grad()
    def see(self, weights: Tensor, samples_total: int) -> None:
        """Add the replica's `weights` [P], on any device, after `samples_total` samples of the run. Most calls do
        nothing: there are UPDATES updates per mean age."""
        self._settle()
        if self._mean is None:
            self._mean = weights.detach().to("cpu", torch.float32, copy=True)
            self._first = samples_total
            self._last = [samples_total] * -(-len(weights) // PART)
            return
        least = max(1.0, self.share * samples_total / UPDATES)
        due = [number for number, last in enumerate(self._last) if samples_total - last >= least]
        for number in sorted(due, key=self._last.__getitem__)[: -(-len(self._last) // CALLS)]:
            part = slice(number * PART, (number + 1) * PART)
            kept = (self._last[number] / samples_total) ** (1.0 / self.share - 1.0)
            self._add(self._mean[part], to_host(weights.detach()[part]), 1.0 - kept)
            self._last[number] = samples_total

    def _add(self, mean: Tensor, weights: Tensor, share: float) -> None:
        """Move a part of the mean towards `weights` in main memory, which nobody changes meanwhile."""
        if self._adder is None:
            _moved(mean, weights, share)
        else:
            self._adding.append(self._adder.submit(_moved, mean, weights, share))

    def _settle(self) -> None:
        """Wait for what is being added."""
        for one in self._adding:
            one.result()
        self._adding.clear()


@torch.no_grad()
def _moved(mean: Tensor, weights: Tensor, share: float) -> None:
    mean.lerp_(weights.float(), share)


def weight_of(share: float, span: int, samples_total: int) -> float:
    """The weight of a mean over the last `span` samples among other replicas' means, above 0 and at most 1: the part of
    the whole integral's weights that lie in it. One that has just begun counts as one sample. A span longer than the
    run is all of it: steps that rounds take are counted by rounds, which may be ahead of the samples heard of."""
    before = max(0, samples_total - span) / (samples_total + 1)
    return float(1.0 - before ** (1.0 / share - 1.0))

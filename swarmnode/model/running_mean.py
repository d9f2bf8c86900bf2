"""A running mean of a replica's weights over the last samples of the run. It is exported, in place of a learning rate
decay.

    mean(t) = integral of tau^g theta(tau) d tau / integral of tau^g d tau,  tau from 0 to t;   g = 1 / share - 2

[Power function EMA: arXiv 2312.02696, eq. 1 and 2. Merging weights of a constant rate replaces the rate's decay: WSM,
arXiv 2507.17634.] Its weights are on average `share` of t old at any t. Unlike a decay it needs no end known in
advance. It takes no part in training. A replica that joins, moves or is rebuilt starts a new mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnode.model.tensor import to_host

PART = 1 << 24  # elements that are updated together
PARTS_MAX = 4  # guess: in one call, 0.1 s of copying from a card; the others wait for later steps
UPDATES = 16  # guess: updates per mean age; more change only the sixth digit of the loss
SPAN_AGES = 2.0  # guess: a mean over this many of its ages counts fully when replicas are averaged
WEIGHT_MIN = 0.05  # guess: weight of a mean that has just begun


class RunningMean:
    """Mean of weights [P] by the run's samples, float32 in main memory, on average `share` of the samples old.

    Large weights are updated by parts, a few in each call, so that an inner step never waits long. Each part follows
    the same rule from its own last update on.
    """

    def __init__(self, share: float) -> None:
        assert 0.0 < share <= 0.5, f"share {share}; above 0 and at most a half"
        self.share = share
        self.value: Tensor | None = None  # None before the first weights
        self._first = 0  # samples of the run at the first weights
        self._last: list[int] = []  # by part, at the newest

    @property
    def span(self) -> int:
        """Samples of the run between the first weights in the mean and the newest."""
        return min(self._last, default=0) - self._first

    def forget(self) -> None:
        """Restart the mean, because the weights are replaced."""
        self.value = None

    @torch.no_grad()
    def see(self, weights: Tensor, samples_total: int) -> None:
        """Add the replica's `weights` [P], on any device, after `samples_total` samples of the run. Most calls do
        nothing: there are UPDATES updates per mean age."""
        if self.value is None:
            self.value = weights.detach().to("cpu", torch.float32, copy=True)
            self._first, self._last = samples_total, [samples_total] * -(-len(weights) // PART)
            return
        due = [number for number, last in enumerate(self._last) if self._is_due(last, samples_total)]
        for number in sorted(due, key=self._last.__getitem__)[:PARTS_MAX]:
            part = slice(number * PART, (number + 1) * PART)
            kept = (self._last[number] / samples_total) ** (1.0 / self.share - 1.0)
            self.value[part].lerp_(to_host(weights.detach()[part]).float(), 1.0 - kept)
            self._last[number] = samples_total

    def _is_due(self, last: int, samples_total: int) -> bool:
        return samples_total > last and (samples_total - last) * UPDATES >= self.share * samples_total


def weight_of(share: float, span: int, samples_total: int) -> float:
    """The weight of a mean over `span` samples among other replicas' means, WEIGHT_MIN to 1, by the covered share of
    its window."""
    window = SPAN_AGES * share * samples_total
    return 1.0 if span >= window else max(WEIGHT_MIN, span / window)

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

UPDATES = 16  # guess: updates per mean age; more change only the sixth digit of the loss
SPAN_AGES = 2.0  # guess: a mean over this many of its ages counts fully when replicas are averaged
WEIGHT_MIN = 0.05  # guess: weight of a mean that has just begun


class RunningMean:
    """Mean of weights [P] by the run's samples, float32 in main memory, on average `share` of the samples old."""

    def __init__(self, share: float) -> None:
        assert 0.0 < share <= 0.5, f"share {share}; above 0 and at most a half"
        self.share = share
        self.value: Tensor | None = None  # None before the first weights
        self._first = self._last = 0  # samples of the run at the first and at the newest weights

    @property
    def span(self) -> int:
        """Samples of the run between the first weights in the mean and the newest."""
        return self._last - self._first

    def forget(self) -> None:
        """Restart the mean, because the weights are replaced."""
        self.value = None

    @torch.no_grad()
    def see(self, weights: Tensor, samples_total: int) -> None:
        """Add the replica's `weights` [P], on any device, after `samples_total` samples of the run. Most calls do
        nothing: there are UPDATES updates per mean age."""
        if self.value is None:
            self.value = weights.detach().to("cpu", torch.float32, copy=True)
            self._first = self._last = samples_total
        elif (samples_total - self._last) * UPDATES >= self.share * samples_total and samples_total > self._last:
            kept = (self._last / samples_total) ** (1.0 / self.share - 1.0)
            self.value.lerp_(weights.detach().to("cpu", torch.float32), 1.0 - kept)
            self._last = samples_total


def weight_of(share: float, span: int, samples_total: int) -> float:
    """The weight of a mean over `span` samples among other replicas' means, WEIGHT_MIN to 1, by the covered share of
    its window."""
    window = SPAN_AGES * share * samples_total
    return 1.0 if span >= window else max(WEIGHT_MIN, span / window)

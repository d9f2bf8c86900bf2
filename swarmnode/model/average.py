"""A running mean of a replica's weights over the last samples of the run: what is exported, in place of a decay.

    mean(t) = integral of tau^g theta(tau) d tau / integral of tau^g d tau,  tau from 0 to t;   g = 1 / share - 2

[Power function EMA: arXiv 2312.02696, eq. 1 and 2. Merging weights of a constant rate replaces the rate's decay: WSM,
arXiv 2507.17634.] The weights in it are `share` of t old on average at any t: unlike a decay it needs no end that is
known before. It takes no part in training. A replica that joins, moves or is rebuilt begins anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

UPDATES = 16  # guess: times it is renewed while its mean age goes by; more often changes the sixth digit of the loss
SPAN_AGES = 2.0  # guess: a mean over as many of its ages counts as a whole one where replicas are averaged
WEIGHT_MIN = 0.05  # guess: of one that has just begun


class RunningMean:
    """Mean of weights [P] by the run's samples, float32 in the machine's memory, `share` of the samples old."""

    def __init__(self, share: float) -> None:
        assert 0.0 < share <= 0.5, f"share {share}; above 0 and at most a half"
        self.share = share
        self.value: Tensor | None = None  # None before the first weights
        self._first = self._last = 0  # samples of the run at the first weights and at the newest

    @property
    def span(self) -> int:
        """Samples of the run between the first weights in it and the newest."""
        return self._last - self._first

    def forget(self) -> None:
        """Begin anew: the weights become others."""
        self.value = None

    @torch.no_grad()
    def see(self, weights: Tensor, samples_total: int) -> None:
        """The replica has `weights` [P], on any device, after `samples_total` samples of the run. Most calls do
        nothing: it is renewed UPDATES times while its age goes by."""
        if self.value is None:
            self.value = weights.detach().to("cpu", torch.float32, copy=True)
            self._first = self._last = samples_total
        elif (samples_total - self._last) * UPDATES >= self.share * samples_total and samples_total > self._last:
            kept = (self._last / samples_total) ** (1.0 / self.share - 1.0)
            self.value.lerp_(weights.detach().to("cpu", torch.float32), 1.0 - kept)
            self._last = samples_total


def weight_of(share: float, span: int, samples_total: int) -> float:
    """What a mean over `span` samples counts among those of other replicas, WEIGHT_MIN to 1: by how much of its window
    it has seen."""
    window = SPAN_AGES * share * samples_total
    return 1.0 if span >= window else max(WEIGHT_MIN, span / window)

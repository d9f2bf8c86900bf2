"""Delayed Nesterov: packets are used as they come, momentum is renewed only every few of them.

    phi <- phi + beta mean(D)                                      each round; b <- b + mean(D)
    every N-th round:   m <- alpha m + b / N ;   phi <- phi + alpha beta m ;   b <- 0

[arXiv 2401.09135, algorithm 3 with c = 0.] Where replicas arrive at any time, momentum counts what is stale again and
again; delayed, it counts it once. The paper's DyLU, inner steps in proportion to a replica's speed, is what rounds of
samples do here by themselves: who is quick does more inner steps in a round.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from swarmnode.gossip.compression import Codec
from swarmnode.gossip.outer.mean import DeltaMean

EVERY = 4  # guess: the paper has the number of workers


class DelayedNesterov(DeltaMean):
    """Gradient steps every round, momentum steps every EVERY rounds."""

    name: ClassVar[str] = "delayed"

    def __init__(self, theta: torch.Tensor, codec: Codec, alpha: float, beta: float, every: int = EVERY) -> None:
        super().__init__(theta, codec, alpha, beta)
        self.every = every
        self._buffer = torch.zeros_like(self.theta)

    def _advance(self, phi: torch.Tensor, m: torch.Tensor, mean: torch.Tensor, start: int) -> None:
        assert self.round is not None
        buffer = self._buffer[start : start + mean.numel()]
        phi.add_(mean, alpha=self.beta)
        buffer.add_(mean)
        if self.round % self.every == 0:
            m.mul_(self.alpha).add_(buffer, alpha=1.0 / self.every)
            phi.add_(m, alpha=self.alpha * self.beta)
            buffer.zero_()

    @torch.no_grad()
    def reset(self, phi: torch.Tensor, momentum: torch.Tensor) -> None:
        super().reset(phi, momentum)
        self._buffer.zero_()

"""Delayed Nesterov: every packet moves the weights, but the momentum is updated only every few rounds.

    phi <- phi + beta mean(D) ;   b <- b + beta mean(D)            each round
    m <- alpha m + b ;   phi <- phi + alpha m ;   b <- 0           every N-th round, after that

[arXiv 2401.09135, algorithm 3 with c = 0.] The weights are the paper's: over N packets, gradients and their
contribution to the momentum count alike, there 1 / N each for one worker's packet, here 1 for the mean of all workers'
packets. With N = 1 it is Nesterov's step (mean.py). The paper's DyLU, inner steps in proportion to a replica's speed,
follows here from rounds counted in samples: a faster replica does more inner steps per round.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from swarmnode.train.gossip.compression import Codec
from swarmnode_methods.mean import DeltaMean

EVERY = 4  # guess: the paper uses the number of workers, whose packets come one by one there


class DelayedNesterov(DeltaMean):
    """Gradient steps every round, momentum steps every `every` rounds.

    `momentum` holds alpha m + b, which is all that later rounds need: alpha m directly after a momentum step, the next
    m once N rounds have been added. So snapshots, which contain the momentum, contain the buffer, too.
    """

    name: ClassVar[str] = "delayed"

    def __init__(self, theta: torch.Tensor, codec: Codec, alpha: float, beta: float, every: int = EVERY) -> None:
        super().__init__(theta, codec, alpha, beta)
        self.every = every

    def _advance(self, phi: torch.Tensor, m: torch.Tensor, mean: torch.Tensor, start: int) -> None:
        assert self.round is not None
        phi.add_(mean, alpha=self.beta)
        if not m.numel():
            return
        m.add_(mean, alpha=self.beta)
        if self.round % self.every == 0:
            m.mul_(self.alpha)
            phi.add_(m)

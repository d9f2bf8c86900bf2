"""DiLoCo with packets of weights: all replicas of a stage meet each round, Nesterov momentum [arXiv 2311.08105]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from swarmnode.run.manifest import OuterConstants
from swarmnode.train.gossip.compression import Codec
from swarmnode.train.gossip.outer.method import Outer
from swarmnode_methods.mean import DeltaMean
from swarmnode_methods.noloco import FragmentView, NoLoCo, Share


class DiLoCo(NoLoCo):
    """m <- alpha m + beta mean(D); phi <- phi + alpha m + beta mean(D), the mean over all members.

    This is PyTorch's SGD(nesterov=True) with learning rate beta, which is folded into m. It is NoLoCo with n = all and
    Nesterov's step: slow weights are equal and gamma multiplies zero. So gamma is set to beta, which halves the bytes
    (only theta is sent) and removes differences caused by rounding or a missed round.
    """

    name: ClassVar[str] = "diloco"
    slow_on_host: ClassVar[bool] = False
    group_size: ClassVar[int | None] = None

    @classmethod
    def make(cls, theta: torch.Tensor, codec: Codec, step: OuterConstants, fragments: int) -> Outer:
        return (DeltaMean if codec.of_delta else cls)(theta, codec, step.alpha, step.beta)

    def __init__(self, theta: torch.Tensor, codec: Codec, alpha: float, beta: float) -> None:
        super().__init__(theta, codec, alpha, beta, gamma=beta)

    def _step(self, part: FragmentView, start: int, own_share: float, shares: Sequence[Share]) -> tuple[float, float]:
        """The heavy ball's step m, plus alpha (m - m of the last round): in total alpha m + beta mean(D)."""
        if not self.momentum.numel():
            return super()._step(part, start, own_share, shares)
        end = min(start + self._block, self.parameters)
        momentum = self.momentum[start:end]
        before = self.momentum[start:end].clone()
        delta_squared, _ = super()._step(part, start, own_share, shares)
        further = torch.sub(momentum, before, out=before).mul_(self.alpha)
        self.phi[start:end].add_(further)
        self.theta[start:end].add_(further)
        further.add_(momentum)
        return delta_squared, torch.dot(further, further).item()

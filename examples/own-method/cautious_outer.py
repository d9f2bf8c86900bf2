"""An outer method of one's own for swarmnode: DiLoCo's step without the elements whose momentum goes the wrong way.

D   = the mean of theta - phi over all replicas of a stage
m   <- alpha m + beta D
u   = alpha m + beta D                                        Nesterov's step, as DiLoCo
phi <- phi + u * [u D > 0] / max(share of [u D > 0], 0.5)     "cautious": Liang et al., arXiv 2411.16085, algorithm 1
"""

from __future__ import annotations

from typing import ClassVar

import torch

from swarmnode_methods.mean import DeltaMean


class CautiousOuter(DeltaMean):
    """DeltaMean brings packets, checks and the mean; a method of its kind is one function."""

    name: ClassVar[str] = "cautious"

    def _advance(self, phi: torch.Tensor, m: torch.Tensor, mean: torch.Tensor, start: int) -> None:
        step = self.beta * mean
        if m.numel():
            m.mul_(self.alpha).add_(mean, alpha=self.beta)
            step.add_(m, alpha=self.alpha)
        agrees = (step * mean > 0).to(step.dtype)
        phi.add_(step * agrees / agrees.mean().clamp(min=0.5))

"""DiLoCo: all replicas of a stage meet each round [arXiv 2311.08105]; heavy-ball momentum as in NoLoCo's eq. 1-3."""

from __future__ import annotations

from typing import ClassVar

import torch

from swarmnode.gossip.compression import Codec
from swarmnode.gossip.outer.noloco import NoLoCo


class DiLoCo(NoLoCo):
    """m <- alpha m + beta mean(D); phi <- phi + m, the mean over all members.

    It is NoLoCo with n = all: slow weights are then equal and gamma multiplies zero. So gamma is set to beta, which
    halves the bytes (theta alone travels) and pulls together what rounding or a missed round has driven apart.
    """

    name: ClassVar[str] = "diloco"
    group_size: ClassVar[int | None] = None

    def __init__(self, theta: torch.Tensor, codec: Codec, alpha: float, beta: float) -> None:
        super().__init__(theta, codec, alpha, beta, gamma=beta)

"""SparseLoCo: each coordinate becomes the mean of the packets that contain it; no momentum [arXiv 2508.15706].

    phi <- phi + beta sum_j C(D_j) / |{j: C(D_j) is not 0}|      coordinate by coordinate;   theta as in mean.py

With codecs that choose coordinates (topk) most packets lack a coordinate. This is no vote for zero: the rest of their D
stays in their residual. Codecs that code every coordinate are divided by all members, because there a zero is a value,
in `ternary` even the most frequent one. All members decode the same packets in one order and stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from swarmnode.run.manifest import OuterConstants
from swarmnode.train.gossip.compression import Codec
from swarmnode.train.gossip.outer.method import Outer
from swarmnode_methods.mean import DeltaMean, WeightedPacket
from swarmnode_methods.topk import TopK


class SparseLoCo(DeltaMean):
    """The mean of a group's packets, including the own, over those that contain each coordinate."""

    name: ClassVar[str] = "sparseloco"

    @classmethod
    def make(cls, theta: torch.Tensor, codec: Codec, step: OuterConstants, fragments: int) -> Outer:
        return cls(theta, codec, step.beta)

    def __init__(self, theta: torch.Tensor, codec: Codec, beta: float = 1.0) -> None:
        super().__init__(theta, codec, 0.0, beta)
        # share of the packets that contain each coordinate of the block
        self._sent = torch.empty_like(self._mean) if isinstance(codec, TopK) else None

    def _average(self, shares: Sequence[WeightedPacket], start: int, mean: torch.Tensor, theirs: torch.Tensor) -> None:
        if self._sent is None:
            super()._average(shares, start, mean, theirs)
            return
        mean.zero_()
        sent = self._sent[: mean.numel()].zero_()
        for share in shares:
            self.codec.read(share.tensors, start, theirs)
            mean.add_(theirs, alpha=share.weight * share.keep)
            sent.add_(theirs.ne_(0.0), alpha=share.weight)
        mean.div_(torch.where(sent > 0.0, sent, 1.0))

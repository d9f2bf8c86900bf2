"""Plain averaging: two replicas meet and both continue from the mean of their weights, without momentum."""

from __future__ import annotations

from typing import ClassVar

import torch

from swarmnode.gossip.compression import Codec
from swarmnode.gossip.outer.method import Outer
from swarmnode.gossip.outer.noloco import NoLoCo
from swarmnode.manifest import OuterConstants


class Average(NoLoCo):
    """theta <- mean(theta): randomized pairwise gossip [Boyd et al., IEEE Trans. Inf. Theory 52(6), 2006]. It equals
    NoLoCo with alpha = 0 and beta = gamma = 1."""

    name: ClassVar[str] = "average"
    group_size: ClassVar[int | None] = 2

    @classmethod
    def make(cls, theta: torch.Tensor, codec: Codec, step: OuterConstants, fragments: int) -> Outer:
        return cls(theta, codec, fragments)

    def __init__(self, theta: torch.Tensor, codec: Codec, of: int = 1) -> None:
        super().__init__(theta, codec, 0.0, 1.0, 1.0, of)

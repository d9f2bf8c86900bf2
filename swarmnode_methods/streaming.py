"""Streaming DiLoCo: one fragment of the coordinates per round, so that peak traffic falls by their number.

    round r is about fragment r mod F; for its coordinates, with D = theta - phi since their own last round
    m   <- alpha m + beta mean_j D_j ;   phi <- phi + alpha m + beta mean_j D_j
    theta <- MERGE (theta, as it has moved on meanwhile) + (1 - MERGE) (phi + gain of theta since the boundary)

[arXiv 2501.18512: fragments, overlap with tau inner steps, merging; its MERGE = 0.5 and E3M0 packets.] The overlap is
the time between `message` and `apply`, in which inner steps continue. Fragments are ranges of coordinates, hence of
layers.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from swarmnode.base.errors import ManifestError
from swarmnode.train.gossip.compression import Codec
from swarmnode_methods.delta import DeltaCodec
from swarmnode_methods.mean import BLOCK, DeltaMean

FRAGMENTS = 4  # guess: the paper has 3 layers a fragment; ours are small
MERGE = 0.5  # paper, section 2.4
UNIT = 4096  # elements: fragments begin at multiples of it, as every codec needs


class Streaming(DeltaMean):
    """DiLoCo, one fragment at a time."""

    name: ClassVar[str] = "streaming"

    def __init__(
        self,
        theta: torch.Tensor,
        codec: Codec,
        alpha: float,
        beta: float,
        fragments: int = FRAGMENTS,
        merge: float = MERGE,
    ) -> None:
        super().__init__(theta, codec, alpha, beta)
        if isinstance(codec, DeltaCodec) and codec.feedback:
            raise ManifestError(f"gossip.codec {codec.name} keeps a residual, but the next packet is of other weights")
        assert BLOCK % UNIT == 0 and 0.0 <= merge < 1.0
        units = -(-self.parameters // UNIT)
        self.fragments = min(fragments, units)
        self.merge = merge
        self._cuts = [min(i * units // self.fragments * UNIT, self.parameters) for i in range(self.fragments + 1)]

    @property
    def message_nbytes(self) -> int:
        largest = max(self.codec.nbytes(b - a) for a, b in zip(self._cuts, self._cuts[1:], strict=False))
        return largest + self._fragment_nbytes(0)

    def _span(self, round_index: int) -> tuple[int, int]:
        fragment = round_index % self.fragments
        return self._cuts[fragment], self._cuts[fragment + 1]

    def _follow(self, theta: torch.Tensor, boundary: torch.Tensor, phi: torch.Tensor) -> None:
        torch.lerp(theta - boundary + phi, theta, self.merge, out=theta)

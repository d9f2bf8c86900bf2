"""Keeping: sparse packets as SparseLoCo's, but what nobody sent stays in each replica's own weights (ours).

    C_i = C(theta_i - phi)         S = coordinates that any packet has         M = their mean over those who sent them
    in S:     phi <- phi + M ;   theta_i <- phi + (what theta_i gained since the boundary)
    not in S: phi and theta_i stay as they are

SparseLoCo [arXiv 2508.15706] puts all fast weights back to the slow ones and what was not sent aside, so that training
goes on without what was learned and not sent. Here a replica goes on with what it learned until somebody sends that
coordinate; then all agree on it, as in dense averaging, only more seldom. Measured (8 replicas of `bench gossip
--preset quick`, nats over dense averaging): rounds of 50 steps, k = 64, 48 rounds +0.019 (three seeds, standard error
0.008; the replicas' average +0.005), 60 rounds -0.033 (0.016). Rounds of 15 steps, 60 of them, seed 0: k = 512 +0.028,
k = 64 +0.064 (seed 1: +0.074); dense averaging in every second round +0.058. After 200 rounds of 15 k = 64 costs -0.011
(seven runs, 0.019).

Tried for k = 64 and worse (60 rounds, seed 0): half of M where half or fewer sent +0.096, M times the share who sent
+0.175, what a sender's code left out kept in its weights +0.068; choosing among the same eighth of the coordinates at
all replicas, another each round, +0.126, each replica among an eighth of its own +0.216.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from swarmnode.errors import ManifestError
from swarmnode.gossip.compression import Codec
from swarmnode.gossip.compression.topk import TopK
from swarmnode.gossip.outer.sparseloco import SparseLoCo
from swarmnode.ports import Draft


class Keeping(SparseLoCo):
    """SparseLoCo's mean of a group's sparse packets over those who sent; slow weights are equal at all members, fast
    ones where anything was sent."""

    name: ClassVar[str] = "keeping"

    def __init__(self, theta: torch.Tensor, codec: Codec) -> None:
        super().__init__(theta, codec)
        if not isinstance(codec, TopK):
            raise ManifestError(f"gossip.codec {codec.name} chooses no coordinates; {self.name} needs one that does")
        self._coder = codec

    @torch.no_grad()
    def draft(self, round_index: int) -> Draft:
        self.round = None  # of the weights alone: it may be made as often as one likes
        if self._coder.residual is not None:
            self._coder.residual.zero_()
        return super().draft(round_index)

    def _follow(self, theta: torch.Tensor, boundary: torch.Tensor, phi: torch.Tensor) -> None:
        assert self._sent is not None
        theta.copy_(torch.where(self._sent[: theta.numel()] > 0.0, theta - boundary + phi, theta))

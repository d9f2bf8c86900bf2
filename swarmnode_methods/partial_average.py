"""Partial averaging: sparse packets as SparseLoCo's, but coordinates that were not sent stay in each replica's own
weights (ours).

    C_i = C(theta_i - phi)         S = coordinates in any packet         M = their mean over the packets that have them
    in S:     phi <- phi + M ;   theta_i <- phi + (gain of theta_i since the boundary)
    not in S: phi and theta_i stay as they are

SparseLoCo [arXiv 2508.15706] resets all fast weights to the slow ones and keeps unsent progress aside, so training
continues without it. Here a replica continues with what it learned until some member sends that coordinate; then all
agree on it, as in dense averaging, only less often. Measured (8 replicas of `bench gossip --preset quick`, nats over
dense averaging): rounds of 50 steps, k = 64, 48 rounds +0.019 (three seeds, standard error 0.008; the replicas' average
+0.005), 60 rounds -0.033 (0.016). Rounds of 15 steps, 60 of them, seed 0: k = 512 +0.028, k = 64 +0.064 (seed 1:
+0.074); dense averaging in every second round +0.058. After 200 rounds of 15 k = 64 costs -0.011 (seven runs, 0.019).

Tried for k = 64 and worse (60 rounds, seed 0): half of M for coordinates in half of the packets or fewer +0.096, M
times the share of packets +0.175, keeping the coding error in the sender's weights +0.068; choosing among the same
eighth of the coordinates at all replicas, another each round, +0.126, each replica among an eighth of its own +0.216.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from swarmnode.base.errors import ManifestError
from swarmnode.base.ports import StreamingMessage
from swarmnode.run.manifest import OuterConstants
from swarmnode.train.gossip.compression import Codec
from swarmnode.train.gossip.outer.method import Outer
from swarmnode_methods.sparseloco import SparseLoCo
from swarmnode_methods.topk import TopK


class PartialAverage(SparseLoCo):
    """SparseLoCo's mean of a group's sparse packets over those that have a coordinate. Slow weights are equal at all
    members, fast weights only in coordinates that were sent."""

    name: ClassVar[str] = "partial_average"

    @classmethod
    def make(cls, theta: torch.Tensor, codec: Codec, step: OuterConstants, fragments: int) -> Outer:
        return cls(theta, codec)

    def __init__(self, theta: torch.Tensor, codec: Codec) -> None:
        super().__init__(theta, codec)
        if not isinstance(codec, TopK):
            raise ManifestError(f"gossip.codec {codec.name} chooses no coordinates; {self.name} needs one that does")
        self._coder = codec

    @torch.no_grad()
    def draft(self, round_index: int) -> StreamingMessage:
        self.round = None  # a function of the weights alone: it may be made repeatedly
        if self._coder.residual is not None:
            self._coder.residual.zero_()
        return super().draft(round_index)

    def _follow(self, theta: torch.Tensor, boundary: torch.Tensor, phi: torch.Tensor) -> None:
        assert self._sent is not None
        theta.copy_(torch.where(self._sent[: theta.numel()] > 0.0, theta - boundary + phi, theta))

"""Eager updates: apply the own pseudo-gradient at once, the others' when they arrive.

    at the boundary   D' <- (D_i + sum over j != i of C(D_j) of the last round) / n       theta <- phi + step(D')
    with all packets  D  <- mean_j C(D_j)                     phi <- phi + step(D) ;  theta <- phi + (gain since then)

[arXiv 2502.12996, eq. 4.] In the paper packets take the whole next round, so only D' is available for the step. Here an
exchange ends within its round: inner steps continue from D' meanwhile, and then D replaces D'. So slow weights and
momentum take DiLoCo's step and stay equal at all members; only the fast weights run ahead. If an exchange takes no
time, this equals DiLoCo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from swarmnode.base.ports import Packet, StreamingMessage
from swarmnode.train.gossip.compression import Codec
from swarmnode_methods.mean import DeltaMean, WeightedPacket


class Eager(DeltaMean):
    """DiLoCo that steps before the others' packets arrive, using those of the previous round."""

    name: ClassVar[str] = "eager"
    steps_early: ClassVar[bool] = True

    def __init__(self, theta: torch.Tensor, codec: Codec, alpha: float, beta: float) -> None:
        super().__init__(theta, codec, alpha, beta)
        self._own_share = 1.0  # of the last round's mean
        self._others: torch.Tensor | None = None  # the other part of that mean, [P]; None before the first round
        self._ahead: torch.Tensor | None = None  # what the step by D' added to theta, [P]

    @torch.no_grad()
    def draft(self, round_index: int) -> StreamingMessage:
        self._go_back()
        draft = super().draft(round_index)
        if self._others is not None:
            expected = (self._boundary - self.phi).mul_(self._own_share).add_(self._others).mul_(self.beta)
            step = expected
            if self.momentum.numel():  # as _advance
                step = (self.momentum * self.alpha).add_(expected).mul_(self.alpha).add_(expected)
            self._ahead = step.add_(self.phi).sub_(self._boundary)
            self.theta.add_(self._ahead)
        return draft

    def prepare(self, packets: Sequence[Packet]) -> None:
        self._go_back()

    def _go_back(self) -> None:
        """Restore the fast weights as if only inner steps had moved them since the boundary."""
        if self._ahead is not None:
            self.theta.sub_(self._ahead)
            self._ahead = None

    def _shares(self, given: Sequence[WeightedPacket]) -> list[WeightedPacket]:
        shares = super()._shares(given)
        self._own_share = sum(share.weight for share in shares if share.tensors is self._own)
        return shares

    def _average(self, shares: Sequence[WeightedPacket], start: int, mean: torch.Tensor, theirs: torch.Tensor) -> None:
        super()._average([share for share in shares if share.tensors is not self._own], start, mean, theirs)
        if self._others is None:
            self._others = torch.zeros_like(self.phi)
        self._others[start : start + mean.numel()] = mean
        super()._average(shares, start, mean, theirs)  # the same order at every member

    @torch.no_grad()
    def reset(self, phi: torch.Tensor, momentum: torch.Tensor | None = None) -> None:
        super().reset(phi, momentum)
        self._own_share = 1.0
        self._others = None
        self._ahead = None

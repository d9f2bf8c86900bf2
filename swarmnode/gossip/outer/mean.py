"""Groups that average pseudo-gradients: DiLoCo and SparseLoCo with packets of D; every member decodes every packet.

    m   <- alpha m + beta mean_j C(D_j)              the own packet decoded too, so that members stay equal to the bit
    phi <- phi + m ;   theta <- phi + (what theta gained since the boundary)

alpha = 0, beta = 1 is SparseLoCo's step (sender mean, no momentum) [arXiv 2508.15706]; alpha > 0 heavy-ball DiLoCo
[arXiv 2311.08105]. Slow weights must be equal at all members: one that missed a round needs them sent. A lone step
takes the own packet; what it left out stays in the residual.

Its kin replace one of four parts: which slice of the coordinates a round is about (`_span`), what weight each packet
has (`_shares`), what becomes of the mean (`_advance`), and how fast weights follow (`_follow`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from swarmnode.errors import ManifestError
from swarmnode.gossip.compression import Codec
from swarmnode.gossip.outer.method import Outer, check_weight
from swarmnode.ports import OuterReport, Packet, WireTensor

BLOCK = 1 << 18  # elements at a time; a multiple of every codec's unit

Share = tuple[float, Sequence[WireTensor]]


class DeltaMean(Outer):
    """The mean of a group's packets of D, own included."""

    name: ClassVar[str] = "sparseloco"
    group_size: ClassVar[int | None] = None

    def __init__(self, theta: torch.Tensor, codec: Codec, alpha: float = 0.0, beta: float = 1.0) -> None:
        super().__init__(theta, codec)
        if codec.relative:
            raise ManifestError(f"gossip.codec {codec.name} sends weights; {self.name} sends pseudo-gradients")
        self.alpha, self.beta = alpha, beta
        self._boundary = torch.empty_like(self.theta)
        self._own: list[WireTensor] = []
        size = self.parameters if self.codec.name == "powersgd" else min(BLOCK, self.parameters)
        self._block = size
        self._mean, self._theirs = (torch.empty(size, dtype=theta.dtype, device=theta.device) for _ in range(2))

    @property
    def message_nbytes(self) -> int:
        return self.codec.nbytes(self.parameters)  # the first round's is the largest

    def _span(self, round_index: int) -> tuple[int, int]:
        """[first, last) of the coordinates that round `round_index` is about."""
        return 0, self.parameters

    def _shares(self, given: Sequence[Share]) -> list[Share]:
        """What of each packet is taken; shares of the mean add up to 1."""
        total = sum(weight for weight, _ in given)
        return [(weight / total, tensors) for weight, tensors in given]

    def _advance(self, phi: torch.Tensor, m: torch.Tensor, mean: torch.Tensor, start: int) -> None:
        """The outer step of elements from `start` on, in place; `mean` may be overwritten."""
        m.mul_(self.alpha).add_(mean, alpha=self.beta)
        phi.add_(m)

    def _follow(self, theta: torch.Tensor, boundary: torch.Tensor, phi: torch.Tensor) -> None:
        """Fast weights after the outer step: the slow ones and what theta gained since the boundary."""
        theta.sub_(boundary).add_(phi)

    @torch.no_grad()
    def message(self, round_index: int) -> list[WireTensor]:
        if self.round is not None:  # marked and never applied: a bequest made again for the heir's next round
            first, last = self._span(self.round)
            self.codec.take_back(self._own, (self._boundary - self.phi)[first:last])
        self._boundary.copy_(self.theta)
        self.round = round_index
        self.codec.at(round_index)
        first, last = self._span(round_index)
        self._own = self.codec.encode((self._boundary - self.phi)[first:last], seed=self.seed("delta"))
        return self._own

    def check(self, packet: Packet) -> None:
        check_weight(packet.weight)
        assert self.round is not None
        first, last = self._span(self.round)
        self.codec.check(packet.tensors, last - first)

    @torch.no_grad()
    def apply(self, round_index: int, own_weight: float, packets: Sequence[Packet]) -> OuterReport:
        assert self.round == round_index, f"outer step of round {round_index}; the boundary marked is {self.round}"
        for packet in packets:
            self.check(packet)
        given = [(packet.weight, packet.tensors) for packet in packets if packet.weight > 0.0]
        given = [(own_weight if given else 1.0, self._own), *given]
        # One order at every member, so that sums of floats are equal to the bit.
        given = sorted((g for g in given if g[0] > 0.0), key=lambda g: bytes(memoryview(g[1][0].data)[:64]))
        shares = self._shares(given)
        step_squared = delta_squared = 0.0
        first, last = self._span(round_index)
        for start in range(first, last, self._block):
            end = min(start + self._block, last)
            phi, m, theta, boundary = (f[start:end] for f in (self.phi, self.momentum, self.theta, self._boundary))
            mean, before = self._mean[: end - start], self._theirs[: end - start]
            self._average(shares, start - first, mean, before)
            torch.sub(boundary, phi, out=before)
            delta_squared += torch.dot(before, before).item()
            before.copy_(phi)
            self._advance(phi, m, mean, start)
            before.sub_(phi)
            step_squared += torch.dot(before, before).item()
            self._follow(theta, boundary, phi)
        self.round = None
        return OuterReport(len(given), math.sqrt(delta_squared), math.sqrt(step_squared))

    def _average(self, shares: Sequence[Share], start: int, mean: torch.Tensor, theirs: torch.Tensor) -> None:
        """The mean of packets from their element `start` on, into `mean`; `theirs` is scratch."""
        mean.zero_()
        for share, tensors in shares:
            self.codec.read(tensors, start, theirs)
            mean.add_(theirs, alpha=share)

"""Groups that average pseudo-gradients: DiLoCo and SparseLoCo with packets of D; every member decodes every packet.

    m   <- alpha m + beta mean_j C(D_j)              the own packet decoded too, so that members stay equal to the bit
    phi <- phi + m ;   theta <- phi + (what theta gained since the boundary)

alpha = 0, beta = 1 is SparseLoCo's step (sender mean, no momentum) [arXiv 2508.15706]; alpha > 0 heavy-ball DiLoCo
[arXiv 2311.08105]. Slow weights must be equal at all members: one that missed a round needs them sent. A lone step
takes the own packet; what it left out stays in the residual.
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

    @torch.no_grad()
    def message(self, round_index: int) -> list[WireTensor]:
        self._boundary.copy_(self.theta)
        self.round = round_index
        self.codec.at(round_index)
        self._own = self.codec.encode(self._boundary - self.phi, seed=self.seed("delta"))
        return self._own

    def check(self, packet: Packet) -> None:
        check_weight(packet.weight)
        self.codec.check(packet.tensors, self.parameters)

    @torch.no_grad()
    def apply(self, round_index: int, own_weight: float, packets: Sequence[Packet]) -> OuterReport:
        assert self.round == round_index, f"outer step of round {round_index}; the boundary marked is {self.round}"
        for packet in packets:
            self.check(packet)
        given = [(packet.weight, packet.tensors) for packet in packets if packet.weight > 0.0]
        given = [(own_weight if given else 1.0, self._own), *given]
        # One order at every member, so that sums of floats are equal to the bit.
        given = sorted((g for g in given if g[0] > 0.0), key=lambda g: bytes(memoryview(g[1][0].data)[:64]))
        total = sum(weight for weight, _ in given)
        step_squared = delta_squared = 0.0
        for start in range(0, self.parameters, self._block):
            end = min(start + self._block, self.parameters)
            phi, m, theta, boundary = (f[start:end] for f in (self.phi, self.momentum, self.theta, self._boundary))
            mean, theirs = self._mean[: end - start].zero_(), self._theirs[: end - start]
            for weight, tensors in given:
                self.codec.read(tensors, start, theirs)
                mean.add_(theirs, alpha=weight / total)
            torch.sub(boundary, phi, out=theirs)
            delta_squared += torch.dot(theirs, theirs).item()
            m.mul_(self.alpha).add_(mean, alpha=self.beta)
            step_squared += torch.dot(m, m).item()
            theta.sub_(boundary)
            phi.add_(m)
            theta.add_(phi)
        self.round = None
        return OuterReport(len(given), math.sqrt(delta_squared), math.sqrt(step_squared))

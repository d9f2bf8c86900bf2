"""DES-LOC: weights and AdamW's two moments are averaged, each with its own period.

    round r:  theta <- mean(theta) when EVERY_THETA divides r
              u     <- mean(u)     when EVERY_FIRST does      u: first moment (exp_avg)
              v     <- mean(v)     when EVERY_SECOND does     v: second moment (exp_avg_sq), where there is one
    each plus its gain since the boundary

[arXiv 2505.22549, algorithm 1.] A moment of decay beta forgets in 1 / (1 - beta) steps: slow moments of replicas hardly
differ and can be averaged rarely. Averaging them at all keeps the convergence of synchronous AdamW, which averaging of
weights alone does not. Over EVERY_SECOND rounds it sends 1 + 1/3 + 1/6 = 1.5 buffers per round instead of 3.

Unless all packets are believed, each element of a partner's moment counts up to MOMENT_MOST times our own: AdamW
divides one moment by the root of the other, so a single large element made the next step 70,700 rates long (measured).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from swarmnode.base.errors import ManifestError, RemoteFault
from swarmnode.base.ports import OuterReport, Packet, StreamingMessage, WireTensor
from swarmnode.run.manifest import OuterConstants
from swarmnode.train.gossip.compression import Codec
from swarmnode.train.gossip.outer.method import Outer, one_by_one
from swarmnode_methods.noloco import Average

# The paper: K_u = 3 K_x, K_v = 6 K_x.
EVERY_THETA = 1
EVERY_FIRST = 3
EVERY_SECOND = 6
# Of two, the mean's element then has -1.5 to 2.5 times our own, and no step is longer than so many rates. Guess: second
# moments of replicas hardly differ, and first ones are forgotten in ten steps.
MOMENT_MOST = 4.0


class DesLoc(Average):
    """Plain averaging of weights, and of moments every few rounds. Without `moments` it is plain averaging."""

    name: ClassVar[str] = "desloc"
    group_size: ClassVar[int | None] = None
    averages_moments: ClassVar[bool] = True
    in_halves: ClassVar[bool] = False  # moments lie where the fast weights do

    @classmethod
    def make(cls, theta: torch.Tensor, codec: Codec, step: OuterConstants, fragments: int) -> Outer:
        return cls(theta, codec)

    def __init__(self, theta: torch.Tensor, codec: Codec) -> None:
        super().__init__(theta, codec)
        if codec.relative:
            raise ManifestError(
                f"gossip.codec {codec.name} needs partners with similar values; moments of {self.name} are not similar"
            )
        self._moments: list[tuple[int, torch.Tensor]] = []
        self._averaged: list[torch.Tensor] = []  # moments due, at the boundary

    def attend(self, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        assert exp_avg.shape == self.theta.shape and exp_avg_sq.dim() == 1
        self._moments = [(EVERY_FIRST, exp_avg.detach()), (EVERY_SECOND, exp_avg_sq.detach())]

    @property
    def attends(self) -> bool:
        """Whether it has moments to average."""
        return bool(self._moments)

    def _due(self, round_index: int) -> list[torch.Tensor]:
        return [moment for every, moment in self._moments if round_index % every == 0]

    @property
    def message_nbytes(self) -> int:
        return self.codec.nbytes(self.parameters) + sum(self.codec.nbytes(m.numel()) for _, m in self._moments)

    def nbytes_of(self, round_index: int) -> int:
        moments = sum(self.codec.least_nbytes(moment.numel()) for moment in self._due(round_index))
        return super().nbytes_of(round_index) + moments

    @torch.no_grad()
    def draft(self, round_index: int) -> StreamingMessage:
        theta = super().draft(round_index)
        self._averaged = [moment.to(self.phi.device, copy=True) for moment in self._due(round_index)]
        seeds = [self.seed(f"moment {number}") for number in range(len(self._averaged))]
        drafts = map(lambda moment, seed: self.codec.draft(moment, seed=seed), self._averaged, seeds)
        return one_by_one(theta, *drafts)

    def check(self, packet: Packet) -> None:
        super().check(packet)
        assert self.round is not None
        parts = self._after_theta(packet)
        if len(parts) != len(self._averaged) * self.codec.tensors:
            raise RemoteFault(f"{self.name} packet of {len(packet.tensors)} tensors in round {self.round}")
        for number, moment in enumerate(self._due(self.round)):
            part = self._moment(packet, number)
            self.codec.check(part, moment.numel())
            if moment is self._moments[-1][1] and self._least(part, moment.numel()) < 0.0:
                raise RemoteFault(f"{self.name} packet with a negative second moment")

    def _parts(self, tensors: Sequence[WireTensor]) -> list[Sequence[WireTensor]]:
        return [tensors[: self.codec.tensors]]

    def _after_theta(self, packet: Packet) -> Sequence[WireTensor]:
        return packet.tensors[self.codec.tensors :]

    def _moment(self, packet: Packet, number: int) -> Sequence[WireTensor]:
        return self._after_theta(packet)[number * self.codec.tensors : (number + 1) * self.codec.tensors]

    def _least(self, part: Sequence[WireTensor], count: int) -> float:
        least = 0.0
        for start in range(0, count, self._block):
            block = self._scratch[0][: min(self._block, count - start)]
            self.codec.read(part, start, block)
            least = min(least, float(block.min()))
        return least

    def _outer_step(
        self, own_weight: float, packets: Sequence[Packet], taken: Sequence[tuple[Packet, float]]
    ) -> OuterReport:
        assert self.round is not None
        due = self._due(self.round)
        total = own_weight + sum(packet.weight for packet, _ in taken)
        report = super()._outer_step(own_weight, packets, taken)
        for number, (moment, marked) in enumerate(zip(due, self._averaged, strict=True) if taken else ()):
            for start in range(0, moment.numel(), self._block):
                end = min(start + self._block, moment.numel())
                mean, theirs = (scratch[: end - start] for scratch in self._scratch[:2])
                torch.mul(marked[start:end], own_weight / total, out=mean)
                for packet, _ in taken:
                    self.codec.read(self._moment(packet, number), start, theirs)
                    if self.guard is not None:
                        most = MOMENT_MOST * marked[start:end].abs()
                        theirs.clamp_(-most, most)
                    mean.add_(theirs, alpha=packet.weight / total)
                moment[start:end].add_(mean.sub_(marked[start:end]).to(moment.device))
            if moment is self._moments[-1][1]:
                moment.clamp_(min=0.0)  # its decrease since the boundary may exceed the mean
        return report

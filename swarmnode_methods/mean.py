"""DiLoCo with packets of pseudo-gradients: every member of a group decodes every packet [arXiv 2311.08105].

    D   <- mean_j C(D_j)                             the own packet decoded too, so that members stay equal to the bit
    m   <- alpha m + beta D ;   phi <- phi + alpha m + beta D          Nesterov, as PyTorch's SGD; beta is folded into m
    theta <- phi + (gain of theta since the boundary)

alpha = 0, beta = 1 is dense averaging. Slow weights must be equal at all members; `healing` restores equality
(fragment.py). A replica alone in its stage applies its own packet; the unsent part stays in the residual. If there are
others and no packet of theirs arrived or was believed, the round changes nothing: the slow weights wait for the others,
and the progress is in the next packet.

Packets are judged one by one: a misshapen or refused one is left out, a clipped one is scaled down. The packet of a
leaving replica, which only one member gets, is added to that member's fast weights and reaches all with its next
packet.

Derived methods replace one of five parts: the slice of coordinates of a round (`_span`), the weight of each packet
(`_shares`), the mean of packets (`_average`), the step by that mean (`_advance`), and the update of the fast weights
(`_follow`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from swarmnode.base.errors import ManifestError, RemoteFault
from swarmnode.base.ports import OuterReport, Packet, PacketMeasures, StreamingMessage, WireTensor
from swarmnode.run.manifest import OuterConstants
from swarmnode.train.gossip.compression import Codec
from swarmnode.train.gossip.outer.method import Outer, check_weight, one_by_one
from swarmnode_methods import fragment
from swarmnode_methods.delta import DeltaCodec

BLOCK = 1 << 18  # elements at a time; a multiple of every codec's unit


@dataclass(frozen=True, slots=True)
class WeightedPacket:
    """A packet in a mean: its weight, its tensors, and the share of its D that the guard keeps."""

    weight: float
    tensors: Sequence[WireTensor]
    keep: float = 1.0


class DeltaMean(Outer):
    """The mean of a group's packets of D, including the own."""

    name: ClassVar[str] = "diloco"
    group_size: ClassVar[int | None] = None

    @classmethod
    def make(cls, theta: torch.Tensor, codec: Codec, step: OuterConstants, fragments: int) -> Outer:
        return cls(theta, codec, step.alpha, step.beta)

    def __init__(self, theta: torch.Tensor, codec: Codec, alpha: float = 0.0, beta: float = 1.0) -> None:
        super().__init__(theta, codec, alpha)
        if codec.relative:
            raise ManifestError(f"gossip.codec {codec.name} sends weights; {self.name} sends pseudo-gradients")
        assert codec.tensors == 1
        self.beta = beta
        self._boundary = torch.empty_like(self.theta)
        self._own: list[WireTensor] = []
        size = self.parameters if self.codec.at_once else min(BLOCK, self.parameters)
        self._block = size
        self._mean, self._theirs = (torch.empty(size, dtype=theta.dtype, device=theta.device) for _ in range(2))

    @property
    def message_nbytes(self) -> int:
        return self.codec.nbytes(self.parameters) + self._fragment_nbytes(0)  # the first round's is the largest

    def nbytes_of(self, round_index: int) -> int:
        first, last = self._span(round_index)
        self.codec.at(round_index)
        return self.codec.least_nbytes(last - first) + self._fragment_nbytes(round_index)

    def _fragment_nbytes(self, round_index: int) -> int:
        return fragment.nbytes(self.parameters, round_index) if self.healing else 0

    def _span(self, round_index: int) -> tuple[int, int]:
        """[first, last) of the coordinates of round `round_index`."""
        return 0, self.parameters

    def _elements(self, packet: Packet) -> int:
        """Elements that `packet`, of the marked round, holds."""
        assert self.round is not None
        first, last = self._span(self.round)
        return last - first

    def _shares(self, given: Sequence[WeightedPacket]) -> list[WeightedPacket]:
        """The packets with normalised weights, which add up to 1."""
        total = sum(share.weight for share in given)
        return [WeightedPacket(share.weight / total, share.tensors, share.keep) for share in given]

    def _advance(self, phi: torch.Tensor, m: torch.Tensor, mean: torch.Tensor, start: int) -> None:
        """The outer step of the elements from `start` on, in place; `mean` may be overwritten."""
        phi.add_(mean, alpha=self.beta)
        if m.numel():
            phi.add_(m.mul_(self.alpha).add_(mean, alpha=self.beta), alpha=self.alpha)

    def _follow(self, theta: torch.Tensor, boundary: torch.Tensor, phi: torch.Tensor) -> None:
        """Set the fast weights to the slow ones plus theta's gain since the boundary."""
        theta.sub_(boundary).add_(phi)

    @torch.no_grad()
    def draft(self, round_index: int) -> StreamingMessage:
        if (
            self.round is not None and self._own
        ):  # marked and never applied: a final delta made again for the successor's next round
            first, last = self._span(self.round)
            self.codec.take_back(self._own, (self._boundary - self.phi)[first:last])
            self._own = []
        first, last = self._span(round_index)
        delta = self.theta[first:last] - self.phi[first:last]
        self._boundary.copy_(self.theta)
        self.round = round_index
        self.codec.at(round_index)
        healing = StreamingMessage([fragment.fragment(self.phi, round_index)]) if self.healing else None
        own = self.codec.draft(delta, seed=self.seed("delta"))
        self._own = list(own.tensors)
        return own if healing is None else one_by_one(own, healing)

    def check(self, packet: Packet) -> None:
        check_weight(packet.weight)
        assert self.round is not None
        if len(packet.tensors) != 1 + self.healing:
            raise RemoteFault(f"{self.name} packet of {len(packet.tensors)} tensors; it has {1 + self.healing}")
        self.codec.check(packet.tensors[:1], self._elements(packet))
        if self.healing:
            fragment.check_fragment(packet.tensors[1], self.parameters, self.round)

    def _outer_step(
        self, own_weight: float, packets: Sequence[Packet], taken: Sequence[tuple[Packet, float]]
    ) -> OuterReport:
        assert self.round is not None
        met = [(packet, keep) for packet, keep in taken if not packet.final_delta]
        first, last = self._span(self.round)
        if not met and (own_weight == 0.0 or any(not packet.final_delta for packet in packets)):
            self.codec.take_back(self._own, (self._boundary - self.phi)[first:last])
            self.round = None
            self._inherit(first, last, taken)
            return OuterReport(0, float((self._boundary - self.phi).norm()), 0.0)
        if own_weight == 0.0:  # nothing of ours counts, so nothing of ours was sent
            self.codec.take_back(self._own, (self._boundary - self.phi)[first:last])
        given = [WeightedPacket(own_weight if met else 1.0, self._own)]
        given += [WeightedPacket(packet.weight, packet.tensors[:1], keep) for packet, keep in met]
        # The same order at every member, so that sums of floats are equal to the bit.
        given = sorted((g for g in given if g.weight > 0.0), key=lambda g: bytes(memoryview(g.tensors[0].data)[:64]))
        apart = self._heal(own_weight, [packet for packet, _ in met])
        shares = self._shares(given)
        step_squared = delta_squared = 0.0
        for start in range(first, last, self._block):
            end = min(start + self._block, last)
            phi, m, theta, boundary = (f[start:end] for f in (self.phi, self.momentum, self.theta, self._boundary))
            mean = self._mean[: end - start]
            before = self._theirs[: end - start]
            self._average(shares, start - first, mean, before)
            torch.sub(boundary, phi, out=before)
            delta_squared += torch.dot(before, before).item()
            before.copy_(phi)
            self.stepping = True
            self._advance(phi, m, mean, start)
            before.sub_(phi)
            step_squared += torch.dot(before, before, out=self._square).item()
            self._follow(theta, boundary, phi)
        self.round = None
        self._inherit(first, last, taken)
        self.stepping = False
        return OuterReport(len(given), math.sqrt(delta_squared), math.sqrt(step_squared), apart=apart)

    def _inherit(self, first: int, last: int, taken: Sequence[tuple[Packet, float]]) -> None:
        """Add the packets of leaving replicas to the fast weights."""
        for packet, keep in taken:
            for start in range(first, last, self._block) if packet.final_delta else ():
                theta = self.theta[start : min(start + self._block, last)]
                theirs = self._theirs[: len(theta)]
                self.codec.read(packet.tensors[:1], start - first, theirs)
                theta.add_(theirs, alpha=packet.weight * keep)

    def _average(self, shares: Sequence[WeightedPacket], start: int, mean: torch.Tensor, theirs: torch.Tensor) -> None:
        """The mean of packets from their element `start` on, into `mean`; `theirs` is scratch."""
        mean.zero_()
        for share in shares:
            self.codec.read(share.tensors, start, theirs)
            mean.add_(theirs, alpha=share.weight * share.keep)

    def _heal(self, own_weight: float, met: Sequence[Packet]) -> float | None:
        """Move this round's fragment of the slow weights to the members' median, if there are other members. Returns
        the estimated distance of all slow weights from the median, or None."""
        if not self.healing or not met:
            return None
        assert self.round is not None
        phi = fragment.part(self.phi, self.round)
        move = fragment.pull(phi, [packet.tensors[1] for packet in met], counts=own_weight > 0.0)
        apart = float(move.norm()) * math.sqrt(self.parameters / len(move))
        two = self.guard is not None and len(met) + (own_weight > 0.0) <= 2  # no majority: as far as D is believed
        if two and apart > (limit := self._heal_limit(own_weight)):
            move.mul_(limit / apart)
        for flat in self._heal_flats():
            fragment.part(flat, self.round).add_(move)
        return apart

    def _heal_flats(self) -> Sequence[torch.Tensor]:
        """The buffers that move with the slow weights, and these."""
        return self.phi, self.theta, self._boundary

    def _heal_limit(self, own_weight: float) -> float:
        """The distance that two members move towards each other at most."""
        assert self.guard is not None
        own = float((self._boundary - self.phi).norm()) if own_weight > 0.0 else 0.0
        return self.guard.limit(PacketMeasures(own, 0.0, float(self.phi.norm())))[0]

    def _wanted(self, start: int, first: int, out: torch.Tensor) -> None:
        """The content of our own packet before coding, elements from `start` on: D plus the residual of earlier
        packets."""
        end = start + out.numel()
        residual = self.codec.residual if isinstance(self.codec, DeltaCodec) else None
        if residual is None:
            torch.sub(self._boundary[start:end], self.phi[start:end], out=out)
        else:
            self.codec.read(self._own, start - first, out)
            out.add_(residual[start - first : end - first].to(out.device, out.dtype))

    @torch.no_grad()
    def measure(self, packet: Packet, *, judged_by_own: bool = True) -> PacketMeasures:
        assert self.round is not None
        own = gap = weights = 0.0
        first, last = self._span(self.round)
        for start in range(first, last, self._block):
            end = min(start + self._block, last)
            wanted = self._mean[: end - start]
            theirs = self._theirs[: end - start]
            phi = self.phi[start:end]
            self._wanted(start, first, wanted)
            self.codec.read(packet.tensors[:1], start - first, theirs)
            own += torch.dot(wanted, wanted).item()
            weights += torch.dot(phi, phi).item()
            theirs.sub_(wanted)
            gap += torch.dot(theirs, theirs).item()
        return PacketMeasures(math.sqrt(own) if judged_by_own else 0.0, math.sqrt(gap), math.sqrt(weights))

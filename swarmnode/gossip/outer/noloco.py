"""NoLoCo: replicas meet in pairs, nobody waits for all [arXiv 2506.10911, eq. 1-3; the sign of beta as in its code]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from swarmnode.errors import ManifestError
from swarmnode.gossip.compression import Codec
from swarmnode.gossip.outer.method import Outer, check_weight, one_by_one
from swarmnode.gossip.robust import Measures
from swarmnode.ports import Draft, OuterReport, Packet, WireTensor

BLOCK_CPU = 1 << 18  # elements; measured best of 2^12 .. 2^19: 8 M parameters in 19 ms (2^15: 29 ms, 2^12: 107 ms)
BLOCK_DEVICE = 1 << 24  # guess: enough to fill an accelerator, 64 MiB of scratch


class NoLoCo(Outer):
    """With D_j = theta_j - phi_j at the boundary and means over the members of weight > 0, weighted:

        m   <- alpha m + beta mean(D) + gamma (mean(phi) - phi)
        phi <- phi + m
        theta <- phi + (what theta gained since the boundary)

    What travels: when gamma == beta the two means come together as mean(theta) - phi, so theta alone is sent (exact,
    half the bytes); otherwise D and phi. With a lossy codec the own part of every mean is exact and only the partners'
    parts are what their codec left; in pairs the mean of m is then off by beta / 2 times the mean of their errors.

    A member of weight 0 receives and does not give: a newcomer takes its partners' average alone, and its partners,
    when nobody else gives them anything, take a lone step (n = 1: m <- alpha m + beta D).
    """

    name: ClassVar[str] = "noloco"
    group_size: ClassVar[int | None] = 2

    def __init__(self, theta: torch.Tensor, codec: Codec, alpha: float, beta: float, gamma: float) -> None:
        super().__init__(theta, codec)
        self.alpha, self.beta, self.gamma = alpha, beta, gamma
        self._theta_alone = gamma == beta
        self._keeps: list[float] = []  # of the packets of the step under way, how much of their distance counts
        if codec.of_delta:
            raise ManifestError(f"gossip.codec {codec.name} sends pseudo-gradients; {self.name} needs weights")
        if codec.relative and not self._theta_alone:
            raise ManifestError(f"gossip.codec {codec.name} sends theta alone: gossip.gamma must equal gossip.beta")
        self._boundary = torch.empty_like(self.theta)  # theta at the boundary
        self._delta = None if self._theta_alone else torch.empty_like(self.theta)
        block = min(self.parameters, BLOCK_CPU if theta.device.type == "cpu" else BLOCK_DEVICE)
        self._starts = range(0, self.parameters, block)
        self._block = block
        self._scratch = [torch.empty(block, dtype=theta.dtype, device=theta.device) for _ in range(3)]

    @property
    def message_nbytes(self) -> int:
        return self.codec.nbytes(self.parameters) * (1 if self._theta_alone else 2)

    def nbytes_of(self, round_index: int) -> int:
        return super().nbytes_of(round_index) * (1 if self._theta_alone else 2)

    @torch.no_grad()
    def draft(self, round_index: int) -> Draft:
        self._boundary.copy_(self.theta)
        self.round = round_index
        if self._delta is None:
            return self.codec.draft(self._boundary, reference=self.phi, seed=self.seed("theta"))
        torch.sub(self._boundary, self.phi, out=self._delta)
        return one_by_one(
            self.codec.draft(self._delta, seed=self.seed("delta")), self.codec.draft(self.phi, seed=self.seed("phi"))
        )

    def check(self, packet: Packet) -> None:
        check_weight(packet.weight)
        for part in self._parts(packet):
            self.codec.check(part, self.parameters)

    @torch.no_grad()
    def apply(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        assert self.round == round_index, f"outer step of round {round_index}; the boundary marked is {self.round}"
        assert 0.0 <= own_weight <= 1.0, f"own weight {own_weight}"
        verdicts = [self._judge(own_weight, packet) for packet in packets]
        probed = self._probe_one(own_weight, packets, verdicts)
        taken = [(packet, verdict.keep) for packet, verdict in zip(packets, verdicts, strict=True) if verdict.keep > 0]
        if not taken and not lone:
            return OuterReport(0, 0.0, 0.0, verdicts, probed)
        givers = [(packet.weight, self._parts(packet)) for packet, _ in taken]
        total = own_weight + sum(weight for weight, _ in givers)
        own_share = own_weight / total if givers else 1.0
        shares = [(weight / total, parts) for weight, parts in givers]
        self._keeps = [keep for _, keep in taken]
        delta_squared = step_squared = 0.0
        for start in self._starts:
            squares = self._step(start, own_share, shares)
            delta_squared += squares[0]
            step_squared += squares[1]
        self.round = None
        return OuterReport(
            members=len(givers) + (own_share > 0.0),
            delta_norm=math.sqrt(delta_squared),
            step_norm=math.sqrt(step_squared),
            verdicts=verdicts,
            probed=probed,
        )

    def _tried(self, packet: Packet, keep: float) -> tuple[torch.Tensor, torch.Tensor]:
        theirs = torch.empty_like(self._boundary)
        self._read(packet, 0, theirs, self._boundary)
        return self._boundary, torch.lerp(self._boundary, theirs, keep / 2, out=theirs)

    def _read(self, packet: Packet, start: int, theirs: torch.Tensor, ours: torch.Tensor) -> None:
        """The partner's fast weights from element `start` on; `ours` are our own there."""
        parts = self._parts(packet)
        self.codec.read(parts[0], start, theirs, ours)
        if len(parts) == 2:
            phi = torch.empty_like(theirs)
            self.codec.read(parts[1], start, phi)
            theirs.add_(phi)

    def measure(self, packet: Packet, *, judged_by_own: bool = True) -> Measures:
        own = norm = gap = product = weights = 0.0
        parts = self._parts(packet)
        for start in self._starts:
            end = min(start + self._block, self.parameters)
            phi, boundary = self.phi[start:end], self._boundary[start:end]
            delta, other, theirs = (scratch[: end - start] for scratch in self._scratch)
            self.codec.read(parts[0], start, theirs, boundary)
            if len(parts) == 2:
                self.codec.read(parts[1], start, other)
                theirs.add_(other)
            torch.sub(boundary, phi, out=delta)
            own += torch.dot(delta, delta).item()
            torch.sub(theirs, boundary, out=other)
            gap += torch.dot(other, other).item()
            theirs.sub_(phi)
            norm += torch.dot(theirs, theirs).item()
            product += torch.dot(theirs, delta).item()
            weights += torch.dot(phi, phi).item()
        if not judged_by_own:
            own = product = 0.0
        return Measures(math.sqrt(own), math.sqrt(norm), math.sqrt(gap), product, math.sqrt(weights))

    def _parts(self, packet: Packet) -> list[Sequence[WireTensor]]:
        """The packet's wire tensors by flat buffer, [theta] or [D, phi]; the codec's check sees a wrong number."""
        if self._theta_alone:
            return [packet.tensors]
        return [packet.tensors[: self.codec.tensors], packet.tensors[self.codec.tensors :]]

    def _step(
        self, start: int, own_share: float, shares: Sequence[tuple[float, Sequence[Sequence[WireTensor]]]]
    ) -> tuple[float, float]:
        """The outer step of one block of elements; returns the squared norms of D and of m."""
        end = min(start + self._block, self.parameters)
        theta, phi, m, boundary = (flat[start:end] for flat in (self.theta, self.phi, self.momentum, self._boundary))
        mean, pull, theirs = (scratch[: end - start] for scratch in self._scratch)
        torch.sub(boundary, phi, out=mean)
        delta_squared = torch.dot(mean, mean).item()
        m.mul_(self.alpha)
        if not shares:
            m.add_(mean, alpha=self.beta)
        elif self._theta_alone:
            torch.mul(boundary, own_share, out=mean)
            self._add(start, mean, theirs, [(share, parts[0]) for share, parts in shares], boundary)
            m.add_(mean.sub_(phi), alpha=self.beta)
        else:
            mean.mul_(own_share)
            assert self._delta is not None
            ours = self._delta[start:end]
            self._add(start, mean, theirs, [(share, parts[0]) for share, parts in shares], ours)
            torch.mul(phi, own_share, out=pull)
            self._add(start, pull, theirs, [(share, parts[1]) for share, parts in shares], phi)
            m.add_(mean, alpha=self.beta).add_(pull.sub_(phi), alpha=self.gamma)
        theta.sub_(boundary)  # the gain
        phi.add_(m)
        theta.add_(phi)
        return delta_squared, torch.dot(m, m).item()

    def _add(
        self,
        start: int,
        mean: torch.Tensor,
        theirs: torch.Tensor,
        shares: Sequence[tuple[float, Sequence[WireTensor]]],
        ours: torch.Tensor,
    ) -> None:
        """Add the decoded packets to `mean`, those clipped drawn back towards `ours`."""
        for (share, tensors), keep in zip(shares, self._keeps, strict=True):
            self.codec.read(tensors, start, theirs, ours)
            if keep < 1.0:
                torch.lerp(ours, theirs, keep, out=theirs)
            mean.add_(theirs, alpha=share)

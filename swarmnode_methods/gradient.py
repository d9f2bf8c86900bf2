"""Data parallelism: the gradients of all members are averaged before every inner step.

    draft    D  <- gathered gradient of this replica, summed over its samples, over gossip.round_samples
    round    g  =  sum_j keep_j C(D_j)                     the own packet decoded too, in the same order at all members
             W  <- the inner optimizer's own step by g     at the rate of the round's samples: equal to the bit
             the gathered gradient of the next round begins with D - C(D): error feedback

What replicas learn is what one process learns that has all samples of a step, but for the codec's error. Replicas with
more samples count for more, and what a missing one had is missing: its next packet has it. Slow and fast weights are
one buffer.

A packet longer than CLIP medians of all packets is shortened to that, the own one too. One that leads elsewhere than
most does not count. Such rules need nothing but packets, so members stay equal:

    a_j  =  median over the other members k of <D_j, D_k>, shortened, over the square of the median length
    A_j  <- a_j smoothed over rounds; D_j counts unless A_j is less than AGREES of the members' median A by more than
            Z deviations, the median one of the members' a or its own, smoothed

So what a liar was let in with has, over some rounds, led where the others go, or nowhere. Two members have no majority,
and no test. Healing is that of mean.py. Exchanges lie between two steps (gossip/exchange.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_high, median_low
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from swarmnode.ema import ENOUGH, EmaMoments
from swarmnode.errors import LocalFault, ManifestError
from swarmnode.gossip.compression import Codec
from swarmnode.gossip.outer.method import Outer, one_by_one
from swarmnode.gossip.round import SPEEDS_MAX
from swarmnode.manifest import OuterConstants
from swarmnode.ports import OuterReport, Packet, StepReport, StreamingMessage, Verdict, WireTensor
from swarmnode.remembered import Remembered
from swarmnode_methods import fragment
from swarmnode_methods.delta import DeltaCodec
from swarmnode_methods.mean import DeltaMean

if TYPE_CHECKING:
    from swarmnode.machine.replica import TorchReplica


CLIP = math.sqrt(SPEEDS_MAX)  # derived: a mean's noise, most of a packet, grows with the root of a machine's samples
AGREES = 1 / 8  # guess: a machine with an eighth of the usual samples still counts
Z = 2.0  # derived: of members whose true agreement is at that bound, one in 44 is refused in a round


class GradientOf:
    """A replica's gathered gradient [P], and its inner step; this one has neither."""

    def take(self, out: Tensor) -> None:
        """Move the gradient gathered so far into `out`, as its part of the mean over a round's samples."""
        out.zero_()

    def give(self, flat: Tensor) -> None:
        """Add `flat`, such a part, to what is gathered."""

    def step(self, mean: Tensor, round_index: int) -> StepReport | None:
        """Take the inner step of a round by its `mean` gradient; what is gathered stays."""
        return None


class ReplicaGradient(GradientOf):
    """The gradient and the step of `replica`."""

    def __init__(self, replica: TorchReplica) -> None:
        self._replica, self._stage = replica, replica.stage
        manifest = replica.stage.manifest
        self._batch, self._round = manifest.inner.inner_batch, manifest.gossip.round_samples

    def take(self, out: Tensor) -> None:
        """Raises LocalFault if it is not finite: the weights have diverged. In float16 it is dropped."""
        backprop = self._stage.backprop
        torch.div(self._stage.grad, self._batch * backprop.scale, out=out)
        self._stage.discard()
        if not math.isfinite(norm := float(out.norm())):
            out.zero_()
            if backprop.scale == 1.0:
                raise LocalFault(f"gradient norm {norm} after inner step {self._stage.inner_steps}")
            backprop.scale_less()

    def give(self, flat: Tensor) -> None:
        self._stage.grad.add_(flat, alpha=self._batch * self._stage.backprop.scale)

    def step(self, mean: Tensor, round_index: int) -> StepReport:
        """At the rate after the samples of so many rounds: the same at all replicas."""
        stage, gathered = self._stage, self._stage.grad.clone()
        stage.discard()
        torch.mul(mean, stage.backprop.scale, out=stage.grad)
        stage.accumulated = 1  # a mean already
        report = self._replica.step(round_index * self._round)
        stage.grad.copy_(gathered)
        return report


class Gradient(DeltaMean):
    """The inner optimizer's step by the mean gradient of all members."""

    name: ClassVar[str] = "gradient"

    @classmethod
    def make(cls, theta: Tensor, codec: Codec, step: OuterConstants, fragments: int) -> Outer:
        return cls(theta, codec)

    def __init__(self, theta: Tensor, codec: Codec) -> None:
        super().__init__(theta, codec)
        if isinstance(codec, DeltaCodec) and codec.feedback:
            raise ManifestError(f"gossip.codec {codec.name} feeds back what it drops, as gradient does itself")
        self.phi = self.theta
        self.of = GradientOf()
        self._step_norm = 0.0  # of the last step
        self._agreement = Remembered[str, EmaMoments]()  # of each member's packets with those of the others
        self._refused = set[str]()  # members whose packets lead elsewhere, as of the last step

    def attend_gradients(self, replica: TorchReplica) -> None:
        self.gather(ReplicaGradient(replica))

    def gather(self, of: GradientOf) -> None:
        """Average the gradients of `of` from now on."""
        self.of = of

    @torch.no_grad()
    def draft(self, round_index: int) -> StreamingMessage:
        mine = self._boundary
        if self.round is not None:
            self.of.give(mine)  # never applied
        self.of.take(mine)
        self.round = round_index
        self.codec.at(round_index)
        own = self.codec.draft(mine, seed=self.seed("gradient"))
        self._own = list(own.tensors)
        if not self.healing:
            return own
        return one_by_one(own, StreamingMessage([fragment.fragment(self.phi, round_index)]))

    def apply_slow(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        report = super().apply_slow(round_index, own_weight, packets, lone=lone)
        elsewhere = Verdict(0.0, "direction", "it leads elsewhere than most")
        report.verdicts = [
            elsewhere if verdict.keep and packet.sender in self._refused and not packet.final_delta else verdict
            for packet, verdict in zip(packets, report.verdicts, strict=True)
        ]
        return report

    def _judge_whole(self, own_weight: float, packet: Packet) -> Verdict:
        return Verdict(1.0, "accepted", f"up to {CLIP:g} medians of all packets")

    def _outer_step(
        self, own_weight: float, packets: Sequence[Packet], taken: Sequence[tuple[Packet, float]]
    ) -> OuterReport:
        assert self.round is not None
        round_index, mine = self.round, self._boundary
        met = [packet for packet, _ in taken if not packet.final_delta]
        by_sender = {packet.sender: packet.tensors[:1] for packet in met}
        if own_weight > 0.0:
            by_sender[self.sender] = self._own
        given = {sender: by_sender[sender] for sender in sorted(by_sender)}
        report = OuterReport(len(given), float(mine.norm()), 0.0)
        theirs = torch.empty_like(mine)
        if given:
            report.apart = self._heal(own_weight, met)
            self.stepping = True
            shares = self._shares_of(given)
            mean = torch.zeros_like(mine)
            for tensors, share in zip(given.values(), shares, strict=True):
                self.codec.read(tensors, 0, theirs)
                mean.add_(theirs, alpha=share)
            before = self.phi.clone()
            report.inner = self.of.step(mean, round_index)
            report.step_norm = self._step_norm = float(before.sub_(self.phi).norm())
            self.stepping = False
        if given and own_weight > 0.0:
            self.codec.read(self._own, 0, theirs)
            mine.sub_(theirs)
        self.of.give(mine)  # what the codec left, or all of it
        for packet, keep in taken:
            if packet.final_delta:
                self.codec.read(packet.tensors[:1], 0, theirs)
                most = CLIP * report.delta_norm / max(float(theirs.norm()), 1e-30)
                self.of.give(theirs.mul_(keep * packet.weight * min(1.0, most or 1.0)))
        self.round = None
        return report

    def _shares_of(self, given: Mapping[str, Sequence[WireTensor]]) -> list[float]:
        """The share of each packet that counts."""
        count = len(given)
        products = torch.zeros(count, count, dtype=torch.float64)
        rows = self.theta.new_empty(count, self._block)
        for start in range(0, self.parameters, self._block):
            part = rows[:, : min(self._block, self.parameters - start)]
            for row, tensors in zip(part, given.values(), strict=True):
                self.codec.read(tensors, start, row)
            products += (part @ part.T).to("cpu", torch.float64)
        lengths = products.diag().sqrt()
        usual = median_low([float(length) for length in lengths if length] or [1.0])
        shares = (CLIP * usual / lengths.clamp_min(1e-30)).clamp_max(1.0)
        self._refused = self._refused_of([*given], products * torch.outer(shares, shares) / usual**2)
        return [0.0 if sender in self._refused else float(share) for sender, share in zip(given, shares, strict=True)]

    def _refused_of(self, senders: Sequence[str], agreements: Tensor) -> set[str]:
        """The `senders` whose packets lead elsewhere, given what each pair has in common."""
        if len(senders) <= 2:
            return set()
        for i, (sender, row) in enumerate(zip(senders, agreements.tolist(), strict=True)):
            self._agreement[sender] = known = self._agreement.get(sender) or EmaMoments()
            known.add(median_high(row[:i] + row[i + 1 :]))
        members = {sender: self._agreement[sender] for sender in senders}
        if median_low([known.count for known in members.values()]) < ENOUGH:
            return set()
        least = AGREES * median_low([known.value for known in members.values()])
        variance = median_low([known.variance for known in members.values()])

        def deviation(known: EmaMoments) -> float:
            noise = min(variance, known.variance) if known.count >= ENOUGH else variance
            return math.sqrt(noise * max(1.0 / known.count, known.weight / (2.0 - known.weight)))

        return {sender for sender, known in members.items() if known.value < least - Z * deviation(known)}

    def _heal_flats(self) -> Sequence[Tensor]:
        return (self.phi,)

    def _heal_limit(self, own_weight: float) -> float:
        return CLIP * self._step_norm

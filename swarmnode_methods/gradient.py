"""Data parallelism: the gradients of all members are averaged before every inner step.

    draft    D  <- gathered gradient of this replica, summed over its n targets, over those of a step without a mask
             N  <- n over the same                         the packet carries n, and the samples that bound it
    round    g  =  sum_j keep_j C(D_j) / sum_j keep_j N_j  the own packet decoded too, in the same order at all members
             W  <- the inner optimizer's own step by g     at the rate of the round's samples: equal to the bit
             the gathered gradient of the next round begins with D - C(D): error feedback

With gossip.fragments = F a round is of every F-th row of each matrix, the same at all members (model/turn.py); the step
moves only these, and the others gather until their turn.

With F = 1 replicas learn what one process learns that has all samples of a step, but for the codec's error. A replica
counts by its targets, and what a missing one had is missing: its next packet has it. Slow and fast weights are one
buffer, but with a delay.

A packet longer than CLIP medians of all packets is shortened to that, the own one too. The others' lengths are first
made those of as many targets: a sum of n targets is between root n (noise) and n (one direction) long. A packet that
states far more targets than the others counts as one of SPEEDS_MAX times the usual. One that leads elsewhere than most
does not count. Such rules need nothing but packets, so members stay equal:

    a_j  =  median over the other members k of <D_j, D_k>, shortened, over the square of the median length
    D_j counts unless a_j, smoothed over rounds, says that it leads elsewhere (train/gossip/agreement.py)

With gossip.delay = 1 the mean of round k comes when the next step has been trained. W looks ahead by a step, so that
the next gradients are those of the weights that the mean on its way is about to leave:

    V_k  =  V_(k-1) - U_k            the inner optimizer's step U_k by g_k; V are the slow weights
    W_k  =  2 V_k - V_(k-1)          the weights that are trained; W_k - W_(k-1) = -(2 U_k - U_(k-1)), arXiv 2606.30634

Both follow from V and the moments, so a newcomer needs nothing else to be equal after a step.

Codecs that are `whitened` code matrices whitened by Muon's momentum (whitening.py); a leaver's packet is plain.

Healing is that of mean.py. Exchanges lie between two steps (train/gossip/exchange.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median_high, median_low
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from swarmnode.base.errors import LocalFault, ManifestError, RemoteFault
from swarmnode.base.ports import OuterReport, Packet, StepReport, StreamingMessage, Verdict, WireTensor
from swarmnode.base.work import TargetCount, Work
from swarmnode.model.turn import Turn
from swarmnode.run.manifest import OuterConstants
from swarmnode.train.gossip.agreement import Agreement
from swarmnode.train.gossip.compression import Codec
from swarmnode.train.gossip.outer.method import Outer, one_by_one
from swarmnode.train.gossip.round import SPEEDS_MAX
from swarmnode_methods import fragment
from swarmnode_methods.delta import DeltaCodec
from swarmnode_methods.gradient_pieces import GradientPieces
from swarmnode_methods.mean import DeltaMean
from swarmnode_methods.packet_work import WORK_NBYTES, check_work, read_work, write_work
from swarmnode_methods.share import CLIP, shares_by_length
from swarmnode_methods.whitening import factor, unwhiten, whiten

if TYPE_CHECKING:
    from swarmnode.app.machine.replica import TorchReplica


class GradientOf:
    """A replica's gathered gradient [P], the work behind it, and its inner step; this one has none."""

    context = 1
    """Tokens of a sample: as many targets it has at most."""
    targets_whole = TargetCount(1)
    """Targets of a step in which every token counts: `take` divides by these."""

    def take(self, out: Tensor) -> None:
        """Move the gradient gathered so far into `out`: summed over its targets, over `targets_whole`."""
        out.zero_()

    def take_work(self) -> Work:
        """The work behind the gradient that `take` just moved."""
        return Work.of(1, 1, 1)

    def give(self, flat: Tensor) -> None:
        """Add `flat`, as `take` gave it, to what is gathered."""

    def give_work(self, work: Work) -> None:
        """Add the work behind a gradient that was given back."""

    def views(self, flat: Tensor, turn: Turn) -> list[Tensor]:
        """The parts of `flat` [P], laid out as a gradient, that a step of `turn` moves."""
        return [turn.elements(0, flat)]

    @property
    def momentum(self) -> Tensor | None:
        """Muon's momentum [P], laid out as a gradient, where it is kept so."""
        return None

    def step(self, mean: Tensor, round_index: int, turn: Turn) -> StepReport | None:
        """Take the inner step of a round, of the rows in `turn`, by its `mean` gradient, which may be overwritten; what
        is gathered stays."""
        return None


class ReplicaGradient(GradientOf):
    """The gradient and the step of `replica`."""

    def __init__(self, replica: TorchReplica) -> None:
        self._replica = replica
        self._stage = replica.stage
        manifest = replica.stage.manifest
        self.context = manifest.model.context
        self._batch = manifest.inner.inner_batch
        self._round = manifest.gossip.round_samples
        self.targets_whole = TargetCount(self._batch * self.context)

    def take_work(self) -> Work:
        gathered = self._stage.gathered
        self._stage.gather(Work())
        return gathered

    def give_work(self, work: Work) -> None:
        self._stage.gather(self._stage.gathered + work)

    def take(self, out: Tensor) -> None:
        """Raises LocalFault if it is not finite: the weights have diverged. In float16 it is dropped."""
        backprop = self._stage.backprop
        torch.div(self._stage.grad, self._batch * backprop.scale, out=out)
        self._stage.grad.zero_()
        if not math.isfinite(norm := float(out.norm())):
            out.zero_()
            self._stage.discard()
            if backprop.scale == 1.0:
                raise LocalFault(f"gradient norm {norm} after inner step {self._stage.inner_steps}")
            backprop.scale_less()

    def give(self, flat: Tensor) -> None:
        self._stage.grad.add_(flat, alpha=self._batch * self._stage.backprop.scale)

    def views(self, flat: Tensor, turn: Turn) -> list[Tensor]:
        return self._stage.views(flat, turn)

    @property
    def momentum(self) -> Tensor | None:
        kept = self._stage.moments["exp_avg"]
        flat = torch.zeros_like(self._stage.grad)
        for first, last in kept.spans():
            if (part := kept.read(first, last)) is not None:
                flat[first:last] = part
        return flat

    def step(self, mean: Tensor, round_index: int, turn: Turn) -> StepReport:
        """At the rate after the samples of so many rounds: the same at all replicas."""
        with self._stage.stepping_by(mean):
            return self._replica.step(round_index * self._round, turn=turn)


@dataclass(frozen=True, slots=True)
class GivenGradient:
    """A packet in a round: its gradient in the codec, and the targets that it is summed over."""

    tensors: Sequence[WireTensor]
    targets: TargetCount


RUN = 64  # guess: weights in a row that are looked at, four cache lines
RUNS_OF = 8  # guess: one of this many rows is looked at


def sampled(flat: Tensor) -> Tensor:
    """A view of an eighth of `flat` [P], spread evenly: enough to know how long a step was. Of a small one all."""
    whole = flat.numel() // (RUN * RUNS_OF)
    return flat if whole < RUN else flat[: whole * RUN * RUNS_OF].view(whole, RUNS_OF, RUN)[:, 0]


class Gradient(DeltaMean):
    """The inner optimizer's step by the mean gradient of all members."""

    name: ClassVar[str] = "gradient"

    @classmethod
    def make(cls, theta: Tensor, codec: Codec, step: OuterConstants, fragments: int) -> Outer:
        return cls(theta, codec, fragments)

    def __init__(self, theta: Tensor, codec: Codec, turns: int = 1) -> None:
        """`turns`: F, the rounds in which each row of the weights has its turn."""
        super().__init__(theta, codec)
        self.turns = turns
        self._whole = True  # the marked packet is of all rows
        self._factors = list[Tensor | None]()  # of the marked packet's views; empty: it is not whitened
        if isinstance(codec, DeltaCodec) and codec.feedback:
            raise ManifestError(f"gossip.codec {codec.name} feeds back what it drops, as gradient does itself")
        self.phi = self.theta
        self._boundary = self.theta[:0]  # the own gradient and the mean are there only while they are worked on
        self.of = GradientOf()
        self.work = Work()  # behind the marked gradient
        self.norm = 0.0  # of the marked gradient
        self._step_norm = 0.0  # of the last step
        self._agreement = Agreement()  # of each member's packets with those of the others
        self._refused = set[str]()  # members whose packets lead elsewhere, as of the last step

    def delay(self) -> None:
        self.phi = self.theta.clone()
        self.delayed = True

    def attend_gradients(self, replica: TorchReplica) -> None:
        self.gather(ReplicaGradient(replica))

    def gather(self, of: GradientOf) -> None:
        """Average the gradients of `of` from now on."""
        self.of = of

    @property
    def message_nbytes(self) -> int:
        return super().message_nbytes + WORK_NBYTES

    def nbytes_of(self, round_index: int) -> int:
        self.codec.at(round_index)
        packed = self.codec.least_nbytes(self.count(round_index))
        return packed + self._fragment_nbytes(round_index) + WORK_NBYTES

    def _views(self, flat: Tensor, round_index: int) -> list[Tensor]:
        """The rows of `flat` [P] whose turn it is in that round."""
        return self.of.views(flat, Turn(round_index, self.turns))

    def count(self, round_index: int) -> int:
        """Elements of a packet of that round."""
        return sum(view.numel() for view in self._views(self.theta, round_index)) if self.turns > 1 else self.parameters

    def room(self) -> Tensor:
        """Room for the content of the marked packet."""
        assert self.round is not None
        return self.theta.new_empty(self.parameters if self._whole else self.count(self.round))

    def _spread(self, packed: Tensor) -> Tensor:
        """The content `packed` of the marked packet, which is overwritten, as a gradient [P]: zero where another round
        has its turn."""
        assert self.round is not None
        flat = packed
        if not self._whole:
            flat = torch.zeros_like(self.theta)
            at = 0
            for view in self._views(flat, self.round):
                view.copy_(packed[at : at + view.numel()].view(view.shape))
                at += view.numel()
        if self._factors:
            unwhiten(self._views(flat, self.round), self._factors)
        return flat

    def _factors_of(self, round_index: int) -> list[Tensor | None]:
        """The factors of a round's views, by the momentum of now."""
        if not self.codec.whitened or (momentum := self.of.momentum) is None:
            return []
        return [factor(view) for view in self._views(momentum, round_index)]

    def draft(self, round_index: int) -> StreamingMessage:
        return self._draft(round_index, whole=self.turns == 1)

    def final_delta(self, round_index: int) -> list[WireTensor]:
        return list(self._draft(round_index, whole=True, whitened=False).finish())

    @cached_property
    def in_pieces(self) -> GradientPieces:
        return GradientPieces(self)

    def mark(self, round_index: int, *, whole: bool, whitened: bool = True) -> Tensor:
        """Mark the boundary of a round; returns the content of its packet, of the gradient gathered until then.
        `whole`: of all rows. `whitened`: as the codec wants it."""
        if self.round is not None:
            self._give_back()  # never applied
        self._own = []
        mine = torch.empty_like(self.theta)
        self.of.take(mine)
        self.norm = float(mine.norm())
        self.work = self.of.take_work()
        self.round = round_index
        self._whole = whole
        self.codec.at(round_index)
        self._factors = self._factors_of(round_index) if whitened else []
        if self._factors:
            whiten(self._views(mine, round_index), self._factors)
        return mine if whole else self._cut(mine, round_index)

    @torch.no_grad()
    def _draft(self, round_index: int, *, whole: bool, whitened: bool = True) -> StreamingMessage:
        """The packet of a round; `whole`: of all rows."""
        packed = self.mark(round_index, whole=whole, whitened=whitened)
        own = self.codec.draft(packed, seed=self.seed("gradient"))
        self._own = list(own.tensors)
        drafts = [own]
        if self.healing:
            drafts.append(StreamingMessage([fragment.fragment(self.phi, round_index)]))
        message = one_by_one(*drafts, StreamingMessage([write_work(self.work)]))

        def write() -> None:
            message.finish()
            self._keep_rest(packed)

        return StreamingMessage(message.tensors, write)

    def give(self, packed: Tensor) -> None:
        """Gather content like that of the marked packet for the next one."""
        self.of.give(self._spread(packed))

    def _cut(self, mine: Tensor, round_index: int) -> Tensor:
        """The rows of `mine` [P] whose turn it is, one after the other; the others wait for theirs."""
        views = self._views(mine, round_index)
        packed = torch.cat([view.reshape(-1) for view in views])
        for view in views:
            view.zero_()
        self.of.give(mine)
        return packed

    @torch.no_grad()
    def _keep_rest(self, packed: Tensor) -> None:
        """Give what the codec left of the marked packet's content to the next one: from here on the marked gradient is
        its packet."""
        theirs = self._theirs
        for start in range(0, packed.numel(), self._block):
            part = packed[start : start + self._block]
            self.codec.read(self._own, start, theirs[: part.numel()])
            part.sub_(theirs[: part.numel()])
        self.give(packed)

    def _give_back(self) -> None:
        """Gather the marked gradient again, and the work behind it."""
        assert self.round is not None
        packed = self.room()
        if self._own:
            self.codec.at(self.round)
            self.codec.add_up([self._own], [1.0], packed, self._theirs)
        else:
            self.in_pieces.read_own(packed)
        self.give(packed)
        self.of.give_work(self.work)

    def check(self, packet: Packet) -> None:
        if not packet.tensors:
            raise RemoteFault("a gradient packet of 0 tensors")
        check_work(packet.tensors[-1], self.of.context)
        super().check(replace(packet, tensors=packet.tensors[:-1]))

    def _elements(self, packet: Packet) -> int:
        assert self.round is not None
        return self.parameters if packet.final_delta else self.count(self.round)

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
        round_index = self.round
        met = [packet for packet, _ in taken if not packet.final_delta]
        by_sender = {packet.sender: self._given(packet) for packet in met if packet.weight > 0.0}
        if own_weight > 0.0:
            by_sender[self.sender] = GivenGradient(self._own, self.work.targets)
        given = {sender: by_sender[sender] for sender in sorted(by_sender)}
        report = OuterReport(len(given), self.norm, 0.0)
        if given:
            report.apart = self._heal(own_weight, met)
            self.stepping = True
            shares = self._shares_of(given)
            counted = sum(share * one.targets for one, share in zip(given.values(), shares, strict=True))
            whole = self.of.targets_whole / (counted or self.of.targets_whole)  # no target counts: the gradient is zero
            weights = [share * whole for share in shares]
            mean = self.room()
            self.codec.add_up([one.tensors for one in given.values()], weights, mean, self._theirs)
            self.step(mean, round_index, report)
            del mean
            self.stepping = False
        if not given or own_weight == 0.0:
            self._give_back()
        for packet, keep in taken:
            if packet.final_delta:
                self.inherit(packet, keep, report.delta_norm)
        self.round = None
        return report

    def step(self, mean: Tensor, round_index: int, report: OuterReport) -> None:
        """Take the inner step by the `mean` of packets' contents, which may be overwritten, and say so in `report`."""
        # By its noise a row that gathers for F rounds is root F times as long, for which none should be clipped.
        flat = self._spread(mean if self.turns == 1 else mean.mul_(self.turns**-0.5))
        before = sampled(self.phi).clone()
        if self.delayed:
            self.theta.copy_(self.phi)
        report.inner = self.of.step(flat, round_index, Turn(round_index, self.turns))
        del flat
        if self.delayed:
            self._look_ahead()
        moved = float(before.sub_(sampled(self.phi)).norm())
        report.step_norm = self._step_norm = moved * math.sqrt(self.parameters / before.numel())

    def _look_ahead(self) -> None:
        """The inner step moved the fast weights from the slow ones: these follow, and the fast ones go on as far."""
        for start in range(0, self.parameters, self._block):
            theta = self.theta[start : start + self._block]
            phi = self.phi[start : start + self._block]
            stepped = self._mean[: theta.numel()].copy_(theta)
            torch.lerp(phi, stepped, 2.0, out=theta)
            phi.copy_(stepped)

    @staticmethod
    def _given(packet: Packet) -> GivenGradient:
        return GivenGradient(packet.tensors[:1], read_work(packet.tensors[-1]).targets)

    def judge(self, own_weight: float, packet: Packet) -> Verdict:
        """The verdict on a packet."""
        return self._judge(own_weight, packet)

    def inherit(self, packet: Packet, keep: float, usual: float) -> None:
        """Add what a leaving replica had gathered to the next packet, with its targets; `usual`: our packet's norm."""
        theirs = torch.empty_like(self.theta)
        self.codec.add_up([packet.tensors[:1]], [1.0], theirs, self._theirs)
        work = read_work(packet.tensors[-1])
        mine = self.work.targets
        most = CLIP * usual / max(float(theirs.norm()), 1e-30)
        if mine and work.targets:
            most = min(most * max(1.0, work.targets / mine), SPEEDS_MAX * mine / work.targets)
        share = keep * packet.weight * min(1.0, most or 1.0)
        self.of.give(theirs.mul_(share))
        self.of.give_work(work.times(share))

    def _shares_of(self, given: Mapping[str, GivenGradient]) -> list[float]:
        """The share of each packet that counts."""
        packets = [one.tensors for one in given.values()]
        like = self.theta if self._whole else self.room()
        products = self.codec.products(packets, like, self._block)
        lengths = products.diag().sqrt()
        usual = median_low([float(length) for length in lengths if length] or [1.0])
        targets = [one.targets for one in given.values()]
        shares = torch.tensor(shares_by_length(lengths.tolist(), targets), dtype=torch.float64)
        common = (products * torch.outer(shares, shares) / usual**2).tolist() if len(given) > 1 else []
        rows = zip(given, common, strict=False)
        found = {sender: median_high(row[:i] + row[i + 1 :]) for i, (sender, row) in enumerate(rows)}
        self._refused = self._agreement.refused(found)
        return [0.0 if sender in self._refused else float(share) for sender, share in zip(given, shares, strict=True)]

    def _heal_flats(self) -> Sequence[Tensor]:
        return (self.phi,)

    @property
    def heal_limit(self) -> float:
        """The distance that a fragment heals at most."""
        return CLIP * self._step_norm

    def _heal_limit(self, own_weight: float) -> float:
        return self.heal_limit

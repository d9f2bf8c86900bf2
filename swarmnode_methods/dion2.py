"""Dion2 between replicas: gradients are averaged before the step, some rows of each matrix in a round.

    inner step   W <- W - c G                            so D = W - phi is -c times the gradients that have piled up
    round r      S    =  rows r mod F, r mod F + F, ...  the same at all members, for F = gossip.fragments
                 D    =  mean_j C(D_j[S])                the own packet decoded too
                 phi[S] <- (1 - rate weight_decay) phi[S] + rate 0.2 sqrt(max(D_out, D_in)) orthogonalize(D)
                 W[S] <- phi[S] + D_i[S] - C(D_i[S]) + MOMENTUM^F D

[Dion2, arXiv 2512.16928, whose rows sampled from a momentum, kept times a factor, are here the codec between replicas.]
Replicas that step by themselves turn their own noise into a whole step of Muon, and averaging takes it away only
afterwards. Averaged before, the noise of R gradients is that of one on R times the samples. What was not sent, and the
codec's error, waits in W itself, which c keeps near phi (model/muon.py).

Other parameters than hidden matrices take AdamW's step by D in every F-th element, with beta^F for each beta. Their
moments are equal at all members that get the same packets, as the slow weights are, so a joiner takes them, too.
Packets, verdicts and healing are those of mean.py, over what S picks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from swarmnode.errors import ManifestError
from swarmnode.gossip.compression import Codec
from swarmnode.gossip.outer.method import MatrixOf, Outer, Rate
from swarmnode.gossip.robust import PacketGuard, PacketMeasures
from swarmnode.manifest import InnerSpec, OuterConstants
from swarmnode.model.muon import BATCH_ELEMENTS, RMS, orthogonalize
from swarmnode.model.optimizer import AdamWPart, Span
from swarmnode.ports import OuterReport, Packet, StreamingMessage
from swarmnode_methods import fragment
from swarmnode_methods.delta import DeltaCodec
from swarmnode_methods.mean import BLOCK, DeltaMean

MOMENTUM = 0.9  # MuLoCo's Muon, arXiv 2505.23725, without Nesterov; a row is met every F rounds
ROUNDS_MAX = 16  # guess: the gradients of more rounds lengthen a step no further


class PickedRows(DeltaMean):
    """One round's packets of what S picks, packed one after the other: it judges them and takes their mean."""

    name: ClassVar[str] = "dion2"
    mean: Tensor | None = None  # of this round, once it was made

    def pick(self, theta: Tensor, phi: Tensor) -> None:
        """Begin a round with packed weights."""
        self.theta, self.phi, self._boundary, self.mean = theta, phi, torch.empty_like(theta), None
        self._block = min(BLOCK, len(theta))
        self._mean, self._theirs = torch.empty_like(theta[: self._block]), torch.empty_like(theta[: self._block])

    def judge_by(self, sender: str, guard: PacketGuard | None, *, healing: bool) -> None:
        """Judge, round and heal as the whole method of `sender` does."""
        self.sender, self.guard, self.healing = sender, guard, healing

    def _advance(self, phi: Tensor, m: Tensor, mean: Tensor, start: int) -> None:
        if self.mean is None:
            self.mean = torch.empty_like(self.phi)
        self.mean[start : start + len(mean)] = mean

    def _follow(self, theta: Tensor, boundary: Tensor, phi: Tensor) -> None:
        """The fast weights move with the step that is made of the mean."""

    def own(self) -> Tensor:
        """The own packet, decoded."""
        found = torch.empty_like(self.phi)
        self.codec.read(self._own, 0, found)
        return found


class Dion2(Outer):
    """Muon on the mean of all members' gathered gradients, some rows of each matrix in a round."""

    name: ClassVar[str] = "dion2"
    group_size: ClassVar[int | None] = None

    @classmethod
    def make(cls, theta: Tensor, codec: Codec, step: OuterConstants, fragments: int) -> Outer:
        return cls(theta, codec, fragments)

    def __init__(self, theta: Tensor, codec: Codec, of: int) -> None:
        super().__init__(theta, codec, 0.0)
        if isinstance(codec, DeltaCodec) and codec.feedback:
            raise ManifestError(f"gossip.codec {codec.name} keeps a residual, but the next packet is of other weights")
        self.of = of
        self._matrices: Sequence[MatrixOf] = ()
        self._others: Sequence[AdamWPart] = [AdamWPart(Span(0, len(theta), False), self.momentum, self.momentum)]
        self._inner = InnerSpec()
        self._rate: Rate = lambda round_index, rounds: 0.0
        self._last: int | None = None  # the round of the last step of these weights, if that was here
        self._parts = [PickedRows(self.theta[:1], codec) for _ in range(of)]  # by r mod F

    def attend_gradients(
        self, matrices: Sequence[MatrixOf], others: Sequence[AdamWPart], inner: InnerSpec, rate: Rate
    ) -> None:
        self._matrices, self._others = matrices, others
        self._inner, self._rate = inner, rate

    def _views(self, flat: Tensor, round_index: int) -> Iterator[tuple[Tensor, int]]:
        """The rows that S picks of `flat` [P]: (rows of a matrix, its longer side), or (elements of the others, 0)."""
        first = round_index % self.of
        for matrix in self._matrices:
            view = matrix(flat)
            yield view[first :: self.of], max(view.shape)
        for other in self._others:
            yield flat[other.span.first : other.span.last][first :: self.of], 0

    def _packed(self, flat: Tensor, round_index: int) -> Tensor:
        return torch.cat([view.reshape(-1) for view, _ in self._views(flat, round_index)])

    def _count(self, round_index: int) -> int:
        return sum(view.numel() for view, _ in self._views(self.phi, round_index))

    @property
    def message_nbytes(self) -> int:
        count = self._count(0)  # of all rounds the most
        return self.codec.nbytes(count) + (fragment.nbytes(count, 0) if self.healing else 0)

    def nbytes_of(self, round_index: int) -> int:
        count = self._count(round_index)
        return self.codec.least_nbytes(count) + (fragment.nbytes(count, round_index) if self.healing else 0)

    @property
    def _part(self) -> PickedRows:
        assert self.round is not None
        return self._parts[self.round % self.of]

    @torch.no_grad()
    def draft(self, round_index: int) -> StreamingMessage:
        theta, phi = (self._packed(flat, round_index) for flat in (self.theta, self.phi))
        self.round = round_index
        part = self._part
        part.pick(theta, phi)
        part.judge_by(self.sender, self.guard, healing=self.healing)
        return part.draft(round_index)

    def _add(self, flat: Tensor, packed: Tensor) -> None:
        assert self.round is not None
        at = 0
        for view, _ in self._views(flat, self.round):
            view.add_(packed[at : at + view.numel()].view_as(view))
            at += view.numel()

    def check(self, packet: Packet) -> None:
        self._part.check(packet)

    def measure(self, packet: Packet, *, judged_by_own: bool = True) -> PacketMeasures:
        return self._part.measure(packet, judged_by_own=judged_by_own)

    @torch.no_grad()
    def apply_slow(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        part = self._part
        before, phi = part.theta.clone(), part.phi.clone()
        report = part.apply(round_index, own_weight, packets, lone=lone)
        if part.round is not None:
            return report
        step = part.phi - phi  # what healing moved
        shift = part.theta - before  # and what a leaving replica gave
        if part.mean is not None:
            moved = self._step(round_index, part.mean, part.phi)
            gathered = part.mean.mul_(self._kept(round_index))
            if own_weight > 0.0:
                gathered.sub_(part.own())
            step.add_(moved)
            shift.add_(moved).add_(gathered)
        self.stepping = True
        self._add(self.phi, step)
        self._add(self.theta, shift)
        self.stepping, self.round = False, None
        part.pick(part.theta[:0], part.phi[:0])
        return replace(report, step_norm=float(step.norm()))

    def _kept(self, round_index: int) -> Tensor:
        """By packed element: the share of the mean that stays in the fast weights."""
        views = self._views(self.phi, round_index)
        kept = [self.phi.new_full((view.numel(),), MOMENTUM**self.of if side else 0.0) for view, side in views]
        return torch.cat(kept)

    def _step(self, round_index: int, mean: Tensor, phi: Tensor) -> Tensor:
        """The step of the slow weights `phi` by the `mean`, both packed."""
        rounds = 1 if self._last is None else min(round_index - self._last, ROUNDS_MAX)
        rate, self._last = self._rate(round_index, rounds), round_index
        muon_rate = rate * self._inner.muon_learning_rate / self._inner.learning_rate
        step, at = mean.clone(), 0
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, int]]] = {}
        others = iter(self._others)
        for view, side in self._views(self.phi, round_index):
            there = slice(at, at := at + view.numel())
            if side:
                rows = step[there].view_as(view)
                by_shape.setdefault(tuple(rows.shape), []).append((rows, side))
            else:
                self._adamw(next(others), round_index, step[there], phi[there], rate)
        for shape, alike in by_shape.items():
            most = max(1, BATCH_ELEMENTS // max(1, math.prod(shape)))
            for some in (alike[start : start + most] for start in range(0, len(alike), most)):
                for turned, (rows, side) in zip(orthogonalize(torch.stack([r for r, _ in some])), some, strict=True):
                    rows.copy_(turned).mul_(muon_rate * RMS * math.sqrt(side))
        at = 0
        for view, side in self._views(self.phi, round_index):
            there = slice(at, at := at + view.numel())
            if side:
                step[there].sub_(phi[there], alpha=muon_rate * self._inner.weight_decay)
        return step

    def _adamw(self, part: AdamWPart, round_index: int, mean: Tensor, phi: Tensor, rate: float) -> None:
        """Turn a part's `mean` into AdamW's step of its slow weights `phi`, both packed."""
        inner, picked = self._inner, slice(round_index % self.of, None, self.of)
        if not len(part.exp_avg):
            return
        exp_avg, exp_avg_sq = part.exp_avg[picked], part.exp_avg_sq[picked]
        beta1, beta2 = inner.beta1**self.of, inner.beta2**self.of
        exp_avg.lerp_(mean, 1.0 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(mean, mean, value=1.0 - beta2)
        steps = round_index // self.of + 1
        scale = exp_avg_sq.div(1.0 - beta2**steps).sqrt_().add_(inner.eps)
        torch.div(exp_avg, scale, out=mean).mul_(rate / (1.0 - beta1**steps))
        if part.span.decays:
            mean.sub_(phi, alpha=rate * inner.weight_decay)

    def reset(self, phi: Tensor, momentum: Tensor | None = None) -> None:
        super().reset(phi, momentum)
        self._last = None
        for part in self._parts:
            part.reset(part.phi)

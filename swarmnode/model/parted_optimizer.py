"""AdamW and Muon with moments that are not plain float32 on the device: read, used and written back part by part.

The arithmetic is that of optimizer.py and muon.py: with moments in main memory weights are equal to the bit. A step
with moments in 8 bits uses the exact new moment for the weights and rounds it for the next step.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from swarmnode.manifest import InnerSpec, Manifest, boundary_width, by_forward_passes
from swarmnode.manifest.gossip_compat import averages_gradients
from swarmnode.manifest.kind_compat import trains_both_ends
from swarmnode.model.architecture import Shapes
from swarmnode.model.expert_share import FlatSegment
from swarmnode.model.moments import PART, Moments, MomentSection, made
from swarmnode.model.muon import FlatMuon, MuonMatrix
from swarmnode.model.optimizer import FlatAdamW, Span
from swarmnode.model.section import StepRule, stepped
from swarmnode.model.split import TABLE, is_writer
from swarmnode.model.subspace import Subspace

# Clip gradients from a later stage to their usual norm before they are used.
#
#     n_i = |g_i| / sqrt(weight),   limit = FACTOR median(n of the last KEPT),   g <- g min(1, limit / n)
#
# with `weight` the samples that the counted targets amount to; if no target counts, g becomes zero.
#
# A replica of a later stage that answers with a gradient ten thousand times too long moves a stage no further than two
# normal ones, until its answers are audited (pipeline/auditor.py). The median is taken over clipped norms, so that less
# than half of false answers cannot raise it. Source: adaptive clipping by a running quantile (AutoClip, arXiv
# 2007.14469, there of the whole gradient's norm).

FACTOR = 1.4
"""Measured on the demo's model: of 504 honest gradients of 8 samples none is longer than 1.4 medians, of 1,784 of one
sample .6 % are longer than 1.5 and .1 % than 2. See `swarmnode_clipped_gradients_total`."""
KEPT = 64  # guess: microbatches
FIRST = 8  # guess: nothing is clipped before so many


class IncomingNorms:
    """The running norm of the gradients that one replica gets back."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=KEPT)
        self.clips = 0  # gradients clipped so far

    def factor(self, gradient: Tensor, weight: float, *, learn: bool = True) -> float:
        """The factor, 0 to 1, that clips `gradient`, of `weight` samples, to the usual norm. With `learn` its norm is
        remembered."""
        if weight == 0.0:
            self.clips += learn and bool(gradient.any())
            return 0.0
        each = float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) / weight**0.5
        limit = FACTOR * statistics.median(self._norms) if len(self._norms) >= FIRST else float("inf")
        too_long = 0.0 < limit < each
        if learn:
            self._norms.append(limit if too_long else each)
            self.clips += too_long
        return limit / each if too_long else 1.0

    def forget(self) -> None:
        """Forget the usual norm, because the weights were replaced."""
        self._norms.clear()


def optimizer_of(
    manifest: Manifest,
    shapes: Shapes,
    theta: Tensor,
    grad: Tensor,
    subspace: Subspace | None,
    *,
    autocast: bool,
    state: str = "device",
    places: Mapping[str, int] | None = None,
) -> FlatAdamW | FlatMuon:
    """The manifest's optimizer on `theta` [P] by `grad` [N], of parameters with `shapes`; with `places`, only those
    named there step, and their gradients lie there. Matrices decay; a table that both ends train only at the last. With
    a subspace boundary, the token table is frozen and writers stay in the span. `state`: where moments are kept
    (moments.py)."""
    if by_forward_passes(manifest):  # no moments, nothing to step
        return FlatAdamW(theta.data[:0], grad, manifest.inner, [])
    first = 0
    spans: list[Span] = []
    matrices: list[MuonMatrix] = []
    shared: list[tuple[int, tuple[int, ...]]] = []
    for name, shape in shapes.items():
        last, at = first + math.prod(shape), first if places is None else places.get(name, -1)
        decays = len(shape) > 1 and not (name == TABLE and first == 0 and trains_both_ends(manifest))
        match StepRule.NOT if at < 0 else stepped(manifest, name, shape):
            case StepRule.MUON:
                matrices.append(MuonMatrix(first, shape, at, subspace is not None and is_writer(name)))
            case StepRule.SHARED:
                shared.append((first, shape))
            case StepRule.ADAMW if spans and _continues(spans[-1], first, at, decays=decays):
                spans[-1] = Span(spans[-1].first, last, decays, spans[-1].at)
            case StepRule.ADAMW:
                spans.append(Span(first, last, decays, at))
        first = last
    theta = theta.data  # autograd is not told of steps: `backward` restores the graph's theta
    inner, rank = manifest.inner, boundary_width(manifest)
    if manifest.inner.optimizer == "muon":
        if state != "device":
            return PartedMuon(theta, grad, inner, matrices, spans, subspace=subspace, autocast=autocast, state=state)
        gathers = averages_gradients(manifest)
        return FlatMuon(theta, grad, inner, matrices, spans, subspace=subspace, autocast=autocast, gathers=gathers)
    if state != "device":
        return PartedAdamW(theta, grad, inner, spans, shared=shared, rank=rank, state=state)
    return FlatAdamW(theta, grad, inner, spans, shared=shared, rank=rank)


def _continues(span: Span, first: int, at: int, *, decays: bool) -> bool:
    """Whether a parameter from `first` on, at place `at`, goes on where `span` ends."""
    return span.last == first and span.there.stop == at and span.decays == decays


class PartedAdamW(FlatAdamW):
    """`FlatAdamW` with its moments kept as `state` says (moments.py)."""

    def __init__(
        self,
        theta: Tensor,
        grad: Tensor,
        inner: InnerSpec,
        spans: Sequence[Span],
        *,
        shared: Sequence[tuple[int, tuple[int, ...]]] = (),
        rank: int = 1,
        state: str,
    ) -> None:
        self.grad = grad
        self._theta = theta
        self._inner = inner
        self._rank = rank
        self._spans: list[tuple[Span, Moments, Moments]] = []
        for span in spans:
            firsts, seconds = (made(state, span.last - span.first, theta, signed=signed) for signed in (True, False))
            self._spans.append((span, firsts, seconds))
        self._matrices = [
            (first, shape, made(state, math.prod(shape), theta, signed=True), Moments(math.prod(shape[1:]), theta))
            for first, shape in shared
        ]
        self._step = torch.zeros((), dtype=torch.float32, device=theta.device)
        self._left: list[int] = []
        self._at = 0  # parts that the step under way has updated

    def pieces(self) -> tuple[list[tuple[int, Moments]], list[tuple[int, Moments]]]:
        """(first element in the flat buffer, moments) of first and second moments, ascending."""
        spans = [(span.first, m, v) for span, m, v in self._spans] + [(at, m, v) for at, _, m, v in self._matrices]
        spans.sort(key=lambda piece: piece[0])
        return [(at, m) for at, m, _ in spans], [(at, v) for at, _, v in spans]

    @torch.no_grad()
    def step(self, steps_before: int, learning_rate: float) -> None:
        self._step.fill_(steps_before + 1)
        self._at = 0
        self.finish(steps_before, learning_rate)

    @torch.no_grad()
    def finish(self, steps_before: int, learning_rate: float) -> None:
        """`step`, or the rest of one that memory ran out in: parts are updated one after the other, each as a whole."""
        done = 0
        for span, firsts, seconds in self._spans:
            for start in range(0, span.last - span.first, PART):
                if done >= self._at:
                    self._step_part(span, firsts, seconds, start, learning_rate)
                    self._at += 1
                done += 1
        for first, shape, firsts, seconds in self._matrices:
            if done >= self._at:
                self._step_matrix(first, shape, firsts, seconds, steps_before, learning_rate)
                self._at += 1
            done += 1

    def _step_part(self, span: Span, firsts: Moments, seconds: Moments, start: int, learning_rate: float) -> None:
        end = min(start + PART, span.last - span.first)
        weights = self._theta[span.first + start : span.first + end]
        gradients = self.grad[span.at + start : span.at + end]
        exp_avg, exp_avg_sq = firsts.read(start, end), seconds.read(start, end)
        decay = self._inner.weight_decay if span.decays else 0.0
        self._update([weights], [gradients], [exp_avg], [exp_avg_sq], learning_rate, decay)
        firsts.write(start, exp_avg)
        seconds.write(start, exp_avg_sq)

    def _step_matrix(
        self,
        first: int,
        shape: tuple[int, ...],
        firsts: Moments,
        seconds: Moments,
        steps_before: int,
        learning_rate: float,
    ) -> None:
        """The step of a matrix with one second moment per column."""
        flat = slice(first, first + math.prod(shape))
        exp_avg = firsts.read(0, len(firsts))
        weights, gradients = self._theta[flat].view(shape), self.grad[flat].view(shape)
        self._shared = [[weights], [gradients], [exp_avg.view(shape)], [seconds.flat.view(shape[1:])]]
        exp_avg.view(shape).lerp_(gradients, 1.0 - self._inner.beta1)
        weights.mul_(1.0 - learning_rate * self._inner.weight_decay)
        self._left = [0]
        FlatAdamW.finish(self, steps_before, learning_rate)
        firsts.write(0, exp_avg)


class PartedMuon(FlatMuon):
    """`FlatMuon` with its moments kept as `state` says (moments.py)."""

    def __init__(
        self,
        theta: Tensor,
        grad: Tensor,
        inner: InnerSpec,
        matrices: Sequence[MuonMatrix],
        spans: Sequence[Span],
        *,
        subspace: Subspace | None = None,
        autocast: bool = False,
        state: str,
    ) -> None:
        adamw = PartedAdamW(theta, grad, inner, spans, state=state)
        self._set_up(adamw, theta, grad, inner, matrices, subspace, autocast=autocast)
        self._parts = adamw
        self._kept = [made(state, math.prod(matrix.shape), theta, signed=True) for matrix in matrices]
        self._firsts = [matrix.first for matrix in matrices]
        self._taken = set[int]()

    def pieces(self) -> tuple[list[tuple[int, Moments]], list[tuple[int, Moments]]]:
        """Like PartedAdamW.pieces; matrices have no second moment."""
        firsts, seconds = self._parts.pieces()
        firsts += zip(self._firsts, self._kept, strict=True)
        return sorted(firsts, key=lambda piece: piece[0]), seconds

    def _take_gradients(self) -> None:
        self._taken = set[int]()  # each matrix's is taken when its direction is found

    def _nesterov(self, index: int) -> Tensor:
        """The direction of matrix `index`'s step; its moment takes the gradient."""
        kept, gradient = self._kept[index], self._gradients[index]
        moment = kept.read(0, len(kept))
        if index not in self._taken:
            moment.view(gradient.shape).lerp_(gradient, 1.0 - self._inner.muon_momentum)
        ahead = self._ahead(gradient, moment.view(gradient.shape))
        if index not in self._taken:
            kept.write(0, moment)
            self._taken.add(index)
        return ahead


def sections(optimizer: PartedAdamW | PartedMuon, count: int) -> tuple[MomentSection, MomentSection]:
    """First moments [N = `count`] and second ones [Q] of `optimizer`, frozen parameters as zeros."""
    firsts, seconds = optimizer.pieces()
    whole, at = list[tuple[int, Moments | None]](), 0
    for first, kept in firsts:
        if first > at:
            whole.append((at, None))
        whole.append((first, kept))
        at = first + len(kept)
    if at < count:
        whole.append((at, None))
    packed, at = list[tuple[int, Moments | None]](), 0
    for _, kept in seconds:
        packed.append((at, kept))
        at += len(kept)
    return MomentSection(whole, count), MomentSection(packed, at)


def sections_of(
    optimizer: FlatAdamW | FlatMuon, count: int, trained: Sequence[FlatSegment] = ()
) -> dict[str, MomentSection]:
    """First moments [P = `count`] and second ones [Q] by section, wherever `optimizer` keeps them. `trained`: the
    elements that it has moments for; none: all."""
    if isinstance(optimizer, PartedAdamW | PartedMuon):
        firsts, seconds = sections(optimizer, count)
        return {"exp_avg": firsts, "exp_avg_sq": seconds}
    seconds = MomentSection([(0, Moments.of(optimizer.exp_avg_sq))], optimizer.exp_avg_sq.numel())
    if not trained:
        firsts = MomentSection([(0, Moments.of(optimizer.exp_avg))], optimizer.exp_avg.numel())
        return {"exp_avg": firsts, "exp_avg_sq": seconds}
    pieces, at = list[tuple[int, Moments | None]](), 0
    for segment in trained:
        if segment.first > at:
            pieces.append((at, None))
        pieces.append((segment.first, Moments.of(optimizer.exp_avg[segment.there])))
        at = segment.last
    if at < count:
        pieces.append((at, None))
    return {"exp_avg": MomentSection(pieces, count), "exp_avg_sq": seconds}


def carried(moments: Mapping[str, MomentSection], shared: Sequence[FlatSegment]) -> list[tuple[str, int, Tensor]]:
    """Copies in main memory, as (section, first element, values), of the moments that a replica keeps when it trains
    other experts: first ones of the `shared` segments, all second ones."""
    rows = []
    for name, section in moments.items():
        for first, last in section.spans():
            keeps = name != "exp_avg" or any(one.first <= first and last <= one.last for one in shared)
            if keeps and (values := section.read(first, last)) is not None:
                rows.append((name, first, values.to("cpu", copy=True)))
    return rows

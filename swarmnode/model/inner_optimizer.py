"""The manifest's optimizer of a stage, its moments as sections of the state, and the clipping of gradients that come
from elsewhere."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swarmnode.base.ema import ENOUGH
from swarmnode.model.architecture import Shapes
from swarmnode.model.moments import Moments, MomentSection
from swarmnode.model.muon import FlatMuon, MuonMatrix
from swarmnode.model.optimizer import FlatAdamW, Span
from swarmnode.model.section import StepRule, stepped
from swarmnode.model.split import TABLE, is_writer
from swarmnode.run.manifest import Manifest, boundary_width
from swarmnode.run.manifest.kind_compat import trains_both_ends

if TYPE_CHECKING:
    from swarmnode.model.subspace import Subspace

# Clip gradients from a later stage to their usual norm before they are used.
#
#     n_i = |g_i| / sqrt(weight),   limit = FACTOR median(n of the last KEPT),   g <- g min(1, limit / n)
#
# with `weight` the samples that the counted targets amount to; if no target counts, g becomes zero.
#
# A replica of a later stage that answers with a gradient ten thousand times too long moves a stage no further than two
# normal ones, until its answers are audited (trust/auditor.py). The median is taken over clipped norms, so that less
# than half of false answers cannot raise it. Source: adaptive clipping by a running quantile (AutoClip, arXiv
# 2007.14469, there of the whole gradient's norm).

FACTOR = 1.4
"""Measured on the demo's model: of 504 honest gradients of 8 samples none is longer than 1.4 medians, of 1,784 of one
sample .6 % are longer than 1.5 and .1 % than 2. See `swarmnode_clipped_gradients_total`."""
KEPT = 64  # guess: microbatches


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
        limit = FACTOR * statistics.median(self._norms) if len(self._norms) >= ENOUGH else float("inf")
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
) -> FlatAdamW | FlatMuon:
    """The manifest's optimizer on `theta` [P] by `grad` [P], of parameters with `shapes`. Matrices decay; a table that
    both ends train only at the last. With a subspace boundary, the token table is frozen and writers stay in the span.
    `state`: where moments are kept (moments.py)."""
    first = 0
    spans: list[Span] = []
    matrices: list[MuonMatrix] = []
    shared: list[tuple[int, tuple[int, ...]]] = []
    for name, shape in shapes.items():
        last = first + math.prod(shape)
        decays = len(shape) > 1 and not (name == TABLE and first == 0 and trains_both_ends(manifest))
        match stepped(manifest, name, shape):
            case StepRule.MUON:
                matrices.append(MuonMatrix(first, shape, subspace is not None and is_writer(name)))
            case StepRule.SHARED:
                shared.append((first, shape))
            case StepRule.ADAMW if spans and spans[-1].last == first and spans[-1].decays == decays:
                spans[-1] = Span(spans[-1].first, last, decays)
            case StepRule.ADAMW:
                spans.append(Span(first, last, decays))
        first = last
    theta = theta.data  # autograd is not told of steps: `backward` restores the graph's theta
    inner = manifest.inner
    rank = boundary_width(manifest)
    if inner.optimizer == "muon":
        return FlatMuon(theta, grad, inner, matrices, spans, subspace=subspace, autocast=autocast, state=state)
    return FlatAdamW(theta, grad, inner, spans, shared=shared, rank=rank, state=state)


def sections_of(optimizer: FlatAdamW | FlatMuon, count: int) -> dict[str, MomentSection]:
    """First moments [P = `count`] and second ones [Q] by section, wherever `optimizer` keeps them; those of parameters
    that it does not step are zeros."""
    firsts, seconds = optimizer.pieces()
    whole = list[tuple[int, Moments | None]]()
    at = 0
    for first, kept in firsts:
        if first > at:
            whole.append((at, None))
        whole.append((first, kept))
        at = first + len(kept)
    if at < count:
        whole.append((at, None))
    packed = list[tuple[int, Moments | None]]()
    at = 0
    for _, kept in seconds:
        packed.append((at, kept))
        at += len(kept)
    return {"exp_avg": MomentSection(whole, count), "exp_avg_sq": MomentSection(packed, at)}

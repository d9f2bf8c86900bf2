"""The optimizer of a stage's flat buffers, as the manifest says."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from swarmnode.manifest import Manifest, boundary_width, by_forward_passes
from swarmnode.model.architecture import Shapes
from swarmnode.model.muon import FlatMuon, MuonMatrix
from swarmnode.model.optimizer import FlatAdamW, Span
from swarmnode.model.parted_optimizer import PartedAdamW, PartedMuon
from swarmnode.model.section import StepRule, stepped
from swarmnode.model.split import is_writer
from swarmnode.model.subspace import Subspace


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
    named there step, and their gradients lie there. Matrices decay. With a
    subspace boundary, the token table is frozen and writers stay in the span. `state`: where moments are
    kept (moments.py)."""
    if by_forward_passes(manifest):  # no moments, nothing to step
        return FlatAdamW(theta.data[:0], grad, manifest.inner, [])
    first = 0
    spans: list[Span] = []
    matrices: list[MuonMatrix] = []
    shared: list[tuple[int, tuple[int, ...]]] = []
    for name, shape in shapes.items():
        last, at = first + math.prod(shape), first if places is None else places.get(name, -1)
        match StepRule.NOT if at < 0 else stepped(manifest, name, shape):
            case StepRule.MUON:
                matrices.append(MuonMatrix(first, shape, at, subspace is not None and is_writer(name)))
            case StepRule.SHARED:
                shared.append((first, shape))
            case StepRule.ADAMW if spans and _continues(spans[-1], first, at, decays=len(shape) > 1):
                spans[-1] = Span(spans[-1].first, last, len(shape) > 1, spans[-1].at)
            case StepRule.ADAMW:
                spans.append(Span(first, last, len(shape) > 1, at))
        first = last
    theta = theta.data  # autograd is not told of steps: `backward` restores the graph's theta
    inner, rank = manifest.inner, boundary_width(manifest)
    if manifest.inner.optimizer == "muon":
        if state != "device":
            return PartedMuon(theta, grad, inner, matrices, spans, subspace=subspace, autocast=autocast, state=state)
        return FlatMuon(theta, grad, inner, matrices, spans, subspace=subspace, autocast=autocast)
    if state != "device":
        return PartedAdamW(theta, grad, inner, spans, shared=shared, rank=rank, state=state)
    return FlatAdamW(theta, grad, inner, spans, shared=shared, rank=rank)


def _continues(span: Span, first: int, at: int, *, decays: bool) -> bool:
    """Whether a parameter from `first` on, at place `at`, goes on where `span` ends."""
    return span.last == first and span.there.stop == at and span.decays == decays

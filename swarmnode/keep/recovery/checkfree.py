"""Rebuild a stage from its neighbours' slow weights: CheckFree (arXiv 2506.15461) or a copy.

Layers of neighbouring stages resemble each other because each refines the same residual stream. A neighbour's weights
are therefore a far better start than random ones. The methods differ only in how two stages' become one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import stage_name
from swarmnode.model.split import StageLayers, parameter_shapes
from swarmnode.run.manifest import ModelSpec

METHODS = ("copy", "weighted")


def rebuild(
    model: ModelSpec,
    parts: tuple[StageLayers, ...],
    stage: int,
    method: str,
    given: Mapping[int, Tensor],
    norms: Mapping[int, float],
) -> Tensor:
    """The flat parameters [N] of `stage` from those of the stages in `given` (one or two neighbours, flat like theirs).

    copy: each layer is that of the nearer neighbour. weighted: the mean weighted by `norms`, each neighbour's gradient
    norm before clipping (CheckFree eq. 1). Embedding and head, which no neighbour has, are zero; the caller fills them
    from a mirror. Raises RemoteFault when a neighbour's buffer has another size.
    """
    assert method in METHODS and given, f"method {method!r} from stages {list(given)}"
    part = parts[stage]
    named = {other: _named(model, parts[other], flat) for other, flat in given.items()}
    shapes = parameter_shapes(model, part)
    flat = torch.zeros(part.parameters)
    for (name, shape), piece in zip(
        shapes.items(), torch.split(flat, [math.prod(s) for s in shapes.values()]), strict=True
    ):
        if not name.startswith("model.layers."):
            continue
        layer, rest = _layer(name)
        position = layer - part.layers.start
        sources = {
            other: named[other][f"model.layers.{counterpart(parts[other], part, position)}.{rest}"] for other in given
        }
        piece.copy_(combine(method, sources, norms, nearer(part, position, tuple(given))).reshape(-1))
        assert math.prod(shape) == piece.numel()
    return flat


def counterpart(other: StageLayers, part: StageLayers, position: int) -> int:
    """The layer of the neighbour `other` that stands for layer number `position` of `part`.

    It is the layer at the same relative place; for a stage of one layer, the neighbour's adjacent layer.
    """
    n = len(part.layers)
    m = len(other.layers)
    if n == 1:
        return other.layers.stop - 1 if other.stage < part.stage else other.layers.start
    return other.layers.start + round(position * (m - 1) / (n - 1))


def nearer(part: StageLayers, position: int, given: tuple[int, ...]) -> int:
    """The stage whose layer is copied for layer number `position` of `part`.

    The stage before gives the first half of the layers, the stage after the second. A single neighbour gives all.
    """
    below = [other for other in given if other < part.stage]
    above = [other for other in given if other > part.stage]
    first_half = 2 * position < len(part.layers)
    return (below or above)[0] if first_half or not above else above[0]


def combine(method: str, sources: Mapping[int, Tensor], norms: Mapping[int, float], nearest: int) -> Tensor:
    """One tensor of those of the stages in `sources`: that of `nearest`, or their mean weighted by `norms`."""
    total = math.fsum(norms[stage] for stage in sources)
    if method == "copy" or len(sources) == 1 or total <= 0.0:  # both were rebuilt a moment ago: no step has a norm yet
        return sources[nearest]
    return sum((tensor * (norms[stage] / total) for stage, tensor in sources.items()), torch.zeros(()))


def _named(model: ModelSpec, part: StageLayers, flat: Tensor) -> dict[str, Tensor]:
    if flat.shape != (part.parameters,):
        raise RemoteFault(f"{flat.numel()} weights of {stage_name(part.stage)}; {part.parameters} belong there")
    shapes = parameter_shapes(model, part)
    pieces = torch.split(flat, [math.prod(shape) for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def _layer(name: str) -> tuple[int, str]:
    """(layer, the rest of the name) of "model.layers.3.mlp.up_proj.weight"."""
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    return int(number), rest

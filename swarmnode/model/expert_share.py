"""The part of a stage that one replica trains where each trains some experts of a sparse layer alone: sparse expert
synchronization [SPES, arXiv 2602.11543].

The experts of every sparse layer are cut into blocks of training.experts_trained neighbours. A replica has gradients
and moments for one block of experts and for all else ("shared"), and takes the experts of other blocks from replicas
that train them (swarmnode_methods/expert_average.py). All replicas hold all weights. So states, checkpoints and exports
are those of any run, and a token may go to any expert.

    the stage [P]      ... shared ... experts of block 0 ... block 1 ... shared ...      as in any run
    a replica's [G]    all shared elements, then those of its block, both in the stage's order
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from swarmnode.ids import digest64
from swarmnode.manifest import Manifest
from swarmnode.manifest.kind_compat import trains_experts_apart
from swarmnode.model.adapter import trained_count, trained_shapes
from swarmnode.model.architecture import Shapes
from swarmnode.model.split import StageLayers

EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class FlatSegment:
    """Elements [first, last) of a stage's flat buffer, and the place `at` of the first one among a replica's."""

    first: int
    last: int
    at: int

    @property
    def there(self) -> slice:
        """The same elements among a replica's."""
        return slice(self.at, self.at + self.last - self.first)


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """`shared`: segments that every replica trains; `experts`: those of each block, of one total length. `count`: G;
    `shared_count`: elements of the shared segments. `names`: of each block's parameters and the shared ones, with their
    places."""

    shared: tuple[FlatSegment, ...]
    experts: tuple[tuple[FlatSegment, ...], ...]
    names: tuple[Mapping[str, int], ...]
    shared_count: int
    count: int

    @property
    def blocks(self) -> int:
        return len(self.experts)

    def trained(self, block: int) -> tuple[FlatSegment, ...]:
        """The segments that a replica of `block` trains, ascending in the stage."""
        return tuple(sorted((*self.shared, *self.experts[block]), key=lambda segment: segment.first))

    def views(self, flat: Tensor, block: int, shapes: Shapes) -> dict[str, Tensor]:
        """`flat` [G] of a replica of `block` as views by parameter name."""
        places = self.names[block].items()
        return {name: flat[at : at + math.prod(shapes[name])].view(shapes[name]) for name, at in places}


def expert_layout(manifest: Manifest, shapes: Shapes) -> ExpertLayout | None:
    """The layout of a stage with trained parameters `shapes`, in the flat buffer's order; None if a replica trains all
    of them."""
    if not trains_experts_apart(manifest) or not any(EXPERT.search(name) for name in shapes):
        return None
    each = manifest.training.experts_trained
    blocks = manifest.model.experts // each
    shared = _Places(0)
    for name, shape in shapes.items():
        if EXPERT.search(name) is None:
            shared.add(name, math.prod(shape), counts=True)
        else:
            shared.add(name, math.prod(shape), counts=False)
    layouts = [_Places(shared.at) for _ in range(blocks)]
    for name, shape in shapes.items():
        expert = EXPERT.search(name)
        for block, places in enumerate(layouts):
            places.add(name, math.prod(shape), counts=expert is not None and int(expert[1]) // each == block)
    return ExpertLayout(
        tuple(shared.segments),
        tuple(tuple(places.segments) for places in layouts),
        tuple({**shared.names, **places.names} for places in layouts),
        shared.at,
        layouts[0].at,
    )


def first_block(manifest: Manifest, sender: str) -> int:
    """The block that the replica `sender` begins with; 0 where all is trained."""
    if not trains_experts_apart(manifest):
        return 0
    return digest64("experts", sender) % (manifest.model.experts // manifest.training.experts_trained)


def overlaps(segments: Sequence[FlatSegment], start: int, count: int) -> Iterator[tuple[slice, slice]]:
    """(elements of the stage, the same ones in a span) for a span of a replica's `count` elements from `start` on."""
    for segment in segments:
        first, last = max(segment.at, start), min(segment.there.stop, start + count)
        if first < last:
            shift = segment.first - segment.at
            yield slice(first + shift, last + shift), slice(first - start, last - start)


@functools.lru_cache(maxsize=1024)  # estimates of a whole fleet ask again and again
def gradient_count(manifest: Manifest, part: StageLayers) -> int:
    """Parameters of `part` for which one replica has gradients and moments, of those that the run trains."""
    layout = expert_layout(manifest, trained_shapes(manifest, part))
    return trained_count(manifest, part) if layout is None else layout.count


class _Places:
    """Places of some parameters, one after the other from `at` on."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.names: dict[str, int] = {}
        self.segments: list[FlatSegment] = []
        self._first = 0  # in the stage

    def add(self, name: str, count: int, *, counts: bool) -> None:
        """The next parameter of the stage; it gets a place if it `counts`."""
        first, self._first = self._first, self._first + count
        if not counts:
            return
        if self.segments and self.segments[-1].last == first:
            before = self.segments.pop()
            self.segments.append(FlatSegment(before.first, self._first, before.at))
        else:
            self.segments.append(FlatSegment(first, self._first, self.at))
        self.names[name] = self.at
        self.at += count

"""A replica's state between its buffers and bytes, part by part: beside the bytes nothing as large as a section exists.

The buffers may lie on different devices, and moments may be kept in other forms (moments.py). Bytes are float32, or
packed as section.py says: the fast weights as their distance from the slow ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from swarmnode.base.errors import RemoteFault
from swarmnode.base.large_buffer import IN_MEMORY_NBYTES
from swarmnode.base.parted_work import Parts
from swarmnode.base.ports import State, WireTensor
from swarmnode.model.architecture import Shapes
from swarmnode.model.moments import PART, MomentSection
from swarmnode.model.optimizer import moments_apart
from swarmnode.model.section import ITEMSIZE, PACKED_ITEMSIZE, outer_sections, section_shapes
from swarmnode.model.split import StageLayers
from swarmnode.model.tensor import check_finite, decode, to_host
from swarmnode.run.manifest import Manifest, boundary_width

if TYPE_CHECKING:
    from swarmnode.model.tied_table import TiedTable

Part: TypeAlias = "Tensor | MomentSection | TiedTable"
Buffers = Callable[[int], memoryview]
"""Makes a writable buffer of so many bytes."""

# As sent, and in 8 bits before, a first moment may be twice what it was and the root of a second one seven tenths.
ROUNDED = 4.0  # derived from both, upwards; 1.2 roots is the most in 3,600 steps of the tiny model, in 8 bits or not
SPANS_AT_ONCE = IN_MEMORY_NBYTES // (ITEMSIZE * PART)  # copied in 5 ms; each group waits for a microbatch to end


def _spans(part: Part) -> Iterator[tuple[int, int]]:
    if not isinstance(part, Tensor):
        yield from part.spans()
    else:
        for start in range(0, len(part), PART):
            yield start, min(start + PART, len(part))


def _read(part: Part, first: int, last: int) -> Tensor:
    values = part[first:last] if isinstance(part, Tensor) else part.read(first, last)
    return torch.zeros(last - first) if values is None else values


def section_parts(
    parts: Mapping[str, Part],
    names: Sequence[str],
    buffers: Buffers,
    *,
    packed: bool,
    theta_at_once: Sequence[tuple[int, int]] = (),
) -> Parts[dict[str, memoryview]]:
    """Copies of the sections `names` of a replica's `parts`, each in its own buffer. What lies on a device is copied
    there, SPANS_AT_ONCE spans at a time, and written to the buffers beside it. No element of theta in one of the ranges
    `theta_at_once` is copied later than another in that range."""
    made = dict[str, memoryview]()
    for name in names:
        itemsize = PACKED_ITEMSIZE[name] if packed else ITEMSIZE
        form = torch.float32 if itemsize == ITEMSIZE else torch.bfloat16
        slow = parts["phi"] if packed and name == "theta" else None
        assert slow is None or isinstance(slow, Tensor)
        for some in _groups(parts[name], theta_at_once if name == "theta" else ()):
            between = torch.float32 if slow is not None else form
            copied = [(first, last, _to_host(_read(parts[name], first, last), between)) for first, last in some]

            def write(name: str = name, copied: Sequence[tuple[int, int, Tensor]] = copied) -> None:
                if name not in made:
                    made[name] = buffers(itemsize * len(parts[name]))  # noqa: B023  done before the next round
                _write(copied, slow, torch.frombuffer(made[name], dtype=form))  # noqa: B023

            yield write
    return {name: room.toreadonly() for name, room in made.items()}


def spans_of(shapes: Shapes, wanted: Callable[[str], bool]) -> list[tuple[int, int]]:
    """[first, last) of the `wanted` parameters in a flat buffer of these `shapes`."""
    ends = itertools.accumulate(map(math.prod, shapes.values()))
    return [(end - math.prod(shapes[name]), end) for name, end in zip(shapes, ends, strict=True) if wanted(name)]


def _groups(part: Part, at_once: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """The spans of a part that are copied one after the other: SPANS_AT_ONCE, and on to where no range of `at_once` is
    cut; all of what is in main memory, whose copy stops no device."""
    here = isinstance(part, Tensor) and part.device.type == "cpu"
    some: list[tuple[int, int]] = []
    for span in _spans(part):
        some.append(span)
        cut = any(first < span[1] < last for first, last in at_once)
        if not here and len(some) >= SPANS_AT_ONCE and not cut:
            yield some
            some = []
    if some:
        yield some


def _to_host(values: Tensor, form: torch.dtype) -> Tensor:
    """`values` in main memory: themselves, or a copy in `form`, which is made where they are."""
    return values if values.device.type == "cpu" else to_host(values.to(form))


@torch.no_grad()
def _write(copied: Sequence[tuple[int, int, Tensor]], slow: Tensor | None, out: Tensor) -> None:
    """Write the values of `copied` spans, less those of `slow`, to `out`."""
    for first, last, values in copied:
        out[first:last].copy_(values if slow is None else values - slow[first:last].to(values.device))


class GivenState:
    """The sections of a `state` from elsewhere, for a replica with `sizes` elements of each, without a copy."""

    def __init__(self, state: State, sizes: Mapping[str, int]) -> None:
        """Raises RemoteFault if a section is missing or of the wrong size. The outer sections alone will do."""
        self._packed = state.packed
        outer = outer_sections(sizes)
        self.outer_alone = tuple(state.sections) == outer
        sizes = {name: sizes[name] for name in outer} if self.outer_alone else sizes
        self.sections = {name: self._section(state, name, count) for name, count in sizes.items()}
        if len(state.sections) != len(sizes):
            raise RemoteFault(f"state with sections {list(state.sections)}; expected {', '.join(sizes)}")

    def _section(self, state: State, name: str, count: int) -> Tensor:
        data = state.sections.get(name)
        if data is None:
            raise RemoteFault(f"state without section {name}")
        itemsize = PACKED_ITEMSIZE[name] if state.packed else ITEMSIZE
        if data.nbytes != itemsize * count:
            raise RemoteFault(f"state with {data.nbytes} bytes of {name}; expected {itemsize * count}")
        return decode(WireTensor("f32" if itemsize == ITEMSIZE else "bf16", (count,), data))

    def read(self, name: str, first: int, last: int) -> Tensor:
        """Elements [first, last) of a section, on the CPU."""
        values = self.sections[name][first:last]
        if self._packed and name == "theta":
            return values.float() + self.sections["phi"][first:last]
        return values

    def check(self) -> None:
        """Raises RemoteFault for numbers that are not finite, or negative second moments."""
        for name, section in self.sections.items():
            for first, last in _spans(section):
                check_finite(section[first:last].float(), f"state, section {name}")
                values = self.read(name, first, last)
                if name == "theta" and self._packed:
                    check_finite(values, f"state, section {name}")
                if name == "exp_avg_sq" and float(values.min()) < 0.0:
                    raise RemoteFault("state with a negative second moment in exp_avg_sq")

    def check_moments(self, manifest: Manifest, part: StageLayers) -> None:
        """Raises RemoteFault for first moments that no gradients leave beside the roots of the second ones."""
        shapes = section_shapes(manifest, part)
        most = ROUNDED * moments_apart(manifest.inner)
        firsts = dict(self.by_name("exp_avg", shapes["exp_avg"]))
        for name, seconds in self.by_name("exp_avg_sq", shapes["exp_avg_sq"]):
            first = firsts[name]
            if first.shape != seconds.shape:  # one second moment for a column: `FlatAdamW`
                first = torch.linalg.vector_norm(first, dim=0, dtype=torch.float32) / boundary_width(manifest) ** 0.5
            first = first.flatten()
            second = seconds.flatten()
            for start, end in _spans(first):
                allowed = most * (second[start:end].float().sqrt() + manifest.inner.eps)
                if bool((first[start:end].float().abs() > allowed).any()):
                    raise RemoteFault(f"state with a first moment of {name} over {most:.3g} roots of the second one")

    def by_name(self, name: str, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
        """Weights of section `name` as parameters."""
        first = 0
        for parameter, shape in shapes.items():
            last = first + math.prod(shape)
            yield parameter, self.read(name, first, last).view(shape)
            first = last

    def copy_to(self, name: str, part: Part) -> None:
        """Copy a section into the replica's own `part`."""
        for first, last in _spans(part):
            values = self.read(name, first, last)
            if isinstance(part, Tensor):
                part[first:last].copy_(values)
            else:
                part.load(first, values)

"""Slices of a stage's slow weights, by which states are compared, and how far they lie apart."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import numpy as np

from swarmnode.base.ids import seeded
from swarmnode.keep.transfer.snapshot import SLOW, StateSlice
from swarmnode.model.section import PACKED_ITEMSIZE

SLICES = 4  # guess: of different tensors, mostly
ELEMENTS = 4096  # guess: of each; 64 KiB in all
ALIGN = 64
# A share of the longer vector's length. Measured in tests/node: replicas that meet are .01 apart, after rounds without
# a partner up to .53 (a model of 16,000 parameters in its first steps, where weights move most). Noise is 1.4 apart,
# all zeros 1.0, opposite signs 2.0.
APART_MAX = 0.6
ROUNDS_APART_MAX = 4  # guess: within so many rounds weights move less; older snapshots contradict nothing

Apart = Callable[[memoryview | bytes, memoryview | bytes], float]
"""The distance of the same part of two replicas' slow weights, in lengths of the longer one (ports.Replica.apart)."""


def apart(one: memoryview | bytes, other: memoryview | bytes) -> float:
    """The distance of two vectors of float32, in lengths of the longer one.

    0 for equal vectors, 2 for opposite ones, inf where numbers are not finite.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = (np.frombuffer(data, "<f4").astype(np.float64) for data in (one, other))
        length = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
        distance = float(np.linalg.norm(a - b))
    if not math.isfinite(distance):
        return math.inf
    return distance / length if length > 0.0 else 0.0


def drawn_now(parameters: int, *seed: str | int, first: int = 0) -> list[StateSlice]:
    """`cuts` that nobody can know beforehand: this machine's clock has nanoseconds since it started."""
    return cuts(parameters, *seed, repr(asyncio.get_running_loop().time()), first=first)


def cuts(parameters: int, *seed: str | int, first: int = 0) -> list[StateSlice]:
    """SLICES slices to compare of the elements [first, first + parameters) of a state's slow weights, each from an
    element that is a multiple of ALIGN if there are enough."""
    end = first + parameters
    aligned = -(-first // ALIGN) * ALIGN
    least = aligned if aligned < end else first
    count = min(ELEMENTS, end - least)
    rng = seeded("second", *seed)
    return [
        StateSlice(SLOW.sections, least + rng.randrange((end - least - count) // ALIGN + 1) * ALIGN, count)
        for _ in range(SLICES)
    ]


def slices_of(section: memoryview, at: Sequence[StateSlice], first: int = 0, name: str = "phi") -> bytes:
    """The bytes of the slices `at` of the section `name`, of which `section` holds the elements from `first` on."""
    flat = memoryview(section).cast("B")
    size = PACKED_ITEMSIZE[name]
    return b"".join(flat[size * (cut.first - first) : size * (cut.first - first + (cut.count or 0))] for cut in at)

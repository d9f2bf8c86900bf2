"""The recent course of a replica's slow weights, as a direction to measure packets along.

The course is the moving average, over about ROUNDS rounds, of how the slow weights moved from one round to the next.
The last LAG rounds are left out: what a replica learned in them is still its own noise, which points away from its
partners and makes honest packets look like lies. Older noise has been averaged away by the rounds since, and what is
left is what the whole stage agrees on. A sample of the coordinates is enough to measure along it: the inner product of
two vectors over n random coordinates has a standard error of about |a| |b| / sqrt(n).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np

from swarmnode.ids import digest64

SAMPLED = 1 << 13  # coordinates; 1.1 % of |a| |b|, where an honest lead is some 20 % of |D|
# Rounds; measured on recordings of the replica bench, offline: 3 to 6 do alike, with 0 honest leads are biased by -0.3
# to -1.7.
LAG = 3
ROUNDS = 20  # measured: 10 to 40 do alike
LEAST = 2  # guess: movements seen before the course means anything; the noise is measured anyway

Indices = np.ndarray[Any, np.dtype[np.int64]]


def sampled(count: int, *seed: str | int) -> Indices:
    """Some of `count` coordinates, ascending; all, if they are few."""
    if count <= SAMPLED:
        return np.arange(count)
    draw = np.random.Generator(np.random.Philox(key=digest64("course", count, *seed)))
    return np.unique(draw.integers(0, count, SAMPLED))


class UpdateDirection:
    """The course of one replica over the coordinates that its rounds are about. Vectors are numpy arrays or tensors
    [count]; `at` are the sampled coordinates, and `there` the same as such a vector is indexed with."""

    def __init__(self, at: Indices, there: Any = None) -> None:
        self._at, self._there = at, at if there is None else there
        self._past: deque[Any] = deque(maxlen=LAG + 2)
        self._mean: Any = None
        self._seen = 0
        self._direction: Any = None  # a unit vector over the sample

    @property
    def known(self) -> bool:
        """Whether enough rounds were seen to measure along it."""
        return self._direction is not None

    def along(self, block: Any, start: int) -> float:
        """Length along the course of the elements `block`, from `start` on, of a vector; 0 while there is no course."""
        if self._direction is None:
            return 0.0
        first, last = np.searchsorted(self._at, (start, start + len(block)))
        return float((block[self._there[first:last] - start] * self._direction[first:last]).sum())

    def moved(self, phi: Any) -> None:
        """A round is over, and the slow weights are `phi` now."""
        self._past.append(phi[self._there])
        if len(self._past) < LAG + 2:
            return
        self._seen += 1
        step = self._past[1] - self._past[0]
        if self._mean is None:
            self._mean = step
        else:
            self._mean = self._mean + (step - self._mean) * max(1.0 / ROUNDS, 1.0 / self._seen)
        length = math.sqrt(float((self._mean * self._mean).sum()))
        usable = self._seen >= LEAST and length > 0.0 and math.isfinite(length)
        self._direction = self._mean / length if usable else None

    def restart(self) -> None:
        """The slow weights were replaced: the next ones are no movement. The direction stays."""
        self._past.clear()

"""Exponential moving averages of numbers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

ENOUGH = 8  # guess: values before which an average does not tell what is usual


class EmaStart(enum.Enum):
    """The weight of the first values, before there are enough of them for the usual one."""

    UNBIASED = enum.auto()  # the mean of n values that are equal is that value, as Adam corrects its moments
    FIRST = enum.auto()  # the first value counts whole
    MEAN = enum.auto()  # the plain mean of n values, while 1 / n is above the weight


@dataclass(slots=True)
class Ema:
    """mean <- mean + w (value - mean), with w = `weight` but for the first values. `value`, the mean, is 0 before the
    first. Another thread that finds it `known` never sees half of a first `add`."""

    weight: float = 0.1  # of the newest value; SWARM's public code
    start: EmaStart = EmaStart.UNBIASED
    count: int = 0
    value: float = 0.0
    known: bool = False
    _sum: float = 0.0
    _weights: float = 0.0

    def add(self, value: float) -> float:
        """Take `value` in. Returns its weight."""
        self.count += 1
        weight = self.weight
        if self.start is EmaStart.MEAN:
            weight = max(weight, 1.0 / self.count)
        elif self.start is EmaStart.FIRST and self.count == 1:
            weight = 1.0
        self._sum += weight * (value - self._sum)
        self._weights += weight * (1.0 - self._weights)
        self.value = self._sum / self._weights
        self.known = True
        return weight


@dataclass(slots=True)
class EmaMoments(Ema):
    """An average that starts as a plain mean, with its variance <- (1 - w) (variance + w (value - mean)^2)."""

    start: EmaStart = EmaStart.MEAN
    variance: float = 0.0

    def add(self, value: float) -> float:
        """Take `value` in. Returns its weight."""
        moved = value - self.value
        weight = Ema.add(self, value)
        self.variance = (1.0 - weight) * (self.variance + weight * moved * moved)
        return weight

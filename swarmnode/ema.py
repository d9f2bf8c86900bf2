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
    """mean <- mean + w (value - mean), with w = `weight` but for the first values. `value` is 0 before the first."""

    weight: float = 0.1  # of the newest value; SWARM's public code
    start: EmaStart = EmaStart.UNBIASED
    count: int = 0
    _sum: float = 0.0
    _weights: float = 0.0

    def add(self, value: float) -> None:
        """Take `value` in."""
        self.count += 1
        self._take(value, self._next_weight())

    @property
    def known(self) -> bool:
        """Whether there was any value. Another thread that reads this first never sees half of a first `add`."""
        return self._weights > 0.0

    @property
    def value(self) -> float:
        return self._sum / self._weights if self._weights > 0.0 else 0.0

    def _next_weight(self) -> float:
        if self.start is EmaStart.UNBIASED:
            return self.weight
        if self.start is EmaStart.MEAN:
            return max(self.weight, 1.0 / self.count)
        return 1.0 if self.count == 1 else self.weight

    def _take(self, value: float, weight: float) -> None:
        self._sum += weight * (value - self._sum)
        self._weights += weight * (1.0 - self._weights)


@dataclass(slots=True)
class EmaMoments(Ema):
    """An average that starts as a plain mean, with its variance <- (1 - w) (variance + w (value - mean)^2)."""

    start: EmaStart = EmaStart.MEAN
    variance: float = 0.0

    def _take(self, value: float, weight: float) -> None:
        moved = value - self.value
        self.variance = (1.0 - weight) * (self.variance + weight * moved * moved)
        Ema._take(self, value, weight)

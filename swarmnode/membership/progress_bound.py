"""Upper bound of the run's sample counter: larger claims are not believed.

The counter only grows, and two nodes merge theirs by maximum (progress.py). So one false claim would stay for ever, and
rounds, learning rates and the end of the run depend on it (simulated: liars; a claim of 10^12 was believed by all 24
nodes a minute later). Therefore no claim above a bound is accepted: the count known a while ago, plus what the feeding
machines can have done since. Below the bound a liar can speed up the clock to at most FACTOR times what machines do.

A node that was away for longer than the window covers is told more than it believes by everybody. clock.py decides what
it then believes, and what a joiner does. Pure: Unix time is an argument, as it continues while a machine sleeps.
"""

from __future__ import annotations

from collections import deque

FACTOR = 4.0  # guess: machines do up to so many times what they announce: speeds are measured late, or on busy machines
OUTLIER = 4.0  # guess: no machine counts as more than so many times the median
WINDOW_S = 1800.0  # guess: covers the work of two parts of a swarm that were separated for hours
MARKS = 30  # in a window


class ProgressBound:
    """Told at each look at the directory what is believed and possible; returns how far others are believed."""

    def __init__(self, slack: int, ahead_s: float) -> None:
        """`slack` samples are never doubted; the next look comes within `ahead_s` seconds."""
        self._slack = slack
        self._ahead_s = ahead_s
        # (Unix time, samples believed, samples possible) at that time
        self._marks: deque[tuple[float, int, float]] = deque()
        self._rate = 0.0
        self._at, self._possible = 0.0, 0.0  # Unix time of the last look; samples possible since the first one

    def look(self, now_unix_s: float, total: int, rate: float) -> float:
        """Most samples that others are believed to have until the next look, at `total` samples and `rate` possible
        samples a second (0: unknown, as before)."""
        self._rate = rate or self._rate
        if self._marks:
            self._possible += self._rate * max(0.0, now_unix_s - self._at)
        self._at = now_unix_s
        if not self._marks or now_unix_s >= self._marks[-1][0] + WINDOW_S / MARKS:
            self._marks.append((now_unix_s, total, self._possible))
        while len(self._marks) > 1 and self._marks[1][0] <= now_unix_s - WINDOW_S:
            self._marks.popleft()
        _, known, before = self._marks[0]
        return known + self._possible - before + self._rate * self._ahead_s + self._slack

    def lift(self) -> None:
        """Restart the bound from what is believed at the next look."""
        self._marks.clear()

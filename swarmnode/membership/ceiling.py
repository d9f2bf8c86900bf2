"""How far the run's counter of samples can have come: who says more is not believed.

The counter only grows, and two nodes merge theirs by maximum (progress.py). So one peer's boast would stay for ever,
and rounds, learning rates and the end of the run go by it (simulated: liars; a boast of 10^12 was believed by all 24
nodes a minute later). Therefore nothing above a ceiling is taken in: what was known a while ago, and what the machines
that feed can have done since. Below it a liar makes the clock run faster, FACTOR times what machines can do at most.

Who was away for longer than the window makes up for is told more than it believes by everybody: clock.py says what it
believes then, and what a joiner does. Pure: Unix time comes as an argument, as it goes on while a machine sleeps.
"""

from __future__ import annotations

from collections import deque

FACTOR = 4.0  # guess: machines do up to so many times what they announce: speeds are measured late, or on busy machines
OUTLIER = 4.0  # guess: no machine counts as more than so many times the median of all
WINDOW_S = 1800.0  # guess: what two halves of a swarm did while cut from each other for hours is made up for in it
MARKS = 30  # in a window


class Ceiling:
    """Told at each look at the directory what is believed and what is possible; answers how far others are believed."""

    def __init__(self, slack: int, ahead_s: float) -> None:
        """`slack` samples are never doubted; the next look comes within `ahead_s` seconds."""
        self._slack = slack
        self._ahead_s = ahead_s
        self._marks: deque[tuple[float, int, float]] = deque()  # (Unix time, samples believed, samples possible) then
        self._rate = 0.0
        self._at, self._possible = 0.0, 0.0  # Unix time of the last look; samples possible since the first one

    def look(self, now_unix_s: float, total: int, rate: float) -> float:
        """Samples that others are believed at most until the next look, now that `total` are believed and `rate` a
        second are possible (0: nobody says, and it is as many as before)."""
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
        """What is believed at the next look is where it goes on from."""
        self._marks.clear()

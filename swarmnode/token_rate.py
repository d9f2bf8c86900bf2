"""Speeds of training: tokens read per second, over one window wherever they are shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from swarmnode.work import SampleCount, TokenCount

RATE_SPAN_S = 30.0  # guess: some microbatches of a slow machine, and a report of each node
LEAST_S = 1.0  # of a window that has just begun


class TokenWindow:
    """Tokens read over the last RATE_SPAN_S. Where nothing more is read it empties, and the speed is 0."""

    def __init__(self) -> None:
        self._read = deque[tuple[float, TokenCount]]()
        self._sum = 0
        self._began_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Watch from `now_s` on, if not before: what comes first is not work of no time."""
        if self._began_s is None:
            self._began_s = now_s

    def add(self, now_s: float, tokens: TokenCount) -> None:
        """Count tokens read until `now_s`."""
        self.begin(now_s)
        if tokens:
            self._read.append((now_s, tokens))
            self._sum += tokens
        self._forget(now_s)

    def per_second(self, now_s: float) -> float:
        """Tokens read per second until `now_s`."""
        self._forget(now_s)
        if not self._sum or self._began_s is None:
            return 0.0
        return self._sum / max(LEAST_S, min(RATE_SPAN_S, now_s - self._began_s))

    def _forget(self, now_s: float) -> None:
        while self._read and self._read[0][0] < now_s - RATE_SPAN_S:
            self._sum -= self._read.popleft()[1]


class RunSpeed:
    """Tokens per second of the whole run, as a node hears of it: what each feeder's counter grew by between two looks.
    What a node learns of a feeder at once when it first hears of it, or that it restores, is no work of the window."""

    def __init__(self, context: int) -> None:
        """`context`: tokens of a sample."""
        self._context = context
        self._window = TokenWindow()
        self._known: dict[str, int] = {}

    def look(self, now_s: float, feeders: Mapping[str, int], own: str, counted: SampleCount) -> None:
        """Take in the samples of each feeder; of the `own` one those that it `counted` since the start of this node."""
        entries = {**feeders, own: counted}
        known = self._known if self._known else entries
        grown = sum(max(0, samples - known.get(feeder, samples)) for feeder, samples in entries.items())
        self._window.add(now_s, TokenCount(grown * self._context))
        self._known = entries

    def per_second(self, now_s: float) -> float:
        """Tokens read per second until `now_s`."""
        return self._window.per_second(now_s)

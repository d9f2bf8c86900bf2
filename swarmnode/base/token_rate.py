"""Speeds of training: tokens read per second, over one window wherever they are shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from swarmnode.base.work import SampleCount

RATE_SPAN_S = 30.0  # guess: some microbatches of a slow machine, and a report of each node
LEAST_S = 1.0  # of a window that has just begun


class CountRate:
    """Growth of a count of tokens per second over the last RATE_SPAN_S, from looks at the count. Work only counts; the
    looks are made where the speed is shown."""

    def __init__(self) -> None:
        self._looks = deque[tuple[float, int]]()

    def look(self, now_s: float, tokens: int) -> float:
        """Tokens per second until `now_s`, when the count is `tokens`; 0 at the first look. Where looks are rare, it is
        the mean since the last one that is RATE_SPAN_S ago."""
        looks = self._looks
        looks.append((now_s, tokens))
        while len(looks) > 2 and looks[1][0] <= now_s - RATE_SPAN_S:
            looks.popleft()
        began_s, before = looks[0]
        return (tokens - before) / max(LEAST_S, now_s - began_s)


class RunSpeed:
    """Tokens per second of the whole run, as a node hears of it: what each feeder's counter grew by between two looks.
    What a node learns of a feeder at once when it first hears of it, or that it restores, is no work of the window."""

    def __init__(self, context: int) -> None:
        """`context`: tokens of a sample."""
        self._context = context
        self._rate = CountRate()
        self._tokens = 0
        self._known: dict[str, int] = {}

    def look(self, now_s: float, feeders: Mapping[str, int], own: str, counted: SampleCount) -> float:
        """Tokens read per second until `now_s`, from the samples of each feeder; of the `own` one those that it
        `counted` since the start of this node."""
        entries = {**feeders, own: counted}
        known = self._known if self._known else entries
        grown = sum(max(0, samples - known.get(feeder, samples)) for feeder, samples in entries.items())
        self._tokens += grown * self._context
        self._known = entries
        return self._rate.look(now_s, self._tokens)

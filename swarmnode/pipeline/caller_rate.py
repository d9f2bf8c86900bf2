"""A bound on the requests of one caller within a minute."""

from __future__ import annotations

from collections import OrderedDict, deque

from swarmnode.ids import PeerId

WINDOW_S = 60.0


class CallerRate:
    """At most `per_minute` requests of each caller. The last minute of `callers_max` callers is remembered; the caller
    that asked longest ago is forgotten first."""

    def __init__(self, per_minute: int, callers_max: int) -> None:
        self._per_minute = per_minute
        self._callers_max = callers_max
        self._times: OrderedDict[PeerId, deque[float]] = OrderedDict()

    def admit(self, peer: PeerId, now_s: float) -> bool:
        """Whether a request of `peer` at loop time `now_s` is within its bound; then it counts."""
        times = self._times.pop(peer, None) or deque(maxlen=self._per_minute)
        self._times[peer] = times
        if len(times) == self._per_minute and now_s - times[0] < WINDOW_S:
            return False
        times.append(now_s)
        if len(self._times) > self._callers_max:
            self._times.popitem(last=False)
        return True

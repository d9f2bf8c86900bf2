"""How many microbatches a feeder keeps under way: enough to keep every stage at work, no more than it takes.

The rule is TCP Vegas' (Brakmo and Peterson, 1995, section 3.2): with base the least round trip seen lately,
`window * (1 - base / round trip)` is the number of our microbatches that only wait in queues; keep it between two
bounds. A base measured through our own queue would creep upwards, so every `BASE_SPAN` completions the window is halved
for a moment and the base taken anew (as BBR's ProbeRTT, Cardwell et al. 2016).
"""

from __future__ import annotations

QUEUED_LOW = 0.5
QUEUED_HIGH = 1.5
BASE_SPAN = 256  # guess: completions between two probes; a probe costs about half a window's worth of work


class Window:
    """Pure: told of completions and losses, answers `size`."""

    def __init__(self, start: float, maximum: int) -> None:
        self._maximum = float(maximum)
        self._size = min(max(1.0, start), self._maximum)
        self._base_s = float("inf")
        self._probed_s = float("inf")
        self._seen = 0
        self._probing = 0  # completions until the probe ends

    @property
    def size(self) -> int:
        return max(1, int(self._size) // 2) if self._probing else int(self._size)

    def completed(self, round_trip_s: float) -> None:
        """A microbatch came back after `round_trip_s`."""
        self._seen += 1
        if self._probing:
            # The first half of the probe still returns what was queued before it.
            if self._probing <= int(self._size) + 1:
                self._probed_s = min(self._probed_s, round_trip_s)
            self._probing -= 1
            if self._probing == 0:
                self._base_s = self._probed_s
            return
        self._base_s = min(self._base_s, round_trip_s)
        queued = self._size * (1.0 - self._base_s / round_trip_s)
        if queued < QUEUED_LOW:
            self._size = min(self._maximum, self._size + 1.0 / self._size)
        elif queued > QUEUED_HIGH:
            self._size = max(1.0, self._size - 1.0 / self._size)
        if self._seen % BASE_SPAN == 0:
            self._probing, self._probed_s = 2 * (int(self._size) + 1), float("inf")

    def lost(self) -> None:
        """A microbatch found no way in time: halve."""
        self._size = max(1.0, self._size / 2.0)

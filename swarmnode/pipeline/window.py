"""How many microbatches a feeder keeps under way: enough to keep every stage at work, no more than it takes.

By Little's law `window * queued / round trip` is the number of our microbatches that only wait in queues; it is kept
between two bounds. TCP Vegas (Brakmo and Peterson, 1995, section 3.2) estimates the same number from the least round
trip ever seen, which must do for routers that say nothing; our hops report how long a microbatch waited. (The estimate
by least round trip takes a slower replica for a queue: in a fleet of 1:3 speeds it held the window at 2 and the
machines at 20 % of their capacity; simulated, examples/churn-16.toml.)
"""

from __future__ import annotations

# For each machine this feeder supplies, of all stages; Vegas' alpha and beta. Simulated, four stages, share of what the
# machines can do: churn-16, ten minutes, 1-2 81 %, 1.5-3, 2-4 and 3-6 82 %; swarm48, first 45 minutes: 69, 69, 71 and
# 70 %, and with 3-6 eleven microbatches lost. In a closed network of like machines, n under way for each of them
# keep n / (n + 1) of them at work (Kleinrock 1975): one that waits for each is 62 %, two are 73 %, and chance is less
# here. More waiting makes gradients later, and some too late.
QUEUED_LOW = 1.0
QUEUED_HIGH = 2.0
SMOOTHING = 0.1  # guess: of the share of time spent in queues, over about ten microbatches


class Window:
    """Pure: told of completions and losses, answers `size`."""

    def __init__(self, start: float, maximum: int) -> None:
        self._maximum = float(maximum)
        self._size = min(max(1.0, start), self._maximum)
        self._share: float | None = None  # of a round trip, spent in queues
        self._starting = True  # doubling with each round trip, until something waits
        self._since = maximum  # completions and losses since it was halved
        self._limit = maximum

    @property
    def size(self) -> int:
        return min(int(self._size), self._limit)

    @property
    def wanted(self) -> int:
        """The size without its limit."""
        return int(self._size)

    def limit(self, microbatches: int) -> None:
        """Stay at or below so many microbatches from now on."""
        self._limit = microbatches

    def completed(self, round_trip_s: float, queued_s: float, machines: float = 1.0) -> None:
        """A microbatch came back after `round_trip_s`, of which it waited `queued_s` for compute threads; this feeder's
        part of the fleet is `machines` replicas of all stages."""
        share = min(1.0, queued_s / round_trip_s) if round_trip_s > 0.0 else 0.0
        self._share = share if self._share is None else self._share + SMOOTHING * (share - self._share)
        queued = self._size * self._share
        machines = max(1.0, machines)
        short, over = QUEUED_LOW * machines - queued, queued - QUEUED_HIGH * machines
        self._since += 1
        # In a round trip, `size` completions, what is missing or too much: where many machines are to be supplied and a
        # round trip takes minutes, one more in each never got there between two losses (simulated: swarm48).
        if short > 0.0:
            self._size = min(self._maximum, self._size + (1.0 if self._starting else max(1.0, short) / self._size))
        else:
            self._starting = False
            if over > 0.0:
                self._size = max(1.0, self._size - max(1.0, over) / self._size)

    def lost(self) -> None:
        """A microbatch found no way in time: halve, but once for all that were under way then, as TCP does (RFC 6582,
        section 3): a peer that dies takes all with it that it held."""
        self._starting = False
        self._since += 1
        if self._since > self._size:
            self._since, self._size = 0, max(1.0, self._size / 2.0)

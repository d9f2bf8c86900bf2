"""The number of microbatches a feeder keeps in flight: enough to keep every stage busy, and no more.

By Little's law `window * queued / round trip` is the number of our microbatches that wait in queues; it is kept between
two bounds. TCP Vegas (Brakmo and Peterson, 1995, section 3.2) estimates the same number from the least round trip seen,
because routers report nothing. Our hops report queueing times. (The estimate by least round trip mistakes a slower
replica for a queue: in a fleet of 1:3 speeds it held the window at 2 and the machines at 20 % of their capacity;
simulated, examples/churn-16.toml.)
"""

from __future__ import annotations

from swarmnode.ema import Ema, EmaStart

# Per machine that this feeder supplies, of all stages; Vegas' alpha and beta. Simulated, four stages, share of what the
# machines can do: churn-16, ten minutes, 1-2 81 %, 1.5-3, 2-4 and 3-6 82 %; swarm48, first 45 minutes: 69, 69, 71 and
# 70 %, and with 3-6 eleven microbatches lost. A closed network of equal machines with n microbatches in flight for each
# keeps n / (n + 1) of them busy (Kleinrock 1975): one queued per machine gives 62 %, two 73 %, and there is less
# randomness here. More queueing makes gradients later, and some too late.
QUEUED_LOW = 1.0
QUEUED_HIGH = 2.0


class Window:
    """The window's size. Pure: told of completions and losses."""

    def __init__(self, start: float, maximum: int) -> None:
        self._maximum = float(maximum)
        self._size = min(max(1.0, start), self._maximum)
        self._share = Ema(start=EmaStart.FIRST)  # of a round trip, spent in queues
        self._starting = True  # double with each round trip until something queues
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
        """Bound the size to `microbatches` from now on."""
        self._limit = microbatches

    def record_trip(self, round_trip_s: float, queued_s: float, machines: float = 1.0) -> None:
        """Record a microbatch that came back after `round_trip_s`, of which it queued `queued_s` for compute threads.
        `machines`: this feeder's part of the replicas of all stages."""
        share = min(1.0, queued_s / round_trip_s) if round_trip_s > 0.0 else 0.0
        self._share.add(share)
        queued = self._size * self._share.value
        machines = max(1.0, machines)
        short, over = QUEUED_LOW * machines - queued, queued - QUEUED_HIGH * machines
        self._since += 1
        # Correct the whole deficit or excess per round trip (`size` completions). With many machines and round trips of
        # minutes, one more per round trip never got there between two losses (simulated: swarm48).
        if short > 0.0:
            self._size = min(self._maximum, self._size + (1.0 if self._starting else max(1.0, short) / self._size))
        else:
            self._starting = False
            if over > 0.0:
                self._size = max(1.0, self._size - max(1.0, over) / self._size)

    def record_loss(self) -> None:
        """Record a lost microbatch: halve the window, but once per window, as TCP does (RFC 6582, section 3), since a
        dying peer takes all it holds with it."""
        self._starting = False
        self._since += 1
        if self._since > self._size:
            self._since, self._size = 0, max(1.0, self._size / 2.0)

"""When a hop pings the peer it waits for, and when it gives the microbatch to another replica. Pure.

A microbatch is moved, never duplicated: two replicas working on it would both add its gradient, and the later one
cannot take it back. (One replica counts a microbatch once, but two replicas, and the replicas behind them, count it
twice.) So the first call is cancelled before the second is made. The cancellation follows the same calls, and only a
replica whose device has begun to add the gradient completes it. That one, and the finished replicas behind it, count
twice: the second replica cannot know them.

A microbatch is moved when its peer is far later than expected, not because its deadline is near. Moving by deadline
cost more work than it saved with slow hops (simulated: calm, seed 7: 76 done and 8 lost instead of 95 and none).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TIMEOUT_FACTOR = 4.0  # guess: a peer later than this multiple of its expected time is pinged
LIMIT_MAX_S = 86_400.0  # as the manifest's, at most
GRAY_FACTOR = 2.0  # guess: a peer so many times later still, though it answers pings, does not do its work


class RoundTrip:
    """The time limit of a microbatch, there and back: TCP's retransmission timer (RFC 6298, section 2: mean plus four
    deviations), with the manifest's time as minimum. Before the first completion it doubles with each loss, as in TCP,
    so nobody must know in advance how long a large model takes on home machines."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._mean_s = self._deviation_s = 0.0
        self._known = False
        self._grown_s = -math.inf  # when it was last doubled

    @property
    def limit_s(self) -> float:
        """Time limit in seconds of a microbatch started now."""
        return min(LIMIT_MAX_S, max(self._least_s, self._mean_s + 4.0 * self._deviation_s))

    @property
    def seconds(self) -> float:
        """Smoothed seconds of a microbatch, there and back; 0 before the first."""
        return self._mean_s

    def completed(self, seconds: float) -> None:
        """Record a completed microbatch."""
        if not self._known:
            self._known, self._mean_s, self._deviation_s = True, seconds, seconds / 2.0
        else:
            self._deviation_s += (abs(seconds - self._mean_s) - self._deviation_s) / 4.0
            self._mean_s += (seconds - self._mean_s) / 8.0

    def lost(self, begun_s: float, now_s: float) -> None:
        """Record a microbatch, begun at `begun_s`, that missed its limit. Of those begun under one limit only the first
        counts."""
        if not self._known and begun_s >= self._grown_s:
            self._least_s, self._grown_s = min(LIMIT_MAX_S, 2.0 * self._least_s), now_s


@dataclass(frozen=True, slots=True)
class HopTimeout:
    """`ping_s`: wait before pinging the peer. `give_up_s`: wait before trying another replica. `blames`: giving up is
    the peer's fault."""

    ping_s: float
    give_up_s: float
    blames: bool


def hop_timeout(
    expected_s: float, hops: int, minimum_s: float, left_s: float, others: bool, *, known: bool = True
) -> HopTimeout:
    """Timeouts for a peer expected to need `expected_s` itself, `hops` before the last stage, with `left_s` to the
    microbatch's deadline.

    `others`: another replica could take it. `known`: the expectation comes from the peer's own answers, else from
    others'. Hops nearer the end give up first, because they repair their own next hop.
    """
    ping_s = max(minimum_s, TIMEOUT_FACTOR * expected_s * hops)
    # Nothing is known of a peer before its first answer, so only the deadline counts.
    gray_s = (GRAY_FACTOR + hops) * ping_s if known and expected_s > 0.0 else float("inf")
    give_up_s = min(gray_s, left_s) if others else left_s
    return HopTimeout(ping_s, give_up_s, give_up_s >= gray_s)

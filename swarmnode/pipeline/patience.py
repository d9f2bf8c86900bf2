"""How long a hop waits for the next one: when it asks whether that one lives, and when it gives the microbatch to
another replica. Pure.

A microbatch is moved, never doubled: two replicas at work on the same one would both add its gradient, and whoever
comes second cannot take it back (a replica counts a microbatch once, but two replicas count it twice, and so do the
replicas after them). So the first call is cancelled before the second is made: the cancellation runs down the same
calls, and only whose device had begun to add the gradient completes it. That one, and the replicas after it that were
done, are counted twice: nobody can tell the second replica whom the first had asked.

It is moved from a peer that is far later than what is known of it, not because its deadline is near: that cost more
work than it saved where hops are slow (simulated: calm, seed 7: 76 done and 8 lost instead of 95 and none).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TIMEOUT_FACTOR = 4.0  # issue 5: a node later than four times what is expected of it is pinged
LIMIT_MAX_S = 86_400.0  # as the manifest's, at most
GRAY_FACTOR = 2.0  # guess: one that is so many times later still, and answers pings, does everything but its work


class RoundTrip:
    """How long a microbatch may take, there and back: TCP's retransmission timer (RFC 6298, section 2: the mean and
    four deviations), with the manifest's time as the least. Before the first comes back it doubles with each loss, as
    TCP's: nobody need know before how long a large model takes on machines at home."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._mean_s = self._deviation_s = 0.0
        self._known = False
        self._grown_s = -math.inf  # when it was doubled

    @property
    def limit_s(self) -> float:
        """Seconds that a microbatch begun now may take."""
        return min(LIMIT_MAX_S, max(self._least_s, self._mean_s + 4.0 * self._deviation_s))

    def completed(self, seconds: float) -> None:
        """One came back."""
        if not self._known:
            self._known, self._mean_s, self._deviation_s = True, seconds, seconds / 2.0
        else:
            self._deviation_s += (abs(seconds - self._mean_s) - self._deviation_s) / 4.0
            self._mean_s += (seconds - self._mean_s) / 8.0

    def lost(self, begun_s: float, now_s: float) -> None:
        """One begun at `begun_s` was not back in time. Of those begun under one limit the first counts."""
        if not self._known and begun_s >= self._grown_s:
            self._least_s, self._grown_s = min(LIMIT_MAX_S, 2.0 * self._least_s), now_s


@dataclass(frozen=True, slots=True)
class Patience:
    """`ping_s` until the peer is asked whether it lives; `give_up_s` until another replica is tried; `blames` when it
    is the peer's fault that it was not done by then."""

    ping_s: float
    give_up_s: float
    blames: bool


def patience(
    expected_s: float, hops: int, minimum_s: float, left_s: float, others: bool, *, known: bool = True
) -> Patience:
    """For a peer expected to need `expected_s` itself, `hops` before the last stage, with `left_s` to the microbatch's
    deadline. `others`: another replica could take it; `known`: by the peer's own answers, else by those of others. Hops
    nearer the end give up first: theirs is the repair."""
    ping_s = max(minimum_s, TIMEOUT_FACTOR * expected_s * hops)
    # Nothing is known of a peer before its first answer: then only the deadline tells.
    gray_s = (GRAY_FACTOR + hops) * ping_s if known and expected_s > 0.0 else float("inf")
    give_up_s = min(gray_s, left_s) if others else left_s
    return Patience(ping_s, give_up_s, give_up_s >= gray_s)

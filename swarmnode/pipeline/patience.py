"""How long a hop waits for the next one: when it asks whether that one lives, and when it gives the microbatch to
another replica. Pure.

A microbatch is moved, never doubled: two replicas at work on the same one would both add its gradient, and whoever
comes second cannot take it back (a replica counts a microbatch once, but two replicas count it twice, and so do the
replicas after them). So the first call is cancelled before the second is made: the cancellation runs down the same
calls, and only who had begun to add the gradient completes it.
"""

from __future__ import annotations

from dataclasses import dataclass

TIMEOUT_FACTOR = 4.0  # issue 5: a node later than four times what is expected of it is pinged
GRAY_FACTOR = 2.0  # guess: one that is so many times later still, and answers pings, does everything but its work
AGAIN_FACTOR = 2.0  # guess: what another replica needs, in terms of what this one was expected to need


@dataclass(frozen=True, slots=True)
class Patience:
    """`ping_s` until the peer is asked whether it lives; `give_up_s` until another replica is tried; `blames` when it
    is the peer's fault that it was not done by then."""

    ping_s: float
    give_up_s: float
    blames: bool


def patience(expected_s: float, hops: int, minimum_s: float, left_s: float, others: bool) -> Patience:
    """For a peer expected to need `expected_s` itself, `hops` before the last stage, with `left_s` to the microbatch's
    deadline. `others`: another replica could take it. Hops nearer the end give up first: theirs is the repair."""
    whole_s = expected_s * hops
    ping_s = max(minimum_s, TIMEOUT_FACTOR * whole_s)
    gray_s = (GRAY_FACTOR + hops) * ping_s
    if not others:
        return Patience(ping_s, left_s, left_s >= gray_s)
    # Less is kept back far from the end: the hops between get the time to repair before this one does.
    reserve_s = min(left_s / (1.0 + hops), max(minimum_s, AGAIN_FACTOR * whole_s))
    give_up_s = min(gray_s, left_s - reserve_s)
    return Patience(ping_s, give_up_s, give_up_s >= gray_s)

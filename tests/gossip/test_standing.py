"""Trust falls at once and comes back with time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gossip.standing import FALL, HALF_LIFE_S, LEAST, PEERS_MAX, Standings
from swarmnode.ids import PeerId

A, B = PeerId("a"), PeerId("b")


def test_two_refusals_leave_a_peer_out_until_time_has_passed() -> None:
    standings = Standings()
    assert standings.meets(A, 0.0)[0]
    assert standings.refused(A, 10.0) == FALL and standings.meets(A, 10.0)[0]
    assert standings.refused(A, 10.0) == FALL**2
    met, reason = standings.meets(A, 10.0)
    assert not met and reason == "trust in a is 0.25, 0.4 is least"
    assert standings.meets(B, 10.0)[0]
    back_s = HALF_LIFE_S * math.log2((1 - FALL**2) / (1 - LEAST))
    assert not standings.meets(A, 10.0 + 0.99 * back_s)[0] and standings.meets(A, 10.0 + 1.01 * back_s)[0]


@given(st.lists(st.tuples(st.floats(0, 1000), st.booleans()), max_size=30))
def test_never_outside_of_0_and_1(steps: list[tuple[float, bool]]) -> None:
    """Twin: a list of times of refusals, replayed from the beginning."""
    standings, now, trust = Standings(), 0.0, 1.0
    for seconds, refused in steps:
        now += seconds
        trust = 1 - (1 - trust) * 0.5 ** (seconds / HALF_LIFE_S)
        if refused:
            trust *= FALL
            standings.refused(A, now)
        assert standings.trust(A, now) == pytest.approx(trust, abs=1e-9) and 0 <= trust <= 1


def test_memory_is_bounded_and_keeps_the_worst() -> None:
    standings = Standings()
    standings.refused(A, 0.0)
    standings.refused(A, 0.0)
    for i in range(PEERS_MAX + 5):
        standings.refused(PeerId(f"p{i}"), 1.0)
    assert len(standings._trust) == PEERS_MAX and not standings.meets(A, 1.0)[0]

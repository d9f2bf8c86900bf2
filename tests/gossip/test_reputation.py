"""Trust falls at once and comes back with time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gossip.acceptance import FALL, HALF_LIFE_S, LEAST, RISE, Reputation
from swarmnode.ids import PeerId
from swarmnode.remembered import REMEMBERED_MAX

A, B = PeerId("a"), PeerId("b")


def test_six_refusals_leave_a_peer_out_until_time_has_passed() -> None:
    reputation = Reputation()
    for _ in range(6):
        assert reputation.meets(A, 10.0)[0]
        left = reputation.record_broken_packet(A, 10.0)
    assert left == pytest.approx(FALL**6)
    met, reason = reputation.meets(A, 10.0)
    assert not met and reason == "trust in a is 0.12, 0.15 is least"
    assert reputation.meets(B, 10.0)[0]
    back_s = HALF_LIFE_S * math.log2((1 - FALL**6) / (1 - LEAST))
    assert not reputation.meets(A, 10.0 + 0.99 * back_s)[0] and reputation.meets(A, 10.0 + 1.01 * back_s)[0]


@given(st.lists(st.tuples(st.floats(0, 1000), st.booleans()), max_size=30))
def test_never_outside_of_0_and_1(steps: list[tuple[float, bool]]) -> None:
    """Twin: a list of times of refusals and of packets taken, replayed from the beginning."""
    reputation, now, trust = Reputation(), 0.0, 1.0
    for seconds, refused in steps:
        now += seconds
        trust = 1 - (1 - trust) * 0.5 ** (seconds / HALF_LIFE_S)
        if refused:
            trust *= FALL
            reputation.record_broken_packet(A, now)
        else:
            trust = 1 - RISE * (1 - trust)
            reputation.taken(A, now)
        assert reputation.trust(A, now) == pytest.approx(trust, abs=1e-9) and 0 <= trust <= 1


def test_memory_is_bounded_and_keeps_the_worst() -> None:
    reputation = Reputation()
    for _ in range(7):
        reputation.record_broken_packet(A, 0.0)
    for i in range(REMEMBERED_MAX + 5):
        reputation.record_broken_packet(PeerId(f"p{i}"), 1.0)
    assert len(reputation._trust) == REMEMBERED_MAX and not reputation.meets(A, 1.0)[0]

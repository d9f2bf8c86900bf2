"""How long a hop waits: pure arithmetic."""

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.train.pipeline.next_hop import GRAY_FACTOR, LATE_FACTOR, LIMIT_MAX_S, RoundTrip, hop_timeout

SECONDS = st.floats(0.001, 1000.0)


@given(SECONDS, st.integers(1, 8), SECONDS, SECONDS, st.booleans())
def test_a_call_ends_with_the_deadline_without_blame(
    expected_s: float, hops: int, minimum_s: float, left_s: float, others: bool
) -> None:
    found = hop_timeout(expected_s, hops, minimum_s, left_s, others)
    assert 0.0 < found.give_up_s <= left_s
    if found.blames:
        assert found.give_up_s >= GRAY_FACTOR * LATE_FACTOR * expected_s - 1e-9, "slow is not gray"


@given(SECONDS, st.integers(2, 8), SECONDS, st.booleans())
def test_the_hop_nearer_the_end_gives_up_first(expected_s: float, hops: int, minimum_s: float, others: bool) -> None:
    far = hop_timeout(expected_s, hops, minimum_s, 1e9, others)
    near = hop_timeout(expected_s, hops - 1, minimum_s, 1e9, True)
    assert near.ping_s <= far.ping_s
    assert near.give_up_s < far.give_up_s


def test_a_stranger_is_asked_by_what_others_need_and_left_by_the_deadline_alone() -> None:
    known, stranger = (hop_timeout(0.5, 1, 0.1, 60.0, True, known=known) for known in (True, False))
    assert stranger.ping_s == known.ping_s == 2.0
    assert known.give_up_s == 6.0 and known.blames
    assert stranger.give_up_s == 60.0 and not stranger.blames


def test_a_microbatch_may_take_what_others_took_and_never_less_than_the_manifest_says() -> None:
    trip = RoundTrip(120.0)
    assert trip.limit_s == 120.0
    trip.record_trip(10.0)
    assert trip.limit_s == 120.0
    for _ in range(200):
        trip.record_trip(1000.0)
    assert 1000.0 < trip.limit_s < 1100.0, "all alike"
    for seconds in [500.0, 1500.0] * 100:
        trip.record_trip(seconds)
    assert 2500.0 < trip.limit_s < 3500.0, "four deviations above the mean"
    trip.record_loss(0.0, 10.0)
    assert trip.limit_s < 3500.0, "losses tell nothing where microbatches come back"


def test_until_one_comes_back_the_time_doubles_with_each_loss() -> None:
    trip = RoundTrip(120.0)
    trip.record_loss(begun_s=0.0, now_s=120.0)
    for begun_s in (1.0, 50.0, 119.0):
        trip.record_loss(begun_s, begun_s + 120.0)
    assert trip.limit_s == 240.0, "one for all that were under way"
    trip.record_loss(121.0, 361.0)
    assert trip.limit_s == 480.0
    for now_s in range(1000, 100_000, 1000):
        trip.record_loss(now_s, now_s + 1.0)
    assert trip.limit_s == LIMIT_MAX_S

"""Rounds by total samples, against a twin that counts one sample at a time; strides, against what they promise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.bounds import STRIDE_MAX
from swarmnode.train.gossip.outgoing_packet import RoundWeight
from swarmnode.train.gossip.round import EXCHANGES_PER_ROUND, LINE_FADE, NARROWING, RoundPace, Rounds

strides = st.integers(0, 5).map(lambda power: 2**power)


@given(st.integers(1, 50), st.integers(0, 500), strides)
def test_twin(round_samples: int, total: int, stride: int) -> None:
    rounds = Rounds(round_samples)
    ended = [sample // round_samples for sample in range(1, total + 1) if sample % round_samples == 0]
    mine = [index for index in ended if index % stride == 0]
    assert rounds.newest(total, stride) == (mine[-1] if mine else 0)
    left = rounds.left(total, stride)
    assert rounds.newest(total + left, stride) == (mine[-1] if mine else 0) + stride
    assert rounds.newest(total + left - 1, stride) == (mine[-1] if mine else 0)


@given(st.integers(1, 10_000), st.floats(0, 1e6), st.floats(0, 1e4), strides)
def test_stride_leaves_the_seconds_needed_and_does_not_flap(
    round_samples: int, rate: float, seconds: float, now: int
) -> None:
    rounds = Rounds(round_samples)
    stride, _ = rounds.stride(rate, seconds, now)
    assert stride & (stride - 1) == 0
    assert stride == STRIDE_MAX or stride * round_samples >= rate * seconds * (1 - 1e-9)
    assert rounds.stride(rate, seconds, stride)[0] == stride, "the same again changes nothing"
    # A tenth more or less leads to no going back and forth.
    up, _ = rounds.stride(rate * 1.1, seconds, stride)
    assert rounds.stride(rate, seconds, up)[0] == up
    assert NARROWING > 1.1


def test_a_longer_stride_meets_at_rounds_the_others_have() -> None:
    rounds = Rounds(10)
    at = {stride: {rounds.newest(total, stride) for total in range(2000)} for stride in (1, 2, 8)}
    assert at[8] < at[2] < at[1]


def test_rounds_take_their_share_of_the_line() -> None:
    """A line that carried 4 MB/s at most, packets of 1 MB: a quarter of it is a packet a second."""
    pace = RoundPace()
    assert pace.needed_s(0.25)[0] == 0.0, "nothing is known yet"
    pace.boundary(0.0, 0, 0)
    pace.exchanged(0.25, 1_000_000)
    seconds, reason = pace.needed_s(0.25)
    assert seconds == pytest.approx(1.0) and reason == "1 MB are 0.25 of a line of 4 MB/s"
    pace.boundary(10.0, 100, 80_000_000)  # activations went out at 8 MB/s meanwhile
    assert pace.needed_s(0.25)[0] == pytest.approx(0.5), "a quarter of 8 MB/s"
    assert pace.needed_s(0.8)[0] == pytest.approx(0.25 * EXCHANGES_PER_ROUND), "the time of an exchange counts, too"
    pace.exchanged(0.25, 1_000_000)
    assert pace.needed_s(0.125)[0] == pytest.approx(1.0)
    for number in range(2, 400):  # another network, of a tenth: it is forgotten that there was more
        pace.exchanged(2.5, 1_000_000)
        pace.boundary(10.0 * number, 100 * number, 80_000_000)
    assert pace.needed_s(0.1)[0] == pytest.approx(25.0, rel=0.05) and LINE_FADE < 1.0
    assert pace.needed_s(1.0)[0] == pytest.approx(2.5 * EXCHANGES_PER_ROUND), "and the time of exchanges counts, too"


def test_samples_that_come_all_at_once_are_no_rate() -> None:
    """As when a cut network heals: the other half's count comes within a moment, in one round or in two."""
    pace = RoundPace()
    rounds = Rounds(64)
    pace.exchanged(0.3, 1_000_000)
    for second in range(10):
        pace.boundary(float(second), 64 * second, 0)
    assert pace.samples_per_second == 64.0
    needed_s, _ = pace.needed_s(1.0)
    for at_s, samples in ((9.01, 3000), (9.02, 6000), (10.0, 6064), (11.0, 6128)):
        pace.boundary(at_s, samples, 0)
        assert pace.samples_per_second == pytest.approx(64.0, rel=0.1)
        assert rounds.stride(pace.samples_per_second, needed_s, 1)[0] == 1
    for round_index in range(1, 4):  # twice as fast for good
        pace.boundary(11.0 + round_index / 2, 6128 + 64 * round_index, 0)
    assert pace.samples_per_second == 128.0


@given(st.floats(0.01, 1.0), st.integers(1, 10**9), st.floats(1e3, 1e9), st.floats(0.0, 10.0))
def test_packets_never_take_more_than_their_share(share: float, nbytes: int, line: float, waiting: float) -> None:
    pace = RoundPace()
    pace.exchanged(nbytes / line + waiting, nbytes)
    seconds, _ = pace.needed_s(share)
    assert nbytes <= share * line * seconds * (1 + 1e-9)


def test_a_replica_that_trained_nothing_since_a_fragments_round_is_idle() -> None:
    samples = 0
    weight = RoundWeight(2, lambda: samples, newcomer=False)
    assert weight.of(2) == 1.0, "it may have come with a snapshot"
    weight.on_round_end(2, 0)
    assert weight.of(4) == 0.0 and weight.of(3) == 1.0
    samples = 8
    assert weight.of(4) == 1.0
    weight.on_round_end(3, 8)
    assert weight.of(5) == 0.0
    assert weight.of(4) == 1.0, "this fragment has not met since"


def test_a_newcomer_that_serves_without_a_round_counts_once_it_trained_half_of_one() -> None:
    """It began from slow weights: with the same weight it halved what its partner learned."""
    samples = 8
    weight = RoundWeight(2, lambda: samples, newcomer=True, least=lambda: 16)
    weight.on_round_end(4, 8)
    weight.serve()
    assert not weight.newcomer
    samples = 20
    assert weight.of(6) == 1.0 and weight.of(5) == 0.0, "the other fragment had no round, and 12 samples are few"
    samples = 24
    assert weight.of(5) == 1.0
    samples = 20
    weight.on_round_end(5, 20)
    samples = 24
    assert weight.of(7) == 1.0, "it has had one"


def test_a_newcomer_receives_a_round_of_each_fragment_first() -> None:
    samples = 8
    weight = RoundWeight(2, lambda: samples, newcomer=True)
    assert weight.of(4) == weight.of(5) == 0.0
    weight.on_round_end(4, 4)
    assert weight.newcomer and weight.of(6) == 1.0 and weight.of(5) == 0.0
    weight.restored(newcomer=True)
    assert weight.of(6) == 0.0, "another state: nothing of it was received yet"
    weight.on_round_end(5, 4)
    weight.on_round_end(6, 4)
    assert not weight.newcomer and weight.of(7) == weight.of(8) == 1.0
    weight.restored(newcomer=True)
    weight.restored(newcomer=False)
    assert weight.of(9) == weight.of(10) == 1.0

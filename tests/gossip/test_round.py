"""Rounds by total samples, against a twin that counts one sample at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gossip.round import Rounds


def test_literals() -> None:
    rounds = Rounds(round_samples=100, round_seconds_min=2.0)
    assert rounds.index(0) == 0
    assert rounds.index(99) == 0
    assert rounds.index(100) == 1
    assert rounds.left(99) == 1
    assert rounds.left(100) == 100
    assert rounds.due(99, 0, 10.0) == (None, "1 samples until round 1")
    assert rounds.due(100, 0, 10.0) == (1, "100 samples end round 1")
    assert rounds.due(430, 1, 2.0) == (4, "430 samples end round 4, 2 skipped")
    assert rounds.due(430, 4, 10.0)[0] is None
    assert rounds.due(430, 7, 10.0)[0] is None  # a replica that is ahead of what we know waits
    answer, reason = rounds.due(430, 1, 1.5)
    assert answer is None and "0.5 s" in reason and "round_seconds_min" in reason


@given(st.floats(0, 1e6), st.floats(0, 100))
def test_waiting_as_long_as_told_is_enough(last_s: float, min_s: float) -> None:
    """In floats (last + min) - last may be less than min."""
    assert Rounds(1, min_s).due(5, 1, (last_s + min_s) - last_s)[0] == 5


@given(
    st.integers(1, 50),
    st.integers(0, 500),
    st.integers(0, 12),
    st.floats(0, 5, allow_nan=False),
    st.floats(0, 5, allow_nan=False),
)
def test_twin(round_samples: int, total: int, done: int, since_s: float, min_s: float) -> None:
    rounds = Rounds(round_samples, min_s)
    newest = sum(1 for sample in range(1, total + 1) if sample % round_samples == 0)
    answer, reason = rounds.due(total, done, since_s)
    assert answer == (newest if newest > done and since_s >= min_s - 1e-6 else None)
    assert reason
    assert rounds.index(total + rounds.left(total)) == newest + 1
    assert rounds.index(total + rounds.left(total) - 1) == newest

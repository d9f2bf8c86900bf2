"""Which stages a microbatch visits."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.pipeline.route import fault, itinerary, successors


def test_lost_inner_stages_are_left_out_up_to_a_third() -> None:
    assert itinerary(6, (2,)) == (0, 1, 3, 4, 5)
    assert itinerary(6, (3, 1, 4)) == (0, 2, 4, 5)
    assert itinerary(6, (0, 5)) == (0, 1, 2, 3, 4, 5)
    assert itinerary(2, (1,)) == (0, 1)


@given(st.integers(1, 12), st.sets(st.integers(0, 11)))
def test_every_way_is_good_and_known(stages: int, lost: set[int]) -> None:
    way = itinerary(stages, sorted(lost))
    assert fault(way, stages) is None
    for a, b in itertools.pairwise(itinerary(stages)):
        assert successors(a, stages, skips=False) == (b,)
        assert successors(a, stages, skips=True) == tuple(at for at in (b, b + 1) if at < stages)
    assert successors(stages - 1, stages, skips=True) == ()


@pytest.mark.parametrize("way", [(), (1, 2, 3), (0, 1, 2), (0, 1, 1, 3), (0, 7, 3), (0, 3)])
def test_bad_itineraries_are_told(way: tuple[int, ...]) -> None:
    assert fault(way, 4) is not None

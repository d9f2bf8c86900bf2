"""Which stages a microbatch visits."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.model.weight_stash import partner, swaps
from swarmnode.pipeline.route import fault, itinerary, successors


@pytest.mark.parametrize(
    ("stages", "odd"),
    [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 2, 1, 3]), (5, [0, 2, 1, 3, 4]), (6, [0, 2, 1, 4, 3, 5])],
)
def test_odd_microbatches_are_swapped(stages: int, odd: list[int]) -> None:
    assert list(itinerary(stages, 1, swapped=True)) == odd
    assert list(itinerary(stages, 2, swapped=True)) == list(itinerary(stages, 1)) == list(range(stages))
    for a, b in swaps(stages):
        assert partner(a, stages) == b and partner(b, stages) == a
    assert partner(0, stages) is None and partner(stages - 1, stages) is None


def test_lost_inner_stages_are_left_out_up_to_a_third() -> None:
    assert itinerary(6, 0, lost=(2,)) == (0, 1, 3, 4, 5)
    assert itinerary(6, 0, lost=(3, 1, 4)) == (0, 2, 4, 5)
    assert itinerary(6, 0, lost=(0, 5)) == (0, 1, 2, 3, 4, 5)
    assert itinerary(2, 0, lost=(1,)) == (0, 1)


@given(st.integers(1, 12), st.integers(0, 9), st.booleans(), st.sets(st.integers(0, 11)))
def test_every_way_is_good_and_known(stages: int, serial: int, swapped: bool, lost: set[int]) -> None:
    way = itinerary(stages, serial, swapped=swapped, lost=sorted(lost))
    assert fault(way, stages) is None
    straight = itinerary(stages, serial, swapped=swapped)
    for a, b in itertools.pairwise(straight):
        assert b in successors(a, stages, swapped=swapped, skips=False)


@pytest.mark.parametrize("way", [(), (1, 2, 3), (0, 1, 2), (0, 1, 1, 3), (0, 7, 3), (0, 3)])
def test_bad_itineraries_are_told(way: tuple[int, ...]) -> None:
    assert fault(way, 4) is not None

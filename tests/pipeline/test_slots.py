"""Places at one replica: whoever works with it always finds one, whatever strangers and other callers take."""

from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.ids import PeerId
from swarmnode.train.pipeline.backlog import ACTIVE_S, WORKED_MIN, Slot, Slots

HONEST = PeerId("honest")
OTHER = PeerId("other")


def worked(slots: Slots, caller: PeerId, now_s: float = 0.0) -> None:
    for _ in range(WORKED_MIN):
        slots.record_work(caller, now_s)


def fill(slots: Slots, caller: PeerId, now_s: float = 0.0) -> list[Slot]:
    """What `caller` gets when it takes all it can."""
    taken = []
    while slots.refusal(1, caller, now_s) is None:
        taken.append(slots.take(1, caller))
    return taken


def test_a_caller_that_is_alone_gets_all_places() -> None:
    slots = Slots(8)
    worked(slots, HONEST)
    assert len(fill(slots, HONEST)) == 8
    assert "all 8 slots" in (slots.refusal(1, OTHER, 0.0) or "")
    assert slots.refusal(2, OTHER, 0.0) is None, "another position has its own"


def test_no_caller_takes_the_last_place_of_one_that_works_here() -> None:
    slots = Slots(8)
    worked(slots, HONEST)
    worked(slots, OTHER)
    assert len(fill(slots, OTHER)) == 7
    assert len(fill(slots, HONEST)) == 1


def test_strangers_together_get_half_of_the_places() -> None:
    """Sixteen keys that never had a microbatch go through hold four places of eight, and the caller that works here the
    others; an hour later, when nobody works here, they get all."""
    slots = Slots(8)
    worked(slots, HONEST)
    taken = [place for i in range(16) for place in fill(slots, PeerId(f"stranger {i}"))]
    assert len(taken) == 4
    assert len(fill(slots, HONEST)) == 4
    for place in taken:
        slots.give(place)
    assert len(fill(slots, PeerId("stranger 1"), ACTIVE_S + 1.0)) == 4, "all that are left"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans()), max_size=80))
def test_places_never_exceed_their_number_and_all_come_back(steps: list[tuple[str, int, bool]]) -> None:
    slots = Slots(4)
    held = list[Slot]()
    for step, (caller, position, give) in enumerate(steps):
        if give and held:
            place = held.pop(step % len(held))
            slots.give(place)
            slots.record_work(place.caller, float(step))
        elif slots.refusal(position, PeerId(caller), float(step)) is None:
            held.append(slots.take(position, PeerId(caller)))
        assert len(slots) == len(held)
        assert all(count <= 4 for count in slots.taken.values())
    for place in held:
        slots.give(place)
    assert not slots and not any(slots.taken.values())

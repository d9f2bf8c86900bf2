"""Whom a joiner asks for a state: by lot, whatever they announce."""

from __future__ import annotations

from collections import Counter

from swarmnode.ids import PeerId
from swarmnode.membership.swarm import Member, Swarm
from swarmnode.recovery.recovery_source import donors_of
from swarmnode.wire import record_pb2


def swarm(**speeds: float) -> Swarm:
    state = record_pb2.NODE_STATE_TRAINING
    return Swarm.of([Member(PeerId(name), 0, state, 1, 1e12, speed, 0, 0) for name, speed in speeds.items()], 1)


def test_to_announce_more_brings_nobody_forward() -> None:
    here = swarm(a=2.0, b=3.0, liar=1e9, c=2.5)
    first = Counter(donors_of(here, 0, PeerId(f"joiner{number}"))[0] for number in range(400))
    assert set(first) == {"a", "b", "c", "liar"} and max(first.values()) < 150


def test_a_joiner_asks_in_the_same_order_again_and_the_slow_last() -> None:
    here = swarm(a=2.0, b=3.0, slow=0.4, c=2.5, unknown=0.0)
    for number in range(50):
        found = donors_of(here, 0, PeerId(f"joiner{number}"))
        assert set(found[-2:]) == {"slow", "unknown"} and found == donors_of(here, 0, PeerId(f"joiner{number}"))
    assert donors_of(here, 0, PeerId("a")) == donors_of(swarm(b=3.0, slow=0.4, c=2.5, unknown=0.0), 0, PeerId("a"))
    assert donors_of(swarm(), 0, PeerId("a")) == ()

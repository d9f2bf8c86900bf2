"""Keys that only announce themselves count as replicas until they are found not to work."""

from __future__ import annotations

from dataclasses import replace

from swarmnode.ids import PeerId
from swarmnode.membership.swarm import Member, Swarm
from swarmnode.membership.trust import BelievedSwarm
from tests.support.records import member

ME = PeerId("me")


def at(stage: int, *names: str) -> list[Member]:
    return [replace(member(name), stage=stage) for name in names]


def swarm(keys: int) -> Swarm:
    flood = [one for stage in range(4) for one in at(stage, *[f"key {stage} {number:03}" for number in range(keys)])]
    honest = [*at(0, "a0", "b0"), *at(1, "me", "b1"), *at(2, "a2", "b2"), *at(3, "a3", "b3")]
    return Swarm.of([*honest, *flood], 4)


def test_records_are_believed_while_strangers_work() -> None:
    believed, seen = BelievedSwarm(ME, {PeerId("a2")}, lambda: [True, True], stages=4), swarm(100)
    assert not believed.doubtful and believed.of(seen, 1, (2,)) is seen


def test_else_those_count_that_were_seen_at_work_and_no_other_stage_counts_more() -> None:
    worked = {PeerId(name) for name in ("a0", "b1", "a2", "b2")}
    believed = BelievedSwarm(ME, worked, lambda: [True, False], stages=4)
    found = believed.of(swarm(100), 1, (2,))
    assert believed.doubtful and found.sizes == (1, 2, 2, 2)
    assert [m.peer for m in found.stages[1]] == ["b1", "me"]
    worked.add(PeerId("b0"))
    assert believed.of(swarm(100), 1, (2,)).sizes == (2, 2, 2, 2), "seen since"


def test_where_nobody_was_seen_at_work_yet_all_count() -> None:
    believed = BelievedSwarm(PeerId("feeder"), set(), lambda: [False], stages=4)
    assert believed.of(swarm(3), None, ()).sizes == (5, 5, 5, 5)

"""The book of records: the newest of every peer, all of our own stage, enough of crowded ones; and keys that only
announce themselves, which count as replicas until they are found not to work."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId, digest, seeded
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.peer_table import SPECIAL_MAX, PeerTable
from swarmnode.net.membership.record import check_record, remember, sign_record
from swarmnode.net.membership.swarm import Member, Swarm, shared
from swarmnode.net.membership.trust import BelievedSwarm
from tests.support.records import member

RUN = RunId("run")
CROWD = 8


def record(peer: str, stage: int, sequence: int = 1, **more: object) -> record_pb2.Record:
    state = record_pb2.NODE_STATE_TRAINING
    return record_pb2.Record(run_id=RUN, peer_id=peer, stage=stage, sequence=sequence, state=state, **more)  # type: ignore[arg-type]


def signed(number: int, stage: int, sequence: int = 1, **more: object) -> record_pb2.SignedRecord:
    identity = Identity.of_seed(digest("book", number))
    return sign_record(record(identity.peer_id, stage, sequence, **more), identity)


def look(peer_table: PeerTable, stage: int, found: list[record_pb2.SignedRecord], rng: random.Random) -> int:
    """As Presence.look does; how many records it had to read."""
    news = peer_table.news(stage, found, rng)
    for message in news:
        record = check_record(message, run_id=RUN)
        known = shared(message)
        peer_table.learn(record, known[2] if known is not None else None)
    return len(news)


def test_all_of_our_own_stage_and_enough_of_others() -> None:
    peer_table = PeerTable(2, crowd_max=CROWD)
    peer_table.attend(0)
    for number in range(20):
        assert peer_table.learn(record(f"a{number}", 0))
        assert peer_table.learn(record(f"b{number}", 1)) == (number < CROWD)
    swarm = peer_table.swarm()
    assert [len(stage) for stage in swarm.stages] == [20, CROWD]
    assert peer_table.learn(record("b3", 1, sequence=2)), "whom it knows it hears on"
    assert not peer_table.learn(record("b19", 1, sequence=2))
    assert peer_table.learn(record("b19", 1, kept_round=3)), "one that keeps a snapshot is always known"
    assert peer_table.learn(record("b18", 1, moving_to=0)), "and one that is about to move"
    peer_table.mark_dead(PeerId("b0"))
    peer_table.mark_dead(PeerId("b1"))
    peer_table.mark_dead(PeerId("b2"))
    assert peer_table.learn(record("b17", 1)), "there is room again"


def test_each_node_knows_others_of_a_crowd_and_reads_only_what_is_new() -> None:
    remember(2048)
    try:
        found = [signed(number, 1) for number in range(40)]
        known: Counter[PeerId] = Counter()
        for node in range(30):
            peer_table = PeerTable(2, crowd_max=CROWD)
            rng = seeded("book", node)
            look(peer_table, 1, found, rng)
            swarm = peer_table.swarm()
            assert len(swarm.stages[1]) == CROWD
            assert swarm.sizes == (0, 40)
            known.update(member.peer for member in swarm.stages[1])
            assert look(peer_table, 1, found, rng) == 0
            again = [signed(number, 1, sequence=2) for number in range(40)]
            look(peer_table, 1, again, rng)  # nobody in this process has verified these before
            assert {member.peer for member in peer_table.swarm().stages[1]} == {
                member.peer for member in swarm.stages[1]
            }
            assert {member.sequence for member in peer_table.swarm().stages[1]} == {2}
        assert len(known) > 30, "together they know nearly everybody"
        assert max(known.values()) < 20, "nobody is known to all"
        small = PeerTable(2, crowd_max=CROWD)
        look(small, 1, found[:CROWD], seeded("book"))
        assert small.swarm().sizes == (0, CROWD)
    finally:
        remember(2048)


def test_a_flood_of_keys_does_not_replace_those_seen_at_work() -> None:
    remember(0)  # as in a process of one node
    try:
        peer_table = PeerTable(2, crowd_max=CROWD)
        rng = seeded("book")
        working = [signed(number, 1, samples_per_second=1.0) for number in range(CROWD)]
        look(peer_table, 1, working, rng)
        worked = {member.peer for member in peer_table.swarm().stages[1]}
        peer_table.prefer(worked)
        keys = [signed(number, 1, samples_per_second=1.0) for number in range(CROWD, 40 * CROWD)]
        look(peer_table, 1, working + keys, rng)
        known = {member.peer for member in peer_table.swarm().stages[1]}
        assert len(known) == CROWD
        assert len(known & worked) == CROWD // 2, "half of the places stay open to others"
    finally:
        remember(2048)


def test_keys_that_say_they_keep_a_snapshot_are_bounded_too() -> None:
    peer_table = PeerTable(2, crowd_max=CROWD)
    peer_table.attend(0)
    for number in range(20 * CROWD):
        peer_table.learn(record(f"b{number}", 1, kept_round=3))
    assert len(peer_table.swarm().stages[1]) == SPECIAL_MAX * CROWD


@pytest.mark.node
@pytest.mark.parametrize("how", ["shared messages", "own messages"])
def test_early_and_late_peers_see_the_same_swarm(how: str) -> None:
    """A stage of 40 that fills up while 60 nodes look: each replica is known by about a fifth of them in the end."""
    found = [signed(number, 1, samples_per_second=1.0) for number in range(40)]
    remember(0 if how == "own messages" else 2048)
    known: Counter[PeerId] = Counter()
    try:
        for node in range(60):
            peer_table = PeerTable(2, crowd_max=CROWD)
            rng = seeded("lot", node)
            for count in (6, CROWD, 20, 40, 40):
                look(peer_table, 1, found[:count], rng)
            assert len(peer_table.swarm().stages[1]) == CROWD
            known.update(member.peer for member in peer_table.swarm().stages[1])
    finally:
        remember(2048)
    assert len(known) == 40 and max(known.values()) < 60 / 2, "at first six were all there are"


ME = PeerId("me")


def at(stage: int, *names: str) -> list[Member]:
    return [replace(member(name), stage=stage) for name in names]


def flooded(keys: int) -> Swarm:
    flood = [one for stage in range(4) for one in at(stage, *[f"key {stage} {number:03}" for number in range(keys)])]
    honest = [*at(0, "a0", "b0"), *at(1, "me", "b1"), *at(2, "a2", "b2"), *at(3, "a3", "b3")]
    return Swarm.of([*honest, *flood], 4)


def test_records_are_believed_while_strangers_work() -> None:
    believed = BelievedSwarm(ME, {PeerId("a2")}, lambda: True, stages=4)
    seen = flooded(100)
    assert not believed.doubtful and believed.of(seen, 1, (2,)) is seen


def test_else_those_count_that_were_seen_at_work_and_no_other_stage_counts_more() -> None:
    worked = {PeerId(name) for name in ("a0", "b1", "a2", "b2")}
    believed = BelievedSwarm(ME, worked, lambda: False, stages=4)
    found = believed.of(flooded(100), 1, (2,))
    assert believed.doubtful and found.sizes == (1, 2, 2, 2)
    assert [m.peer for m in found.stages[1]] == ["b1", "me"]
    worked.add(PeerId("b0"))
    assert believed.of(flooded(100), 1, (2,)).sizes == (2, 2, 2, 2), "seen since"


def test_all_count_before_anybody_was_seen_at_work() -> None:
    believed = BelievedSwarm(PeerId("feeder"), set(), lambda: False, stages=4)
    assert believed.of(flooded(3), None, ()).sizes == (5, 5, 5, 5)

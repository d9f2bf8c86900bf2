"""The ladder of ways to a stage's state, against its words; keepers and builders agreed on by everybody; whom a joiner
asks for a state."""

from collections import Counter
from dataclasses import replace

import pytest

from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.neighbour_backup import renewal, to_keep
from swarmnode.keep.recovery.recovery_source import (
    CLAIM_WAIT_S,
    LOST_WAIT_S,
    NEIGHBOUR_WAIT_S,
    RETURN_WAIT_S,
    AfterFailure,
    RecoveryClaims,
    RecoverySource,
    RecoveryView,
    SourceFailures,
    StateSource,
    best_first,
    choose_source,
    donors_of,
    first_builder,
    keeps,
    latest,
    quiet,
    silent,
)
from swarmnode.keep.transfer.snapshot import SLOW, WHOLE, StateSlice
from swarmnode.net.membership.liveness import TRIES
from swarmnode.net.membership.swarm import Member, Swarm
from swarmnode.run.manifest import LimitsSpec, RecoverySpec
from tests.support.sections import SECTIONS

RUN = RunId("ab" * 32)
SPEC = RecoverySpec(snapshot_rounds_max=16)
A = PeerId("a")
B = PeerId("b")
C = PeerId("c")
LOST = RecoveryView(stage=1, stages=4, samples_total=1000, round_now=20, below=True, above=True)
ALIVE = StateSource(RecoverySource.REPLICA, 20, A)
JOINING = record_pb2.NODE_STATE_JOINING
SYNCING = record_pb2.NODE_STATE_SYNCING
TRAINING = record_pb2.NODE_STATE_TRAINING


def member(peer: str, stage: int = 1, state: record_pb2.NodeState = TRAINING, **fields: object) -> Member:
    given: dict[str, object] = {"expires_unix_s": 100.0} | fields
    return Member(PeerId(peer), stage, state, 1, samples_per_second=1.0, queue=0, round_index=0, **given)  # type: ignore[arg-type]


def kept(round_index: float, keeper: PeerId = B) -> StateSource:
    return StateSource(RecoverySource.RING, round_index, keeper)


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({"samples_total": 0}, RecoverySource.FRESH),
        ({"samples_total": 0, "has_base": True}, RecoverySource.BASE),
        ({"round_now": 0, "has_base": True}, RecoverySource.BASE),
        ({"has_base": True}, RecoverySource.BASE),
        ({"has_base": True, "below": False}, RecoverySource.BASE),
        ({"has_base": True, "sources": (kept(20),)}, RecoverySource.RING),
        ({"has_base": True, "sources": (ALIVE,)}, RecoverySource.REPLICA),
        ({"has_base": True, "failed": frozenset({RecoverySource.BASE})}, RecoverySource.CHECKFREE),
        (
            {
                "has_base": True,
                "ends": (),
                "round_now": 2,
                "waited_s": NEIGHBOUR_WAIT_S,
                "failed": frozenset({RecoverySource.BASE}),
            },
            RecoverySource.STOP,
        ),
        ({"sources": (ALIVE,)}, RecoverySource.REPLICA),
        ({"unsure": 1, "sources": (kept(20), ALIVE)}, RecoverySource.REPLICA),
        ({"unsure": 1, "sources": (kept(20),)}, RecoverySource.WAIT),
        # A replica that announces itself, and that nobody can call, holds nobody up for longer than a minute.
        ({"unsure": 1, "sources": (kept(20),), "waited_s": 61.0}, RecoverySource.RING),
        ({"unsure": 1, "sources": (StateSource(RecoverySource.OWN, 18),), "waited_s": 61.0}, RecoverySource.OWN),
        ({"builder": B, "sources": (kept(20),)}, RecoverySource.WAIT),
        ({"settled": False, "sources": (kept(20),)}, RecoverySource.WAIT),
        ({"sources": (kept(20),)}, RecoverySource.RING),
        ({"sources": (kept(4),)}, RecoverySource.RING),
        ({"sources": (kept(3),)}, RecoverySource.CHECKFREE),
        ({"failed": frozenset({RecoverySource.RING}), "sources": (kept(20),)}, RecoverySource.CHECKFREE),
        ({"sources": (kept(18), StateSource(RecoverySource.DISK, 18))}, RecoverySource.DISK),
        ({"sources": (kept(18), StateSource(RecoverySource.DISK, 17))}, RecoverySource.RING),
        ({"sources": (kept(18.5), StateSource(RecoverySource.DISK, 18.25))}, RecoverySource.RING),
        ({"sources": (kept(18.25), StateSource(RecoverySource.DISK, 18.5))}, RecoverySource.DISK),
        (
            {"failed": frozenset({RecoverySource.RING}), "sources": (kept(18), StateSource(RecoverySource.DISK, 17))},
            RecoverySource.DISK,
        ),
        # A paused replica has it, but its state could not be had.
        ({"asleep": "a"}, RecoverySource.WAIT),
        ({"asleep": "a", "waited_s": 61.0}, RecoverySource.CHECKFREE),
        ({"asleep": "a", "waited_s": 1e3, "above": False}, RecoverySource.WAIT),
        ({"asleep": "a", "waited_s": 1e3, "returning": True, "above": False}, RecoverySource.WAIT),
        ({"asleep": "a", "sources": (kept(20, A),)}, RecoverySource.RING),
        # This replica comes back from a pause with a state of its own.
        ({"sources": (StateSource(RecoverySource.OWN, 18),)}, RecoverySource.OWN),
        ({"samples_total": 0, "claimed": 900, "sources": (StateSource(RecoverySource.OWN, 0),)}, RecoverySource.OWN),
        ({"sources": (StateSource(RecoverySource.OWN, 18), ALIVE)}, RecoverySource.REPLICA),
        ({"unsure": 1, "sources": (StateSource(RecoverySource.OWN, 18),)}, RecoverySource.WAIT),
        ({"builder": B, "sources": (kept(18), StateSource(RecoverySource.OWN, 18))}, RecoverySource.OWN),
        ({"sources": (kept(19), StateSource(RecoverySource.OWN, 18))}, RecoverySource.RING),
        ({"sources": (kept(2), StateSource(RecoverySource.OWN, 1))}, RecoverySource.RING),
        (
            {"failed": frozenset({RecoverySource.RING}), "sources": (kept(19), StateSource(RecoverySource.OWN, 18))},
            RecoverySource.OWN,
        ),
        ({}, RecoverySource.CHECKFREE),
        ({"round_now": 0}, RecoverySource.FRESH),
        ({"round_now": 0, "unsure": 1}, RecoverySource.WAIT),
        ({"above": False}, RecoverySource.WAIT),
        ({"above": False, "waited_s": 1e3}, RecoverySource.STOP),
        ({"above": False, "waited_s": 1e3, "sources": (kept(20),)}, RecoverySource.RING),
        ({"stage": 0, "ends": (C,), "below": False}, RecoverySource.CHECKFREE),
        ({"stage": 0, "ends": (), "below": False, "waited_s": 1.0}, RecoverySource.WAIT),
        ({"stage": 0, "ends": (), "below": False, "waited_s": 1e3}, RecoverySource.CHECKFREE),
        ({"stage": 0, "ends": (), "below": False, "above": False, "waited_s": 1e3}, RecoverySource.STOP),
        # Also in the first rounds: who held the stage may be behind a cut, or come back.
        ({"stage": 0, "ends": (), "below": False, "round_now": 4}, RecoverySource.WAIT),
        ({"stage": 0, "ends": (), "below": False, "round_now": 4, "waited_s": 61.0}, RecoverySource.CHECKFREE),
        ({"stage": 3, "ends": (C,), "above": False}, RecoverySource.CHECKFREE),
        ({"failed": frozenset({RecoverySource.CHECKFREE})}, RecoverySource.STOP),
        ({"stage": 0, "stages": 1, "below": False, "above": False, "waited_s": 1e3}, RecoverySource.STOP),
    ],
)
def test_the_ladder(changes: dict[str, object], source: RecoverySource) -> None:
    found, reason = choose_source(replace(LOST, **changes), SPEC)  # type: ignore[arg-type]
    assert found is source and reason


def test_one_rule_orders_sources() -> None:
    """First a replica that serves, then copies by round, at one round those that cost no link, then the archive."""
    old = [StateSource(kind, 7.0) for kind in (RecoverySource.CHECKPOINT, RecoverySource.PIECES, RecoverySource.DISK)]
    others = [StateSource(RecoverySource.ARCHIVE, 30.0, C), kept(7.0, A), kept(8.5, B), kept(7.0, C), *old]
    found = best_first([*others, StateSource(RecoverySource.REPLICA, 6.0, A)])
    assert [(source.kind.value, source.round, source.place) for source in found] == [
        ("replica", 6.0, A),
        ("ring", 8.5, B),
        ("disk", 7.0, None),
        ("ring", 7.0, A),
        ("ring", 7.0, C),
        ("pieces", 7.0, None),
        ("checkpoint", 7.0, None),
        ("archive", 30.0, C),
    ]
    failed = frozenset({RecoverySource.RING})
    assert replace(LOST, sources=tuple(found), failed=failed).of(RecoverySource.RING, RecoverySource.DISK) == [found[2]]


def test_what_failed_decides_the_next_step_of_a_restore() -> None:
    view = replace(LOST, sources=(kept(20), kept(19, C), ALIVE))
    failures = SourceFailures()
    assert failures.record(RecoverySource.RING, view) is AfterFailure.AGAIN
    assert failures.copies == {(20, B), (19, C)} and not failures.kinds, "a later copy may come"
    assert failures.record(RecoverySource.DISK, view) is AfterFailure.AGAIN and failures.kinds == {RecoverySource.DISK}
    assert failures.record(RecoverySource.PIECES, view) is AfterFailure.LATER, "those that hold them are on the way"
    failures.record(RecoverySource.PIECES, replace(view, waited_s=LOST_WAIT_S))
    assert RecoverySource.PIECES in failures.kinds
    stands = [failures.record(RecoverySource.REPLICA, view) for _ in range(TRIES)]
    assert stands == [AfterFailure.AGAIN] * (TRIES - 1) + [AfterFailure.OTHERS] and failures.over
    failures = SourceFailures()
    for total in range(TRIES):
        advances = failures.record(RecoverySource.REPLICA, replace(view, samples_total=total))
        assert advances is AfterFailure.AGAIN, "its replicas train"
    assert failures.over


def test_without_checkfree_only_snapshots_count() -> None:
    spec = RecoverySpec(method="none")
    assert choose_source(LOST, spec)[0] is RecoverySource.STOP
    assert choose_source(replace(LOST, sources=(kept(20),)), spec)[0] is RecoverySource.RING
    assert choose_source(replace(LOST, asleep="a", waited_s=1e4), spec)[0] is RecoverySource.WAIT


def test_the_earliest_joiner_builds() -> None:
    members = (member("a", state=JOINING, joined_unix_s=5.0), member("b", state=JOINING, joined_unix_s=3.0))
    assert first_builder(members, {A}, B) is None
    assert first_builder(members, {B}, A) == B
    assert first_builder(members, set(), A) is None, "who does not answer does not build"
    assert first_builder((*members, member("c", state=SYNCING)), {A, C}, B) == C, "it has the state already"
    assert first_builder((), set(), A) is None


def test_a_silent_replica_is_asked_after_two_periods_and_gone_after_three() -> None:
    limits = LimitsSpec(announce_period_s=2.0, record_ttl_s=15.0)
    signed_s = 100.0 - limits.record_ttl_s
    assert silent((member("a"),), set(), signed_s + 5.9, limits) == 1
    assert silent((member("a"),), set(), signed_s + 6.1, limits) == 0
    assert silent((member("a"),), {A}, signed_s, limits) == 0
    assert silent((member("a", state=JOINING),), set(), signed_s, limits) == 0
    others = member("b", expires_unix_s=101.0), member("c", state=JOINING)
    assert quiet((member("a"), *others), signed_s + 3.9, limits) == []
    assert quiet((member("a"), *others), signed_s + 4.1, limits) == [A]


def test_keepers_are_of_the_stage_before_and_the_same_for_all() -> None:
    swarm = Swarm.of([member(peer, stage) for peer, stage in zip("abcdef", (0, 1, 1, 1, 2, 2), strict=True)], 3)
    chosen = [PeerId(peer) for peer in "abcdef" if keeps(swarm, 2, RUN, 2, PeerId(peer))]
    assert len(chosen) == 2 and set(chosen) <= {"b", "c", "d"}
    assert {peer for peer in "abcdef" if keeps(swarm, 0, RUN, 5, PeerId(peer))} == {"e", "f"}
    me = chosen[0]
    assert renewal(swarm, 2, me, RUN, SPEC, 5)[0]
    assert not renewal(swarm, 2, me, RUN, SPEC, 0)[0], "before the first round there is nothing to lose"
    assert not renewal(swarm, 2, PeerId("a"), RUN, SPEC, 5)[0]


SIZES = dict.fromkeys(SECTIONS, 1000)


def test_a_budget_decides_what_is_kept() -> None:
    assert to_keep(12_000, SIZES, (0, 100))[0] == WHOLE
    assert to_keep(11_999, SIZES, (900, 100))[0] == StateSlice(SLOW.sections, 900, 100)
    assert to_keep(11_999, SIZES, (0, 0))[0] is None
    assert to_keep(399, SIZES, (0, 100))[0] is None


@pytest.mark.parametrize("state", [JOINING, SYNCING])
def test_a_claim_to_build_ends_where_nothing_comes_of_it(state: record_pb2.NodeState) -> None:
    limits = LimitsSpec(announce_period_s=2.0)
    claims = RecoveryClaims(limits, 0)
    stage = (member("a", state=state, joined_unix_s=1.0), member("b", state=state))
    assert claims.builder(stage[:1], {A}, C, 100.0) == A
    assert claims.builder(stage[:1], {A}, C, 106.0) == A
    assert claims.builder(stage[:1], {A}, C, 106.1) is None
    claims = RecoveryClaims(limits, 10**7)
    assert claims.builder(stage[:1], {A}, C, 200.0) == A and claims.builder(stage[:1], {A}, C, 210.0) == A
    assert claims.builder(stage[:1], {A}, C, 216.0) is None, "ten megabytes take ten seconds more at a home"


def test_few_of_many_claims_in_a_row_are_waited_for() -> None:
    claims = RecoveryClaims(LimitsSpec(announce_period_s=2.0), 0)
    others = tuple(member(f"x{number:02}", state=JOINING, joined_unix_s=float(number)) for number in range(40))
    answering = {m.peer for m in others}
    at = 0.0
    while claims.builder(others, answering, C, at) is not None:
        at += 1.5
        assert at <= TRIES * 6.0 + 1.5


def test_no_snapshot_is_of_the_future_and_the_latest_comes_first() -> None:
    kept = [(19.9, A), (2.0**52, B), (20.0, C), (20.5, B)]
    assert latest(kept, 21) == [(20.5, B), (20.0, C), (19.9, A)]
    assert latest(kept, 20) == [(20.0, C), (19.9, A)] and latest([], 5) == []


def test_a_run_that_somebody_remembers_is_not_begun_from_the_seed() -> None:
    alone = RecoveryView(stage=1, stages=4, samples_total=0, round_now=0)
    assert choose_source(alone, RecoverySpec())[0] is RecoverySource.FRESH, "nobody knows a sample"
    source, why = choose_source(replace(alone, claimed=4640), RecoverySpec())
    assert source is RecoverySource.WAIT and "4640 samples" in why
    late = replace(alone, claimed=4640, waited_s=CLAIM_WAIT_S)
    assert choose_source(late, RecoverySpec())[0] is RecoverySource.FRESH, "a lone lie holds nobody up for ever"
    assert choose_source(replace(alone, unanswered=True), RecoverySpec())[0] is RecoverySource.WAIT, "it may not know"
    assert choose_source(replace(late, unanswered=True), RecoverySpec())[0] is RecoverySource.FRESH
    little = replace(alone, claimed=4, little=True, waited_s=RETURN_WAIT_S)
    assert choose_source(replace(little, waited_s=0.0), RecoverySpec())[0] is RecoverySource.WAIT
    assert choose_source(little, RecoverySpec())[0] is RecoverySource.FRESH, "no copy of them was ever made"
    here = replace(alone, claimed=4640, samples_total=4600, round_now=30, sources=(ALIVE,))
    assert choose_source(here, RecoverySpec())[0] is RecoverySource.REPLICA


def announcing(**speeds: float) -> Swarm:
    state = record_pb2.NODE_STATE_TRAINING
    return Swarm.of([Member(PeerId(name), 0, state, 1, 1e12, speed, 0, 0) for name, speed in speeds.items()], 1)


def test_to_announce_more_brings_nobody_forward() -> None:
    here = announcing(a=2.0, b=3.0, liar=1e9, c=2.5)
    first = Counter(donors_of(here, 0, PeerId(f"joiner{number}"))[0] for number in range(400))
    assert set(first) == {"a", "b", "c", "liar"} and max(first.values()) < 150


def test_a_joiner_asks_in_the_same_order_again_and_the_slow_last() -> None:
    here = announcing(a=2.0, b=3.0, slow=0.4, c=2.5, unknown=0.0)
    for number in range(50):
        found = donors_of(here, 0, PeerId(f"joiner{number}"))
        assert set(found[-2:]) == {"slow", "unknown"} and found == donors_of(here, 0, PeerId(f"joiner{number}"))
    assert donors_of(here, 0, PeerId("a")) == donors_of(announcing(b=3.0, slow=0.4, c=2.5, unknown=0.0), 0, PeerId("a"))
    assert donors_of(announcing(), 0, PeerId("a")) == ()

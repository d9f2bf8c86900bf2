"""Who moves where: against a dumb twin that tries everything, and whole histories that must come to rest."""

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.ids import PeerId
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.swarm import Member, Swarm
from swarmnode.train.pipeline.rebalance import (
    AWAY_S,
    EQUAL,
    LASTS_S,
    RebalanceRules,
    StageMove,
    choose_stage,
    load,
    on_the_way,
    pause_ahead_s,
    plan_move,
    staying,
    still_good,
    worth_it,
)

pytestmark = pytest.mark.node  # some seconds

TRAINING = record_pb2.NODE_STATE_TRAINING


def member(name: int, stage: int, speed: float, **more: object) -> Member:
    given = {"state": TRAINING, "sequence": 1, "expires_unix_s": 1e12, "queue": 0, "round_index": 0} | more
    return Member(peer=PeerId(f"peer{name:04}"), stage=stage, samples_per_second=speed, **given)  # type: ignore[arg-type]


def swarm_of(members: list[Member], stages: int) -> Swarm:
    return Swarm.of(members, stages)


def moved(members: list[Member], move: StageMove, costs: list[float]) -> list[Member]:
    """The members once `move` is over."""
    return [
        dataclasses.replace(
            m, stage=move.target, samples_per_second=m.samples_per_second * costs[move.source] / costs[move.target]
        )
        if m.peer == move.peer
        else m
        for m in members
    ]


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[Member], list[float]]:
    stages = draw(st.integers(2, 5))
    speeds = draw(st.lists(st.floats(0.5, 20.0), min_size=stages, max_size=24))
    slots = [draw(st.integers(0, stages - 1)) for _ in speeds]
    costs = [draw(st.floats(0.5, 2.0)) for _ in range(stages)]
    return [member(i, s, v) for i, (s, v) in enumerate(zip(slots, speeds, strict=True))], costs


@given(fleets(), st.floats(1.0, 2.0), st.integers(1, 3))
def test_a_swarm_of_constant_speeds_comes_to_rest(
    given: tuple[list[Member], list[float]], ratio: float, min_keep: int
) -> None:
    """No thrash: each move lifts the weaker of two stages, so none is taken back, and they end."""
    members, costs = given
    rules = RebalanceRules(ratio, min_keep)
    stages = len(costs)
    for _ in range(20 * len(members) * stages):
        move, reason = plan_move(swarm_of(members, stages), costs, rules)
        assert reason
        if move is None:
            break
        before = load(swarm_of(members, stages), costs)
        members = moved(members, move, costs)
        after = load(swarm_of(members, stages), costs)
        pair = (move.source, move.target)
        if not move.safety and all(before.replicas):
            lifted = min(after.capacity[s] for s in pair) / min(before.capacity[s] for s in pair)
            assert lifted >= 0.999 * (1 + rules.gain_min)
        assert after.replicas[move.source] >= (min_keep if all(before.replicas) else 1)
    else:
        raise AssertionError("still moving")


@given(fleets(), st.floats(1.0, 2.0), st.integers(1, 3))
def test_the_plan_is_the_best_of_all_moves(
    given: tuple[list[Member], list[float]], ratio: float, min_keep: int
) -> None:
    members, costs = given
    stages = len(costs)
    now = load(swarm_of(members, stages), costs)
    move, _ = plan_move(swarm_of(members, stages), costs, RebalanceRules(ratio, min_keep))
    if not all(now.replicas):
        able = [m for m in members if now.replicas[m.stage] > 1]  # a gap stops the run: all but the last may go
        assert (move is not None) == bool(able)
        assert move is None or not now.replicas[move.target]
        return
    thin = [s for s in range(stages) if now.replicas[s] == min(now.replicas) < min_keep]
    weakest = min(thin or range(stages), key=lambda s: now.capacity[s])
    spare = [s for s in range(stages) if s != weakest and now.replicas[s] > min_keep]
    if thin:  # safety before speed: whoever can be spared goes
        assert (move is not None) == bool(spare)
        assert move is None or (move.safety and move.target == weakest and worth_it(move, 1e9)[0])
        assert move is None or still_good(swarm_of(members, stages), costs, move, RebalanceRules(ratio, min_keep))[0]
        return
    best = 0.0
    least = (1 + RebalanceRules(ratio, 1).gain_min) * now.capacity[weakest]
    for m in members:
        if m.stage not in spare or now.capacity[m.stage] <= ratio * now.capacity[weakest] * EQUAL:
            continue
        gets = now.capacity[weakest] + m.samples_per_second * costs[m.stage] / costs[weakest]
        after = min(gets, now.capacity[m.stage] - m.samples_per_second)
        worth = (after - now.capacity[weakest]) * LASTS_S - (gets - now.capacity[weakest]) * AWAY_S
        if worth > 0.0 and after >= least and after > now.capacity[weakest] * EQUAL:
            best = max(best, after)
    if move is None:
        assert best == 0.0
    else:
        assert move.target == weakest and math.isclose(move.after, best)
        for m in members:  # who asks for itself moves itself, or names the best
            own, _ = plan_move(swarm_of(members, stages), costs, RebalanceRules(ratio, min_keep), m.peer)
            if m.stage not in spare or now.capacity[m.stage] <= ratio * now.capacity[weakest] * EQUAL:
                assert own is None, "another stage gives"
                continue
            assert own is not None and own.peer in (m.peer, move.peer)
            assert own.after >= (1.0 - RebalanceRules(ratio, min_keep).gain_min / 4.0) * move.after - 1e-9
        assert still_good(swarm_of(members, stages), costs, move, RebalanceRules(ratio, min_keep))[0]


@given(fleets(), st.randoms(use_true_random=False))
def test_measured_speeds_that_tremble_do_not_send_a_node_to_and_fro(
    given: tuple[list[Member], list[float]], rng: random.Random
) -> None:
    """With two percent of noise on every speed, a node is never sent straight back where it came from."""
    moves = moves_of_a_trembling_fleet(*given, rng)
    for last, move in itertools.pairwise(moves):
        assert (move.peer, move.target) != (last.peer, last.source)


def moves_of_a_trembling_fleet(members: list[Member], costs: list[float], rng: random.Random) -> list[StageMove]:
    """The moves of 40 plans, each of them followed, with two percent of noise on every speed."""
    moves: list[StageMove] = []
    for _ in range(40):
        told = [
            dataclasses.replace(m, samples_per_second=m.samples_per_second * (0.99 + 0.02 * rng.random()))
            for m in members
        ]
        move, _ = plan_move(swarm_of(told, len(costs)), costs, RebalanceRules(1.1, 1))
        if move is not None:
            moves.append(move)
            members = moved(members, move, costs)
    return moves


def test_a_node_on_its_way_counts_where_it_goes() -> None:
    """Everybody sees it coming: a second one does not follow it."""
    fleet = [member(0, 0, 4.0), member(1, 0, 4.0), member(2, 0, 4.0), member(3, 1, 4.0), member(4, 1, 0.1)]
    move, reason = plan_move(swarm_of(fleet, 2), [1.0, 1.0], RebalanceRules(1.5, 1))
    assert move is not None and move.source == 0 and "stage 2 is the slowest" in reason
    going = [dataclasses.replace(m, moving_to=1) if m.peer == move.peer else m for m in fleet]
    assert plan_move(swarm_of(going, 2), [1.0, 1.0], RebalanceRules(1.5, 1))[0] is None
    stage, _ = choose_stage(swarm_of(going, 2), [1.0, 1.0], RebalanceRules(1.1, 1), random.Random(0))
    assert stage == 0, "a joiner: two stay here, three will be there, speeds alike"


def test_an_empty_stage_comes_first() -> None:
    fleet = [member(i, i % 2, 1.0 + i) for i in range(6)]
    move, reason = plan_move(swarm_of(fleet, 3), [1.0] * 3, RebalanceRules(100.0, 2))
    assert move is not None and move.target == 2 and "is empty" in reason
    fleet = moved(fleet, move, [1.0] * 3)
    assert plan_move(swarm_of(fleet, 3), [1.0] * 3, RebalanceRules(100.0, 1))[0] is None
    second, reason = plan_move(swarm_of(fleet, 3), [1.0] * 3, RebalanceRules(100.0, 2))
    assert second is not None and second.target == 2 and "1 of 2 replicas" in reason
    assert plan_move(swarm_of(moved(fleet, second, [1.0] * 3), 3), [1.0] * 3, RebalanceRules(100.0, 2))[0] is None
    one_each = [member(i, i, 1.0) for i in range(2)]
    assert plan_move(swarm_of(one_each, 3), [1.0] * 3, RebalanceRules(1.1, 1))[0] is None, "min_keep holds"


def test_too_few_replicas_come_before_speed() -> None:
    """One fast replica at stage 1 outruns three slow ones at stage 0, and is one death from nothing."""
    fleet = [*(member(i, 0, 1.0) for i in range(3)), member(3, 1, 50.0)]
    stage, reason = choose_stage(swarm_of(fleet, 2), [1.0, 1.0], RebalanceRules(1.1, 2), random.Random(0))
    assert stage == 1 and "1 of the 2 replicas" in reason
    move, reason = plan_move(swarm_of(fleet, 2), [1.0, 1.0], RebalanceRules(1.1, 2))
    assert move is not None and move.safety and (move.source, move.target) == (0, 1) and "1 of 2 replicas" in reason
    assert still_good(swarm_of(fleet, 2), [1.0, 1.0], move, RebalanceRules(1.1, 2))[0]
    after = moved(fleet, move, [1.0, 1.0])
    assert not still_good(swarm_of([*after, member(4, 1, 1.0)], 2), [1.0, 1.0], move, RebalanceRules(1.1, 2))[0], (
        "another came"
    )
    assert plan_move(swarm_of(after, 2), [1.0, 1.0], RebalanceRules(1.1, 2))[0] is None, "and rests there"


def test_a_move_that_the_download_eats_up_is_not_made() -> None:
    move = StageMove(PeerId("p"), 0, 1, before=1.0, after=2.0, speed=1.0)
    assert worth_it(move, 60.0)[0]
    good, reason = worth_it(move, LASTS_S)
    assert not good and "download" in reason


def test_joiners_spread_over_stages_that_are_alike() -> None:
    fleet = [member(i, i % 3, 5.0) for i in range(9)]
    chosen = {
        choose_stage(swarm_of(fleet, 3), [1.0] * 3, RebalanceRules(1.1, 2), random.Random(seed))[0]
        for seed in range(20)
    }
    assert chosen == {0, 1, 2}


def test_a_replica_about_to_pause_does_not_count_for_a_joiner() -> None:
    now = 1e9
    fleet = [member(i, i % 2, 5.0, pauses_unix_s=int(now + 60) if i % 2 == 0 else 0) for i in range(6)]
    chosen, reason = choose_stage(
        staying(swarm_of(fleet, 2), now), [1.0, 1.0], RebalanceRules(1.1, 1), random.Random(1)
    )
    assert chosen == 0 and "no replica" in reason
    assert staying(swarm_of(fleet, 2), now - LASTS_S) == swarm_of(fleet, 2), "in half an hour and more"


def test_a_spare_goes_where_the_only_replica_is_about_to_pause_or_has_paused() -> None:
    now = 1e9
    rules = RebalanceRules(1.1, 1)
    others = [member(1, 1, 5.0), member(2, 1, 5.0)]
    awake = [member(0, 0, 5.0, pauses_unix_s=int(now + 300)), *others]
    assert plan_move(staying(swarm_of(awake, 2), now, 120.0), [1.0, 1.0], rules)[0] is None, "in five minutes"
    assert pause_ahead_s(swarm_of(awake, 2), now, 120.0) == 180.0, "then it is time to look"
    soon, _ = plan_move(staying(swarm_of(awake, 2), now + 181, 120.0), [1.0, 1.0], rules)
    assert soon is not None and (soon.source, soon.target, soon.before) == (1, 0, 0.0)
    paused = record_pb2.NODE_STATE_PAUSED
    for goes in (None, 0):  # one that paused on its way to the stage does not come
        asleep = [member(0, 0 if goes is None else 1, 5.0, state=paused, moving_to=goes), *others]
        move, reason = plan_move(swarm_of(asleep, 2), [1.0, 1.0], rules)
        assert move is not None and move.target == 0 and "is empty" in reason


def test_a_crowd_keeps_its_size_without_those_that_pause() -> None:
    now = 1e9
    known = [member(i, 0, 5.0, pauses_unix_s=int(now + 60) if i < 5 else 0) for i in range(10)]
    crowd = Swarm.frozen([tuple(known), (member(10, 1, 5.0),)], sizes=[1000, 1])
    left = staying(crowd, now)
    assert [*map(len, left.stages)] == [5, 1] and left.sizes == (500, 1), "the known ones stand for all"


def test_every_node_names_the_same_mover() -> None:
    fleet = [member(i, 0 if i < 8 else 1, 1.0 + i % 3) for i in range(12)]
    plans = {
        plan_move(swarm_of(list(order), 2), [1.0, 1.0], RebalanceRules(1.1, 2))[0] for order in (fleet, fleet[::-1])
    }
    assert len(plans) == 1 and None not in plans


def test_a_stage_that_can_spare_one_replica_gives_only_the_best() -> None:
    """Two who look at the same time must not both think that they will do."""
    costs = (1.0, 1.0, 1.0)
    rules = RebalanceRules(1.1, 2)
    pair = [member(0, 0, 5.0), member(1, 2, 10.0), member(2, 2, 9.9)]
    best, _ = plan_move(swarm_of(pair, 3), costs, rules)
    assert best is not None and best.target == 1 and best.source == 2
    for me in (1, 2):
        found, _ = plan_move(swarm_of(pair, 3), costs, rules, PeerId(f"peer{me:04}"))
        assert found == best
    found, _ = plan_move(swarm_of([*pair, member(3, 2, 9.8)], 3), costs, rules, PeerId("peer0003"))
    assert found is not None and found.peer == "peer0003", "of three any that is nearly as good"


def test_known_members_stand_for_a_crowd() -> None:
    """All 120 of our own stage are known and 60 of 120 of the other: neither is stronger."""
    crowd = [member(n, 0, 1.0) for n in range(120)] + [member(200 + n, 1, 1.0) for n in range(60)]
    swarm = Swarm.of(crowd, 2)
    swarm = Swarm.frozen(swarm.stages, sizes=(0, 120))
    assert load(swarm, (1.0, 1.0)).capacity == (120.0, 120.0)
    assert load(swarm, (1.0, 1.0)).replicas == (120, 120)
    assert plan_move(swarm, (1.0, 1.0), RebalanceRules(1.02, 2))[0] is None
    assert plan_move(Swarm.of(crowd, 2), (1.0, 1.0), RebalanceRules(1.02, 2))[0] is not None


def test_no_move_before_a_joiner_has_measured_itself() -> None:
    joining = record_pb2.NODE_STATE_JOINING
    fleet = [member(i, i % 2, 1.0) for i in range(8)]
    unknown = swarm_of([*fleet, member(8, 1, 0.0, state=joining)], 2)
    now = load(unknown, [1.0, 1.0])
    assert now.capacity == (4.0, 5.0) and now.sure == (4.0, 4.0)
    assert plan_move(unknown, [1.0, 1.0], RebalanceRules(1.02, 2))[0] is None
    known = swarm_of([*fleet, member(8, 1, 2.0, state=joining)], 2)
    assert plan_move(known, [1.0, 1.0], RebalanceRules(1.02, 2))[0] is not None


def test_no_replica_leaves_a_stage_while_its_relief_joins() -> None:
    fleet = [member(0, 0, 4.0, moving_to=2), member(1, 0, 4.0), member(2, 1, 1.0), member(3, 2, 0.5)]
    assert plan_move(swarm_of(fleet, 3), [1.0] * 3, RebalanceRules(1.1, 1))[0] is None
    arrived = [member(0, 2, 4.0), *fleet[1:]]
    move, _ = plan_move(swarm_of(arrived, 3), [1.0] * 3, RebalanceRules(1.1, 1))
    assert move is not None and (move.peer, move.target) == ("peer0003", 1)


def test_a_look_is_due_when_somebody_sets_out_or_tells_its_speed() -> None:
    joining = record_pb2.NODE_STATE_JOINING
    fleet = [member(i, i % 2, 1.0) for i in range(6)]
    before = on_the_way(swarm_of(fleet, 2))
    assert before == ()
    for more in ({"moving_to": 0}, {"state": joining, "samples_per_second": 0.0}, {"state": joining}):
        changed = swarm_of([*fleet[:5], dataclasses.replace(fleet[5], **more)], 2)  # type: ignore[arg-type]
        assert on_the_way(changed) not in ((), before)
    crowd = swarm_of([member(i, i % 2, 1.0, moving_to=0) for i in range(80)], 2)
    assert on_the_way(crowd) == (), "one more or less matters little there"


def test_no_machine_is_sent_to_a_stage_it_cannot_serve() -> None:
    rules = RebalanceRules(1.1, 1)
    rng = random.Random(0)
    fleet = [member(0, 1, 4.0), member(1, 1, 4.0), member(2, 2, 4.0), member(3, 2, 4.0)]
    for unable, allowed in ({}, {0}), ({0}, {1, 2}), ({0, 1}, {2}):
        assert choose_stage(swarm_of(fleet, 3), [1.0] * 3, rules, rng, unable)[0] in allowed
    best, _ = plan_move(swarm_of(fleet, 3), [1.0] * 3, rules)
    assert best is not None and best.target == 0, "stage 0 is empty"
    mine = [dataclasses.replace(m, unable=frozenset({0})) if m.peer == best.peer else m for m in fleet]
    other, _ = plan_move(swarm_of(mine, 3), [1.0] * 3, rules)
    assert other is not None and other.peer != best.peer and other.target == 0, "somebody else's machine can"
    assert plan_move(swarm_of(mine, 3), [1.0] * 3, rules, best.peer)[0] is None or best.source != other.source
    none = [dataclasses.replace(m, unable=frozenset({0})) for m in fleet]
    assert plan_move(swarm_of(none, 3), [1.0] * 3, rules)[0] is None

"""Who answers at once, or announces what it likes, does not get the work of its stage; a faster machine gets more."""

import dataclasses
import heapq
import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest

from swarmnode.base.ids import PeerId
from swarmnode.net.membership.swarm import Member, Swarm
from swarmnode.run.manifest import ModelSpec
from swarmnode.train.pipeline.believed_rate import (
    ANNOUNCED_MAX,
    FASTEST_FLOP_PER_S,
    bounded,
    evened,
    lowest,
    possible_s,
    witnessed,
)
from swarmnode.train.pipeline.route import Router
from tests.support.records import member
from tests.support.village import manifest

AT_ONCE_S = 1e-3


def fleet(
    router: Router, seconds: dict[str, float], under_way: int, calls: int = 4000, at_once: frozenset[str] = frozenset()
) -> tuple[dict[str, float], float]:
    """(each replica's share of the microbatches, microbatches a second) of a stage whose replicas need so many
    `seconds` for each, while `under_way` are; those `at_once` answer however many they have."""
    shares = Counter[str]()
    free = dict.fromkeys(seconds, 0.0)
    ends = [(0.0, serial, "", 0.0) for serial in range(under_way)]
    serial = itertools.count(under_way)
    now = 0.0
    for _ in range(calls):
        now, _, done, begun = heapq.heappop(ends)
        if done:
            router.record_answer(PeerId(done), 1, now - begun)
        peer, _ = router.choose(now, 1)
        assert peer is not None
        shares[peer] += 1
        start = now if peer in at_once else max(now, free[peer])
        free[peer] = start + seconds[peer]
        heapq.heappush(ends, (free[peer], next(serial), peer, now))
    return {peer: count / calls for peer, count in shares.items()}, calls / now


def stage(replicas: int, announced: float = 0.0) -> tuple[list[Member], dict[str, float]]:
    """`replicas` that need a second, of which the last answers at once and announces so many samples a second."""
    names = [f"replica{i}" for i in range(replicas - 1)] + ["liar"]
    members = [member(name, samples_per_second=announced if name == "liar" else 1.0) for name in names]
    return members, {name: AT_ONCE_S if name == "liar" else 1.0 for name in names}


@pytest.mark.parametrize("announced", [1.0, 1e9])
@pytest.mark.parametrize(("replicas", "most"), [(3, 0.55), (20, 0.13)])
def test_an_instant_replica_gets_its_share_and_not_all(replicas: int, most: float, announced: float) -> None:
    """It had 93 % of the work of three replicas, 90 % of that of twenty."""
    router = Router(random.Random(1))
    members, seconds = stage(replicas, announced)
    router.update(members)
    shares, _ = fleet(router, seconds, replicas // 2, at_once=frozenset({"liar"}))
    assert shares["liar"] <= most, shares


@pytest.mark.parametrize(("fast", "confirmed"), [(2.0, 0), (5.0, 8), (20.0, 16), (50.0, 20)])
def test_a_machine_that_is_really_faster_gets_what_it_can_do(fast: float, confirmed: int) -> None:
    """Three usual machines and one so many times as fast, kept busy by three microbatches for each: the stage does what
    its machines can do together, and the fast one its part; where it is far faster, once its answers were checked."""
    router = Router(random.Random(2), epsilon=0.0, confirmed=lambda peer: confirmed if peer == "fast" else 0)
    seconds = {"fast": 1.0 / fast, "a": 1.0, "b": 1.0, "c": 1.0}
    router.update([member(name, samples_per_second=1.0 / one) for name, one in seconds.items()])
    shares, throughput = fleet(router, seconds, 12)
    assert throughput / (3.0 + fast) > 0.9, throughput
    assert shares["fast"] > 0.85 * fast / (3.0 + fast), shares


def test_a_machine_far_faster_than_usual_is_not_believed_before_it_was_checked() -> None:
    """Of twenty replicas with room to spare one is fifty times as fast: two usual shares, then more and more."""
    shares = []
    for confirmed in (0, 4, 8, 20):
        router = Router(random.Random(4), epsilon=0.0, confirmed=Counter(liar=confirmed).__getitem__)
        members, seconds = stage(20)
        router.update(members)
        shares.append(fleet(router, seconds | {"liar": 0.02}, 10)[0]["liar"])
    assert shares[0] == pytest.approx(2 / 21, abs=0.03)
    assert shares == sorted(shares) and shares[-1] > 0.6, shares


def test_an_impossible_speed_counts_as_the_usual_one() -> None:
    """The arithmetic takes half a second on any device: an answer sooner earns no more than a usual one."""
    router = Router(random.Random(5), epsilon=0.0, possible_s=0.5)
    members, seconds = stage(5)
    router.update(members)
    shares, _ = fleet(router, seconds, 2, at_once=frozenset({"liar"}))
    assert shares["liar"] == pytest.approx(0.2, abs=0.03), shares


def test_the_least_time_is_of_the_arithmetic_of_a_stage() -> None:
    """A layer of 4096 with a context of 2048: 3 times 453 million operations for each of 2048 tokens."""
    model = ModelSpec(layers=3, width=4096, heads=32, kv_heads=8, ffn=14336, context=2048, vocabulary=50)
    run = dataclasses.replace(manifest(3), model=model)
    assert possible_s(run, 1) == pytest.approx(3 * 2048 * 4.53e8 / FASTEST_FLOP_PER_S, rel=0.02)


def test_the_low_tenth_of_times_drawn_evenly() -> None:
    draw = random.Random(6)
    low = 0.0
    for _ in range(2000):
        low = lowest(low, draw.uniform(1.0, 2.0))
    assert low == pytest.approx(1.1, abs=0.1)


def test_a_false_announcement_counts_as_a_few_machines_and_alone_as_no_more_than_the_next() -> None:
    """Four replicas of each of two stages, alike, and at stage 1 a key that announces a billion samples a second."""
    fleet_of = [member(f"a{i}", samples_per_second=10.0) for i in range(4)] + [member("liar", samples_per_second=1e9)]
    swarm = Swarm.of([*fleet_of, *(replace(m, peer=PeerId(f"b{m.peer}"), stage=0) for m in fleet_of[:4])], 2)
    costs = (1.0, 2.0)
    believed = bounded(swarm, costs)
    told = {m.peer: m.samples_per_second for m in believed.stages[1]}
    assert told[PeerId("liar")] == ANNOUNCED_MAX * 20.0 / 2.0, "of the median of work: 20 at stage 1, at twice the cost"
    assert [m.samples_per_second for m in believed.stages[0]] == [10.0] * 4
    assert {m.samples_per_second for m in evened(swarm, 1).stages[1]} == {10.0}
    assert bounded(believed, costs) is believed, "who announces no more than that is left alone"
    alone = Swarm.of(fleet_of[:1], 2)
    assert evened(alone, 1) is alone and evened(alone, 0) is alone


def test_demand_tells_whether_a_stage_is_as_fast_as_announced() -> None:
    """A stage that says it does 40 samples a second is asked for 10; a replica that is asked for half of its own speed
    does not believe it."""
    assert witnessed(0.25, 10.0, 40.0)[0] and witnessed(0.37, 10.0, 40.0)[0]
    assert not witnessed(0.5, 10.0, 40.0)[0]
    assert witnessed(0.5, 10.0, 0.0)[0], "nobody says anything"

"""A partition heals: the part that trained less takes the other's state, and all that counts is in some weights."""

from dataclasses import replace as less

import pytest

from swarmnode.base.ids import PeerId, seeded
from swarmnode.net.membership.peer_table import PeerTable
from swarmnode.net.membership.progress import Progress
from swarmnode.net.membership.run_progress import RunProgress, TrainedApart
from swarmnode.run.manifest import Manifest
from swarmsim.law import Laws
from swarmsim.learned import LearnedSamples
from swarmsim.life import simulate
from swarmsim.outcome import Outcome
from swarmsim.scenario import FaultSpec, find, read_scenario
from swarmsim.world import World
from tests.support.fake_telemetry import Quiet
from tests.support.records import member
from tests.support.village import LoopClock

LIVES = 6  # of `make nightly`; CI lives the first one
KINDS = ("partition", "one_way", "bridge", "meeting_point_gone")


def live(seconds: float, count: int, share: float, kind: str = "partition", seed: int = 3) -> tuple[Outcome, World]:
    """A life in which `share` of `count` machines are cut off from the others for `seconds`, or all from the meeting
    point, where then two join."""
    scenario = read_scenario(find("stage-extinction"))
    worlds = list[World]()
    manifest = scenario.manifest
    manifest = less(
        manifest,
        pipeline=less(manifest.pipeline, stages=2),
        inner=less(manifest.inner, inner_batch=16),
        gossip=less(manifest.gossip, round_samples=max(16, count), round_seconds_min=0.0),
        limits=less(manifest.limits, announce_period_s=2.0, record_ttl_s=15.0),
    )
    scenario = less(
        scenario,
        manifest=manifest,
        seconds=100.0 + seconds,
        work_factor=scenario.work_factor * max(1.0, count / 6),  # as many rounds and events as of six
        join_s=10.0,
        fleet=tuple(less(kind, count=count) for kind in scenario.fleet),
        faults={kind: FaultSpec(at_s=(40.0,), seconds=seconds, share=share, count=2)},
        bounds=less(scenario.bounds, window_s=20.0, throughput=0.2),
    )
    outcome = simulate(scenario, seed, look=worlds.append)
    return outcome, worlds[0]


@pytest.mark.parametrize(("count", "share"), [(6, 0.34), pytest.param(4, 0.5, marks=pytest.mark.nightly)])
def test_the_part_that_trained_less_takes_the_state_of_the_other(count: int, share: float) -> None:
    outcome, world = live(60.0, count, share)
    assert not outcome.failures, outcome.failures
    assert world.trace.by_event["progress.in_vain"] == 2, "one part gives way, and not the other, too"
    assert world.trace.by_event["recovery.done"] >= 1


@pytest.mark.timeout(3600)  # number 8 is 41 s of a core, and at a load of 20 the machine gives a twentieth of one
@pytest.mark.parametrize("number", [pytest.param(n, marks=[pytest.mark.nightly] * (n > 0)) for n in range(LIVES)])
def test_swarms_of_any_size_become_one_again_within_a_minute_and_count_nothing_twice(number: int) -> None:
    """3 to 100 machines, 1 s to 10 min, every kind of cut, drawn evenly in the logarithm."""
    rng = seeded("parts", number)
    size = rng.random()
    seconds = 600.0 ** rng.random()
    share = rng.uniform(0.1, 0.5)
    kind = KINDS[number % len(KINDS)]
    count = round(3 * (100 / 3) ** (size if number > 1 else 0.2 * size))
    outcome, _ = live(seconds if number > 1 else min(30.0, seconds), count, share, kind, seed=number)
    assert not outcome.failures, (kind, count, seconds, share, outcome.failures)


def test_blocks_of_a_stopped_feeder_pass_to_its_part() -> None:
    table = PeerTable(2)
    quiet = Quiet()
    nodes = [
        RunProgress(Manifest(), PeerId(me), table, Progress(PeerId(me)), LoopClock(), quiet, print, print)
        for me in ("a", "b", "c")
    ]
    told = {name: less(member(name), feeds=True, owed=owed) for name, owed in (("a", 500), ("b", 0), ("c", 64))}
    for node in nodes:
        node.in_vain = TrainedApart(600, 900, 0)
        node._inherit()
    for each in told.values():
        table._keep(None, each)
    for node in nodes:
        node._inherit()
    table.forget(PeerId("a"))
    for node in nodes:
        node._inherit()
    assert [node.owed for node in nodes] == [0, 0, 500], "b owed nothing, so it may be of the other part"


def test_keys_that_owe_and_vanish_leave_no_more_than_was_trained_in_vain() -> None:
    table = PeerTable(2)
    node = RunProgress(Manifest(), PeerId("c"), table, Progress(PeerId("c")), LoopClock(), Quiet(), print, print)
    node.in_vain = TrainedApart(600, 900, 100)
    table._keep(None, less(member("c"), feeds=True, owed=64))
    for number in range(20):
        key = f"key{number}"
        table._keep(None, less(member(key), feeds=True, owed=1 << 50))
        node._inherit()
        table.forget(PeerId(key))
        node._inherit()
    assert node.owed == 500, "honest samples count again after these"


def test_a_count_that_no_weights_have_breaks_a_law() -> None:
    laws = Laws()
    laws.learned = LearnedSamples()
    for mark, replica in enumerate([1, 1, 2]):
        laws.counted(replica, 0, mark, 8)
    laws.boundary(2, 0, 1)
    laws.counted(2, 0, 7, 8)
    laws.in_weights(32, {0: [1, 2]}, 0)
    laws.applied(1, 0, 1, [(2, 1)])
    laws.in_weights(24, {0: [1]}, 0)
    assert not laws.broken
    laws.loaded(2, 1)  # what it learned since its packet is lost
    laws.in_weights(32, {0: [1, 2]}, 7)
    assert [one.law for one in laws.broken] == ["no sample is counted twice"]

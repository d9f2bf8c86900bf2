"""Everything dies at once, the disk lies and fills up, all leave, the meeting point is gone: the run goes on where it
was saved, as one swarm."""

import dataclasses

import pytest

from swarmnode.keep.recovery.recovery_source import CLAIM_WAIT_S
from swarmsim.law import Laws
from swarmsim.life import simulate
from swarmsim.outcome import Outcome
from swarmsim.scenario import FaultSpec, find, read_scenario
from swarmsim.world import World

FLEET = [{"count": 6, "flops": 1e10, "up_mbps": 1000, "down_mbps": 1000}]


def live(seed: int, **changes: object) -> tuple[Outcome, World]:
    """A life of the scenario blackout, and its world."""
    seen: list[World] = []
    scenario = dataclasses.replace(read_scenario(find("blackout")), **changes)  # type: ignore[arg-type]
    outcome = simulate(scenario, seed, look=seen.append)
    return outcome, seen[0]


def test_a_swarm_that_died_goes_on_from_what_is_whole() -> None:
    faults = read_scenario(find("blackout")).faults
    earlier = dataclasses.replace(faults["blackout"], at_s=(70.0, 170.0))
    outcome, world = live(2, faults={**faults, "blackout": earlier}, seconds=230.0, work_factor=5.0)
    assert not outcome.failures, outcome.failures
    assert len(world.resumed) == 2 and 0 < world.resumed[0] < world.resumed[1]
    assert world.trace.by_event["checkpoint.saved"] > 10
    last = max(sim_node.node.samples_total() for sim_node in world.nodes if sim_node.node is not None)
    assert last > world.resumed[1], "the counter goes on"


def test_killed_all_at_once_a_run_goes_on_from_what_its_members_had_saved_themselves() -> None:
    faults = {"blackout": FaultSpec(at_s=(100.0,), count=1 << 20, back_s=20.0)}
    fleet = tuple(dataclasses.replace(kind, count=6) for kind in read_scenario(find("blackout")).fleet)
    outcome, world = live(4, faults=faults, seconds=180.0, fleet=fleet, checkpoints=False)
    assert not outcome.failures, outcome.failures
    assert not world.trace.by_event["checkpoint.saved"] and world.trace.by_event["state.saved"] >= 6
    assert world.trace.by_event["state.fresh"] == 6, "all began once"


@pytest.mark.nightly
def test_without_a_checkpoint_it_begins_anew_and_says_so() -> None:
    """The homes remember that the run was trained."""
    faults = {"blackout": FaultSpec(at_s=(40.0,), count=1 << 20, back_s=20.0)}
    fleet = tuple(dataclasses.replace(kind, count=6) for kind in read_scenario(find("blackout")).fleet)
    outcome, world = live(4, faults=faults, seconds=80.0 + CLAIM_WAIT_S, fleet=fleet)
    assert not outcome.failures, outcome.failures
    assert world.resumed == [0]


def survive(seconds: float, **faults: FaultSpec) -> Outcome:
    scenario = read_scenario(find("stage-extinction"))
    return simulate(dataclasses.replace(scenario, seconds=seconds, faults=faults), 3)


@pytest.mark.nightly  # two minutes; test_killed_all_at_once is its worst hour
def test_a_short_weekend() -> None:
    outcome = survive(
        520.0,
        everyone_leaves=FaultSpec(at_s=(100.0,), seconds=30.0, back_s=30.0),
        meeting_point_gone=FaultSpec(at_s=(280.0,), seconds=30.0, count=2),
        stage_lost=FaultSpec(at_s=(420.0,), stage=2, back_s=30.0),
    )
    assert outcome.struck["everyone_leaves"] == 12 and outcome.struck["stage_lost"] >= 1
    assert not outcome.failures, outcome.failures


def test_a_run_that_begins_again_breaks_a_law_and_so_does_a_replica_left_behind() -> None:
    laws = Laws()
    laws.began("n0", 0, "the first")
    for _ in range(60):
        laws.behind({"n0": 0, "n1": 17}, 16)
    laws.behind({"n0": 0, "n1": 3}, 16)
    laws.behind({"n0": 0, "n1": 17}, 16)
    assert not laws.broken
    laws.began("n0", 100, "nobody answers")
    for _ in range(60):
        laws.behind({"n0": 0, "n1": 17}, 16)
    assert [one.law for one in laws.broken] == ["a run never begins again", "who serves is with the run"]

"""All leave and come back, the meeting point dies: the run goes on where it was, as one swarm."""

import dataclasses

from swarmsim.law import Laws
from swarmsim.life import simulate
from swarmsim.outcome import Outcome
from swarmsim.scenario import FaultSpec, find, read_scenario


def live(seconds: float, **faults: FaultSpec) -> Outcome:
    scenario = read_scenario(find("stage-extinction"))
    return simulate(dataclasses.replace(scenario, seconds=seconds, faults=faults), 3)


def test_a_short_weekend() -> None:
    outcome = live(
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

"""The daemon's own recovery in virtual time: whole stages die at once in the storm, and the run finds its way back."""

import dataclasses
from collections import Counter

import pytest

from swarmnode.metrics import name
from swarmsim.life import simulate
from swarmsim.scenario import find, read_scenario, shorter
from swarmsim.world import World


@pytest.mark.nightly  # tests/node/test_lost_stage.py and the storm have lost stages in each push
@pytest.mark.parametrize(("stage", "keepers", "methods"), [(0, 2, {"ring"}), (1, 0, {"checkfree"}), (3, 2, {"ring"})])
def test_a_lost_stage_is_brought_back_by_one_and_copied_by_the_others(
    stage: int, keepers: int, methods: set[str]
) -> None:
    scenario = shorter(read_scenario(find("stage-extinction")), 150.0)
    manifest = dataclasses.replace(
        scenario.manifest,
        gossip=dataclasses.replace(scenario.manifest.gossip, round_samples=512),
        recovery=dataclasses.replace(scenario.manifest.recovery, keepers=keepers),
    )
    fault = dataclasses.replace(scenario.faults["stage_lost"], stage=stage, at_s=(70.0,))
    fleet = tuple(dataclasses.replace(kind, count=8) for kind in scenario.fleet)
    scenario = dataclasses.replace(scenario, manifest=manifest, fleet=fleet, faults={"stage_lost": fault})
    found: Counter[str] = Counter()

    def look(world: World) -> None:
        for method in ("replica", "ring", "disk", "checkfree", "fresh"):
            found[method] = int(world.trace.total(name.RECOVERIES, method))

    outcome = simulate(scenario, 5, look=look)
    assert not outcome.failures, outcome.failures
    assert outcome.struck["stage_lost"] >= 2
    brought = {method: count for method, count in found.items() if count and method != "replica"}
    assert brought == dict.fromkeys(methods, 1), found
    assert found["replica"] >= 1, "the others copied it"

"""Swarms of real processes learn with each outer method that `init` chooses or papers made known, and CheckFree
rebuilds a stage of theirs that died out."""

import dataclasses
import math
import signal
from pathlib import Path

import pytest

from benchmarks.swarm import laws
from benchmarks.swarm.harness import SwarmHarness, fleet_in, resting, trains
from swarmnode.app.local.child import Child
from swarmnode.app.local.summary import totals
from swarmnode.app.planner.plan_search import with_values
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.recipe import PRESETS

BOUND_S = 240.0  # for one condition, on a machine that others load
LEARNED = math.log(256) - 0.7  # nats: a guess among 256 bytes has log 256
# What these methods need beside their name: they meet all members.
WAYS: dict[str, dict[str, float | str]] = {
    "diloco": {"group": 0},
    "gradient": {"group": 0, "codec": "int8", "round_samples": PRESETS["tiny"].inner.inner_batch},
}


def run_with(method: str) -> Manifest:
    tiny = PRESETS["tiny"]
    ways = WAYS.get(method, {})
    return with_values(tiny, method=method, **ways)


def met(child: Child) -> int:
    """Outer steps of a node with at least one other."""
    return len(laws.told(child.plan.home, "exchange.paired"))


@pytest.mark.parametrize("method", ["average", "gradient", "noloco", "diloco"])
async def test_a_swarm_of_processes_learns_with_the_method(method: str, tmp_path: Path) -> None:
    fleet = fleet_in(tmp_path, run_with(method), 4, command=resting, cache=tmp_path / "cache")
    swarm = SwarmHarness(fleet, BOUND_S)

    def learned() -> bool:
        loss = totals(fleet.facts()).loss_validation
        return loss is not None and loss < LEARNED

    async with swarm.running():
        await swarm.until(lambda: all(met(child) >= 2 for child in fleet.nodes), "all have met others twice")
        await swarm.until(learned, f"the held-out loss is below {LEARNED:.2f}")
    if method != "gradient":  # a packet that comes late counts where it is in time: its members' weights heal
        assert laws.broken([child.plan.home for child in fleet.nodes]) == []
    assert swarm.left_running() == []


@pytest.mark.nightly
async def test_processes_rebuild_a_stage_from_its_neighbours_weighted_by_gradients(tmp_path: Path) -> None:
    tiny = PRESETS["tiny"]
    run = dataclasses.replace(
        tiny,
        pipeline=dataclasses.replace(tiny.pipeline, stages=3),
        recovery=dataclasses.replace(tiny.recovery, method="weighted", keepers=0),
    )
    fleet = fleet_in(tmp_path, run, 5, command=resting, cache=tmp_path / "cache", stage_of=(0, 0, 1, 2, 2))
    swarm = SwarmHarness(fleet, BOUND_S)
    async with swarm.running():
        await swarm.progress(256, "from the start")
        (victim,) = swarm.training(1)
        victim.signal(signal.SIGKILL)
        await swarm.until(lambda: not victim.alive, "the only replica of stage 1 is gone")
        await fleet.replace(victim)

        def rebuilt() -> bool:
            return any(
                done["method"] == "weighted"
                for child in fleet.alive
                for done in laws.told(child.plan.home, "recovery.done")
            )

        await swarm.until(rebuilt, "a node has rebuilt stage 1 from its neighbours")
        await swarm.until(lambda: trains(fleet.nodes[-1]), "the newcomer trains")
        await swarm.progress(128, "with the rebuilt stage")
    assert swarm.left_running() == []

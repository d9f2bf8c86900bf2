"""Nodes are killed and restart with their keys, many times in virtual time: no honest node is called a forger."""

from dataclasses import replace

import pytest

from swarmsim.life import simulate
from swarmsim.scenario import FaultSpec, find, read_scenario
from swarmsim.world import World

EVERY_S = 8.0


@pytest.mark.nightly  # tests/node/test_same_home.py has restarts in each push
@pytest.mark.parametrize("kills", [20, 50])
def test_kills_and_restarts_make_nobody_a_forger(kills: int) -> None:
    calm = read_scenario(find("calm"))
    crash = FaultSpec(at_s=tuple(EVERY_S * (1 + n) for n in range(kills)), back_s=3.0)
    bounds = replace(calm.bounds, throughput=0.0)
    repeats: list[float] = []

    def look(world: World) -> None:
        repeats.append(world.trace.total("swarmnode_microbatches_total", "duplicate"))

    life = simulate(replace(calm, seconds=EVERY_S * (kills + 2), faults={"crash": crash}, bounds=bounds), 1, look=look)
    assert life.failures == [], life.last_events
    assert life.struck["crash"] >= 0.9 * kills, "some strike a stage's last replica, and are left out"
    print(life.struck, repeats)

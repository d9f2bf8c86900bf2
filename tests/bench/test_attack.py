"""The table of attackers: each entry is one that the harness can run, and a swarm with one ends in a row."""

import pytest

from benchmarks.attack import swarm, table
from benchmarks.attack.lying_replica import ALL, HONEST, PLANT, STEER, Planting, Steering
from benchmarks.attack.swarm import SwarmLife
from swarmnode.app.daemon.clock import SystemClock
from swarmnode.base.errors import UsageError


@pytest.mark.parametrize("name", table.ATTACKERS)
def test_an_entry_is_an_attacker_that_can_be_run(name: str) -> None:
    one = table.ATTACKERS[name]
    kind = one.lie.split()[0]
    if kind in (STEER, PLANT):
        (Steering if kind == STEER else Planting).of(one.lie)
    else:
        assert one.lie in (*ALL, HONEST) or 0.0 < float(one.lie.split()[1]) < 1.0
    for count in one.replicas:
        for method in one.methods:
            without, with_it = table.lives_of(name, count, method, 1000, 0)
            assert without.lie is None and with_it.lie == one.lie
            fleet = [sum(kind.count for kind in swarm.scenario_of(life).fleet) for life in (without, with_it)]
            assert fleet == [fleet[1] - 1, count * swarm.PLACES[one.place][1]]


def test_a_liar_in_a_swarm_is_out_and_nobody_honest_is_blamed() -> None:
    row = swarm.live(SwarmLife("flip", "last", 2, "average", 256, 0))
    assert row["out"] == 1.0 and row["honest blamed"] == 0 and 0 < row["lies until out"] < 60, row


def test_unknown_attackers_are_refused_before_anything_runs() -> None:
    for names, methods, replicas in ((["flop"], [], []), (["flip"], ["gossip"], []), (["flip"], [], [1])):
        with pytest.raises(UsageError):
            table.run(names, replicas, methods, 512, 1, SystemClock(), lambda line: None)

"""Goodput at a size of seconds: which deaths, what counts, and a life that has one."""

from __future__ import annotations

import itertools

import pytest

from swarmnode.bench.swarm import goodput
from swarmnode.bench.swarm.goodput import POLICIES, RATES, GoodputRun, draw, live, moments, table
from swarmnode.simulation.outcome import CurvePoint, Outcome


def test_a_higher_rate_has_all_deaths_of_a_lower_one() -> None:
    found = [moments(3, "machines", rate, 12, 50.0) for rate in RATES]
    assert found[0] == ()
    for fewer, more in itertools.pairwise(found):
        assert set(fewer) < set(more)
    assert len(found[-1]) == pytest.approx(0.33 * 12 * 50, rel=0.3)


def test_what_a_roll_back_makes_again_does_not_count_twice() -> None:
    def at(second: float, samples: float) -> CurvePoint:
        return CurvePoint(second, samples, 0, 0, 0, 0, 0, {}, [], {}, 0, 0)

    outcome = Outcome("x", 0, 1, curve=[at(0, 0), at(100, 1000), at(200, 2000)])
    assert goodput._repeated(outcome, [], []) == 0
    assert goodput._repeated(outcome, [50.0], [400]) == 100
    # The counter goes on from 400 at 50 s and stands at 900 at 100 s: the second roll-back begins anew.
    assert goodput._repeated(outcome, [50.0, 100.0], [400, 0]) == 100 + 900
    assert goodput._repeated(outcome, [50.0, 199.0], [400]) == 100, "the end came before it was resumed"


def test_a_life_and_its_page() -> None:
    lived = live(GoodputRun("snapshots", 0.33, 5, 0.15))
    assert not lived["failures"] and lived["samples"] > 0 and lived["repeated"] == 0
    lives = [
        {**lived, "policy": policy, "rate": rate, "samples": 100.0 * (1 - rate), "repeated": 0.0}
        for policy in POLICIES
        for rate in RATES
        if rate or policy == "snapshots"
    ]
    rows = table(lives)
    assert [row["checkpoint"] for row in rows] == [1.0, 0.95, 0.9, 0.84, 0.67]
    page = draw(rows)
    assert page.count("<polyline") == len(POLICIES) and all(policy in page for policy in POLICIES)

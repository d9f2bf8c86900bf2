import math

import pytest

from benchmarks.swarm.learning import BoundedNumber, at, efficiency, envelope, needed, smoothed
from swarmnode.ids import seeded

CURVE = [(100.0, 4.0), (1000.0, 3.0), (10_000.0, 2.0)]  # a nat a decade


def test_nats_are_linear_in_the_logarithm_of_the_cost():
    assert at(CURVE, 100.0) == 4.0 and at(CURVE, 10_000.0) == 2.0
    assert at(CURVE, math.sqrt(1e5)) == pytest.approx(3.5)
    assert at(CURVE, 99.0) == at(CURVE, 10_001.0) == at([], 5.0) == math.inf


def test_samples_needed_invert_the_curve():
    for nats in (3.9, 3.0, 2.5, 2.1):
        cost = needed(CURVE, nats)
        assert cost.bound == "" and at(CURVE, cost.value) == pytest.approx(nats)
    assert needed(CURVE, 4.0) == BoundedNumber(100.0) and needed(CURVE, 2.0).value == pytest.approx(10_000.0)
    assert needed(CURVE[:1], 4.0) == BoundedNumber(100.0)


def test_values_outside_a_curve_are_bounds():
    assert needed(CURVE, 4.5) == BoundedNumber(100.0, "<")
    assert needed(CURVE, 1.9) == BoundedNumber(10_000.0, ">")
    assert math.isnan(needed([], 3.0).value)
    assert str(needed(CURVE, 1.9)) == "> 10,000" and str(needed([], 3.0)) == "–"


def test_efficiency_is_what_plain_needs_over_what_the_swarm_needed():
    assert efficiency(CURVE, 2000.0, 3.0) == BoundedNumber(pytest.approx(0.5))  # type: ignore[arg-type]
    assert efficiency(CURVE, 500.0, 3.0) == BoundedNumber(pytest.approx(2.0))  # type: ignore[arg-type]
    assert efficiency(CURVE, 5000.0, 1.0) == BoundedNumber(2.0, ">")
    assert efficiency(CURVE, 50.0, 5.0) == BoundedNumber(2.0, "<")


def test_an_envelope_takes_the_best_of_each_cost_and_never_rises():
    quick = [(100.0, 3.0), (1000.0, 2.9), (10_000.0, 2.95)]
    slow = [(100.0, 4.0), (10_000.0, 2.0), (20_000.0, 2.1)]
    found = envelope([quick, slow])
    assert found == [(100.0, 3.0), (1000.0, 2.9), (10_000.0, 2.0), (20_000.0, 2.0)]
    assert envelope([]) == []


def test_smoothing_takes_the_noise_of_single_looks_away():
    chance = seeded("noise", 1)
    costs = [1000.0 + 10 * i for i in range(100)]
    noisy = [(cost, 4.0 - math.log10(cost) + chance.gauss(0.0, 0.1)) for cost in costs]
    errors = [nats - (4.0 - math.log10(cost)) for cost, nats in smoothed(noisy)]
    assert max(map(abs, errors)) < 0.06
    assert errors[-1] == pytest.approx(0.0, abs=0.05)  # the end, too

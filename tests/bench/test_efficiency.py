import math

import pytest

from benchmarks.swarm.learning import BoundedNumber, envelope, needed, smoothed
from swarmnode.base.ids import seeded

CURVE = [(100.0, 4.0), (1000.0, 3.0), (10_000.0, 2.0)]  # a nat a decade


def test_values_outside_a_curve_are_bounds():
    assert needed(CURVE, 4.5) == BoundedNumber(100.0, "<")
    assert needed(CURVE, 1.9) == BoundedNumber(10_000.0, ">")
    assert math.isnan(needed([], 3.0).value)
    assert str(needed(CURVE, 1.9)) == "> 10,000" and str(needed([], 3.0)) == "–"


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

"""Run many lives, one after the other, to search for a seed that breaks a law."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

from swarmsim.life import simulate
from swarmsim.outcome import Outcome
from swarmsim.scenario import Scenario

OF_MESSAGES = ("record left out", "record stale", "look-up failed")
"""Permanent imperfections of the directory are not counted as faults."""


@dataclass(slots=True)
class SweepTotals:
    """Sums over all lives."""

    lives: int = 0
    faults: int = 0
    laws_checked: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    broken: list[int] = field(default_factory=list)


def faults_of(outcome: Outcome) -> int:
    """Number of injected faults, without those of directory look-ups and without spared victims."""
    left_out = (*OF_MESSAGES, "spared", "gave up", "break on the way there")
    return sum(count for kind, count in outcome.struck.items() if kind not in left_out)


def sweep(
    scenario: Scenario, seed: int, going_on: Callable[[SweepTotals], bool], broken: Callable[[Outcome], None]
) -> SweepTotals:
    """Run lives of `scenario` from `seed` upwards, at least one, while `going_on` of the sums is true. `broken` is
    called with each life that broke a law or did not recover."""
    swept = SweepTotals()
    while swept.lives == 0 or going_on(swept):
        outcome = simulate(scenario, seed + swept.lives)
        swept.lives += 1
        swept.faults += faults_of(outcome)
        swept.laws_checked += outcome.laws_checked
        swept.virtual_s += outcome.virtual_s
        swept.cpu_s += outcome.cpu_s
        if outcome.failures:
            swept.broken.append(outcome.seed)
            broken(outcome)
        gc.collect()
    return swept

"""Many lives, one after the other: the search for a seed that breaks a law."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

from swarmnode.simulation.outcome import Outcome
from swarmnode.simulation.scenario import Scenario
from swarmnode.simulation.world import simulate

OF_MESSAGES = ("record left out", "record stale", "look-up failed")
"""What the directory does all the time is not counted as a fault."""


@dataclass(slots=True)
class Swept:
    """Sums over all lives."""

    lives: int = 0
    faults: int = 0
    laws_checked: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    broken: list[int] = field(default_factory=list)


def faults_of(outcome: Outcome) -> int:
    """Injected failures, those of the directory's look-ups and spared victims left out."""
    left_out = (*OF_MESSAGES, "spared", "gave up", "break on the way there")
    return sum(count for kind, count in outcome.struck.items() if kind not in left_out)


def sweep(scenario: Scenario, seed: int, going_on: Callable[[Swept], bool], broken: Callable[[Outcome], None]) -> Swept:
    """Lives of `scenario` from `seed` upwards for as long as `going_on` says of what there was; at least one. `broken`
    is told of each that broke a law or did not come back."""
    swept = Swept()
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

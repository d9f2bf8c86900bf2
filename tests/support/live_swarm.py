"""A swarm of real processes."""

import itertools
from pathlib import Path

from benchmarks.swarm.harness import SwarmHarness, fleet_in, resting
from swarmnode.app.local.fleet import Command
from swarmnode.run.manifest.recipe import PRESETS

BOUND_S = 150.0  # for one condition, on a machine that others load


def swarm_in(folder: Path, nodes: int = 4, command: Command = resting) -> SwarmHarness:
    """Nodes in two stages, and the bounds within which they must do what is waited for."""
    return SwarmHarness(fleet_in(folder, PRESETS["tiny"], nodes, command=command, cache=folder / "cache"), BOUND_S)


def settled(validations: list[list[float]], since: float) -> float:
    """The samples from which on the swarm measures the same loss, three times at least, later than at `since`; 0
    before. On a busy machine the replicas of a stage may step alone for some rounds, and are not equal as soon as the
    learning rate is 0."""
    last = [(at, loss) for at, _, loss in validations if at > since]
    same = list(itertools.takewhile(lambda found: abs(found[1] - last[-1][1]) < 2e-4, reversed(last)))
    return same[-1][0] if len(same) >= 3 else 0.0

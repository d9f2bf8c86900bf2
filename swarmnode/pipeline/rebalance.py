"""Which stage a node should serve. Pure; SWARM's rule (arXiv 2301.11913, section 3.2): help the weakest stage."""

from __future__ import annotations

import random

from swarmnode.membership.swarm import Swarm

Reason = str
ALIKE = 1.5  # guess: speeds are measured on busy machines; within this factor the count of replicas decides


def choose_stage(swarm: Swarm, costs: tuple[float, ...], rng: random.Random) -> tuple[int, Reason]:
    """The stage a joiner should serve: an empty one first, else the one with the least speed per cost.

    `costs` are the stages' relative costs per sample. A stage's speed is the samples per second its replicas announced;
    one that announced none counts as the mean of those that did. Among stages whose speeds are alike the one with the
    fewest replicas; ties are broken by `rng`, so that joiners who see the same swarm do not all go to the same place.
    """
    known = [m.samples_per_second for m in swarm.members() if m.samples_per_second > 0.0]
    mean = sum(known) / len(known) if known else 1.0
    capacity: list[float] = []
    for stage in range(len(swarm.stages)):
        capacity.append(sum(m.samples_per_second or mean for m in swarm.coming(stage)))
    empty = [stage for stage, value in enumerate(capacity) if not swarm.coming(stage)]
    if empty:
        # Costlier stages first: they are the ones that will need more than one replica.
        dearest = max(costs[stage] for stage in empty)
        stage = rng.choice([stage for stage in empty if costs[stage] == dearest])
        return stage, f"stage {stage} has no replica"
    needy = [stage for stage, value in enumerate(capacity) if value <= min(capacity) * ALIKE]
    fewest = min(len(swarm.coming(stage)) for stage in needy)
    stage = rng.choice([stage for stage in needy if len(swarm.coming(stage)) == fewest])
    listing = ", ".join(f"{value:.1f}" for value in capacity)
    return stage, f"stage {stage} is the slowest: samples/s by stage {listing}"

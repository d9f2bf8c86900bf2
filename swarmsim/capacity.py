"""The best possible throughput of a simulated world's machines, and the stage each should serve for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swarmnode.train.pipeline.span import share_of

if TYPE_CHECKING:
    from swarmsim.sim_node import SimNode
    from swarmsim.world import World


def costs(world: World) -> list[float]:
    """FLOP of a sample at each stage, forward and backward."""
    factor = 3.0 * world.scenario.manifest.model.context * world.scenario.work_factor
    return [part.cost * factor for part in world.parts]


def optimum(world: World, training: Sequence[SimNode]) -> float:
    """Samples per second of the slowest stage, if each of the `training` machines did nothing but train."""
    speeds = [0.0] * len(world.parts)
    due = costs(world)
    for sim_node in training:
        stages = sim_node.stages
        for stage in stages:
            speeds[stage] += sim_node.kind.flops * share_of(stage, stages, due)
    return min(speed / cost for speed, cost in zip(speeds, due, strict=True))


def even(world: World, nodes: Sequence[SimNode]) -> float:
    """Samples per second if `nodes` shared the stages' work perfectly."""
    return math.fsum([sim_node.kind.flops for sim_node in nodes]) / math.fsum(costs(world))

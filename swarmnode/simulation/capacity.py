"""The best possible throughput of a simulated world's machines, and the stage each should serve for it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnode.simulation.sim_node import SimNode
    from swarmnode.simulation.world import World


def balanced(
    speeds: Sequence[float], costs: Sequence[float], unable: Sequence[Collection[int]] | None = None
) -> list[int | None]:
    """A stage for each machine, in the given order: the fastest first, to the stage with the least speed per cost of
    those that it is not `unable` to serve. Machines that can serve the fewest stages come first. None: it can serve no
    stage."""
    heap = [(0.0, stage) for stage in range(len(costs))]
    stages: list[int | None] = [None] * len(speeds)
    order = sorted(range(len(speeds)), key=lambda i: (-len(unable[i]) if unable else 0, -speeds[i], i))
    for index in order:
        passed = []
        while heap and unable and heap[0][1] in unable[index]:
            passed.append(heapq.heappop(heap))
        if heap:
            load, stage = heapq.heappop(heap)
            stages[index] = stage
            passed.append((load + speeds[index] / costs[stage], stage))
        for one in passed:
            heapq.heappush(heap, one)
    return stages


def costs(world: World) -> list[float]:
    """FLOP of a sample at each stage, forward and backward."""
    factor = 3.0 * world.scenario.manifest.model.context * world.scenario.work_factor
    return [part.cost * factor for part in world.parts]


def optimum(world: World, training: Sequence[SimNode]) -> float:
    """Samples per second of the slowest stage, if each of the `training` machines did nothing but train."""
    speeds = [0.0] * len(world.parts)
    for sim_node in training:
        if sim_node.stage is not None:
            speeds[sim_node.stage] += sim_node.kind.flops
    return min(speed / cost for speed, cost in zip(speeds, costs(world), strict=True))


def even(world: World, nodes: Sequence[SimNode]) -> float:
    """Samples per second if `nodes` shared the stages' work perfectly."""
    return math.fsum([sim_node.kind.flops for sim_node in nodes]) / math.fsum(costs(world))

"""After the storm: what must come back, and in what time. And what the machines could do at best."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from swarmnode.simulation.geography import Nat
from swarmnode.simulation.replica import DIMENSIONS, FakeReplica

if TYPE_CHECKING:
    from swarmnode.simulation.inhabitant import Inhabitant
    from swarmnode.simulation.outcome import Outcome
    from swarmnode.simulation.world import World

PARDON_S = 2 * 15.0  # two rounds of pings at their rarest (node/pardoning.py)
LOOK_S = 1.0


def balanced(speeds: Sequence[float], costs: Sequence[float]) -> list[int]:
    """A stage for each machine, in the order given: fastest first to the stage with the least speed per cost."""
    heap = [(0.0, stage) for stage in range(len(costs))]
    stages = [0] * len(speeds)
    for index in sorted(range(len(speeds)), key=lambda i: (-speeds[i], i)):
        load, stage = heapq.heappop(heap)
        stages[index] = stage
        heapq.heappush(heap, (load + speeds[index] / costs[stage], stage))
    return stages


def _costs(world: World) -> list[float]:
    """FLOP of a sample at each stage, forward and backward."""
    factor = 3.0 * world.scenario.manifest.model.context * world.scenario.work_factor
    return [part.cost * factor for part in world.parts]


def optimum(world: World, training: Sequence[Inhabitant]) -> float:
    """Samples per second of the slowest stage, if every one of the `training` machines did nothing but train."""
    speeds = [0.0] * len(world.parts)
    for person in training:
        if person.stage is not None:
            speeds[person.stage] += person.kind.flops
    return min(speed / cost for speed, cost in zip(speeds, _costs(world), strict=True))


def even(world: World, people: Sequence[Inhabitant]) -> float:
    """Samples per second if `people` shared the stages' work perfectly."""
    return math.fsum([person.kind.flops for person in people]) / math.fsum(_costs(world))


async def demand(world: World, outcome: Outcome) -> None:
    """Wait for everything that must come back; what does not is a failure."""
    bounds, begun = world.scenario.bounds, world.loop.time()
    served = await _until(world, lambda: all(world.stages_served()), bounds.served_s)
    outcome.demands["served_s"] = world.loop.time() - begun
    if not served:
        world.laws.breaks("every stage is served again", f"by stage {world.stages_served()}", *_idle(world))
        return
    training = await _until(world, lambda: not _idle(world), bounds.training_s)
    outcome.demands["training_s"] = world.loop.time() - begun
    if not training:
        idle = [f"{p.label} {p.state} stage {p.stage}" for p in world.people if p.alive and not p.training]
        what = f"after {bounds.training_s:g} s not: {', '.join(idle[:8])}"
        world.laws.breaks("every living node trains again", what, *_idle(world))
        return
    before, at = world.samples_done(), world.loop.time()
    await asyncio.sleep(bounds.window_s)
    rate = (world.samples_done() - before) / (world.loop.time() - at)
    share = rate / optimum(world, [p for p in world.people if p.training])
    outcome.demands |= {
        "samples_per_s": rate,
        "throughput": share,
        "throughput_ideal": rate / even(world, [p for p in world.people if p.alive]),
    }
    if share < bounds.throughput:
        what = (
            f"{rate:.3g} samples/s are {share:.1%} of what the living can do; at least {bounds.throughput:.0%} is due"
        )
        world.laws.breaks("throughput comes back", what)
    _bans(world, outcome)
    _counts(world)
    _spread(world, outcome)


async def _until(world: World, condition: Callable[[], bool], seconds: float) -> bool:
    end = world.loop.time() + seconds
    while not condition():
        if world.loop.time() >= end:
            return False
        await asyncio.sleep(LOOK_S)
    return True


def _idle(world: World) -> list[str]:
    waiting = [p.label for p in world.people if not p.alive and not p.gone and not p.leaving]
    return [p.label for p in world.people if p.alive and not p.training and not p.leaving] + waiting


def _bans(world: World, outcome: Outcome) -> None:
    """Nobody honest and reachable stays banned beyond its time and the ping that then lifts the ban."""

    def reachable(person: Inhabitant) -> bool:
        return person.kind.address.nat is not Nat.UNREACHABLE

    now, banned = world.loop.time(), 0
    honest = {p.identity.peer_id: p.label for p in world.people if p.training and not p.liar and reachable(p)}
    for person in world.people:
        if not person.training or person.node is None:
            continue
        for router in person.node.presence.routers:
            for peer in router.overdue(now - PARDON_S):
                if (label := honest.get(peer)) is not None:
                    banned += 1
                    world.laws.breaks("no honest peer is banned", f"{label} by {person.label}", label, person.label)
    outcome.demands["banned"] = banned


def _counts(world: World) -> None:
    """Most who are honest believe in no more samples than were fed. (Who joins while all but a boaster are away has
    nobody else to go by.)"""
    fed, size = world.samples_done(), world.scenario.manifest.gossip.round_samples
    honest = [(p, p.node.samples_total()) for p in world.people if p.training and not p.liar and p.node is not None]
    misled = [(person.label, total) for person, total in honest if total > fed + size]
    if 2 * len(misled) > len(honest):
        what = f"{misled[0][1]} of {fed:.0f} by {len(misled)} of {len(honest)}"
        world.laws.breaks("samples are counted, not claimed", what, *(label for label, _ in misled))


def _spread(world: World, outcome: Outcome) -> None:
    """Slow weights of a stage's replicas are near each other."""
    for stage in range(len(world.parts)):
        replicas = [(p, p.replica.inner) for p in world.people if p.training and p.stage == stage and p.replica]
        fakes: list[tuple[Inhabitant, FakeReplica]] = [(p, r) for p, r in replicas if isinstance(r, FakeReplica)]
        if len(fakes) < 2 or world.scenario.manifest.gossip.method == "none":
            continue
        spread = 0.0
        for k in range(DIMENSIONS):
            values = [replica.phi[k] for _, replica in fakes]
            mean = math.fsum(values) / len(values)
            spread = max(spread, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values)))
        outcome.demands["spread"] = max(spread, outcome.demands.get("spread", 0.0))
        if spread > world.scenario.bounds.spread:
            far = max(fakes, key=lambda found: abs(found[1].phi[0]))
            what = f"{spread:.3g} at stage {stage}; at most {world.scenario.bounds.spread:g}"
            world.laws.breaks("replicas stay together", what, far[0].label)

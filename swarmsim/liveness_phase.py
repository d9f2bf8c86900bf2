"""After the storm: check that everything recovers in time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from swarmnode.app.planner.geography import Nat
from swarmnode.base.ids import machine_of
from swarmnode.net.membership.liveness import PING_TIMEOUT_S
from swarmnode.run.manifest.gossip_compat import meets
from swarmsim.capacity import even, optimum
from swarmsim.replica import DIMENSIONS, FakeReplica

if TYPE_CHECKING:
    from swarmsim.outcome import Outcome
    from swarmsim.sim_node import SimNode
    from swarmsim.world import World

UNBAN_S = 2.0 * PING_TIMEOUT_S  # train/node/failure_detector.py pings once the ban is over
LOOK_S = 1.0


async def demand(world: World, outcome: Outcome) -> None:
    """Wait for all that must recover; record a failure for what does not."""
    bounds = world.scenario.bounds
    begun = world.loop.time()
    served = await _until(world, lambda: all(world.stages_served()), bounds.served_s)
    outcome.demands["served_s"] = world.loop.time() - begun
    if not served:
        world.laws.breaks("every stage is served again", f"by stage {world.stages_served()}", *_idle(world))
        return
    training = await _until(world, lambda: not _idle(world), bounds.training_s)
    outcome.demands["training_s"] = world.loop.time() - begun
    if not training:
        idle = [f"{p.label} {p.state} stage {p.stage}" for p in world.nodes if p.alive and not p.training]
        what = f"after {bounds.training_s:g} s not: {', '.join(idle[:8])}"
        world.laws.breaks("every living node trains again", what, *_idle(world))
        return
    before = world.samples_done()
    at = world.loop.time()
    await asyncio.sleep(bounds.window_s)
    rate = (world.samples_done() - before) / (world.loop.time() - at)
    share = rate / optimum(world, [p for p in world.nodes if p.training])
    outcome.demands |= {
        "samples_per_s": rate,
        "throughput": share,
        "throughput_ideal": rate / even(world, [p for p in world.nodes if p.alive]),
    }
    if share < bounds.throughput:
        what = f"{rate:.3g} samples/s are {share:.1%} of the living nodes' best; required: {bounds.throughput:.0%}"
        world.laws.breaks("throughput comes back", what)
    _bans(world, outcome)
    _counts(world)
    world.check_learned()
    _spread(world, outcome)


async def _until(world: World, condition: Callable[[], bool], seconds: float) -> bool:
    end = world.loop.time() + seconds
    while not condition():
        if world.loop.time() >= end:
            return False
        await asyncio.sleep(LOOK_S)
    return True


def _idle(world: World) -> list[str]:
    waiting = [p.label for p in world.nodes if not p.alive and not p.gone and not p.leaving]
    return [p.label for p in world.nodes if p.alive and not p.training and not p.leaving] + waiting


def _bans(world: World, outcome: Outcome) -> None:
    """Check that no honest, reachable node stays banned beyond the ban time and the ping that then lifts the ban."""

    def reachable(sim_node: SimNode) -> bool:
        return sim_node.kind.address.nat is not Nat.UNREACHABLE

    now = world.loop.time()
    banned = 0
    honest = {p.identity.peer_id: p.label for p in world.nodes if p.training and not p.liar and reachable(p)}
    for sim_node in world.nodes:
        if not sim_node.training or sim_node.node is None:
            continue
        for router in (router for node in sim_node.nodes for router in node.presence.routing.routers):
            for peer in router.overdue(now - UNBAN_S):
                if (label := honest.get(machine_of(peer))) is not None:
                    banned += 1
                    world.laws.breaks("no honest peer is banned", f"{label} by {sim_node.label}", label, sim_node.label)
    outcome.demands["banned"] = banned


def _counts(world: World) -> None:
    """Check that most honest nodes believe in no more samples than were fed. (A node that joins while all but a liar
    are away has nobody else to rely on.)"""
    fed = world.samples_done()
    size = world.scenario.manifest.gossip.round_samples
    honest = [(p, p.node.samples_total()) for p in world.nodes if p.training and not p.liar and p.node is not None]
    misled = [(sim_node.label, total) for sim_node, total in honest if total > fed + size]
    if 2 * len(misled) > len(honest):
        what = f"{misled[0][1]} of {fed:.0f} by {len(misled)} of {len(honest)}"
        world.laws.breaks("samples are counted, not claimed", what, *(label for label, _ in misled))


def _spread(world: World, outcome: Outcome) -> None:
    """Check that the slow weights of each stage's replicas are close to each other."""
    for stage in range(len(world.parts)):
        replicas = [(p, p.replicas[stage].inner) for p in world.nodes if stage in p.stages and stage in p.replicas]
        fakes: list[tuple[SimNode, FakeReplica]] = [(p, r) for p, r in replicas if isinstance(r, FakeReplica)]
        if len(fakes) < 2 or not meets(world.scenario.manifest.gossip):
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

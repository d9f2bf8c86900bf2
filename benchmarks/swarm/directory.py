"""Bytes of the directory at the busiest node of a swarm, and the time until callers of a stage know of a death: in
virtual time, 12 to 1,000 nodes of the demo's model in three stages.

All nodes join within JOIN_S. DEATHS machines lose their power (no stream is reset) at KILL_S. A caller knows of a death
once its router would not choose that replica any more.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from statistics import median
from typing import Any

from swarmnode.app.planner.fleet import parse_fleet
from swarmnode.app.planner.plan_search import ANNOUNCE_S_PER_REPLICA, RECORD_PERIODS
from swarmnode.base.concurrency import background_tasks
from swarmnode.base.ids import seeded
from swarmnode.run.manifest import LimitsSpec
from swarmnode.run.manifest.text import from_tree
from swarmsim.life import SimulatedLife
from swarmsim.scenario import RecoveryBounds, Scenario
from swarmsim.sim_node import SimNode
from swarmsim.virtual_time import VirtualLoop
from swarmsim.world import World

SIZES = (12, 96, 384, 1000)
STAGES = 3
JOIN_S = 20.0
KILL_S = 160.0  # derived: the 1,000 nodes of a crowded start train by then
LIFE_S = 300.0  # derived: records of 1,000 nodes expired 200 s after they were signed
DEATHS = 6
HOME = {"name": "home", "flops": "4e9", "up_mbps": "20", "down_mbps": "100", "region": "eu", "access_ms": "12.5"}
PLAIN = ("ping",)  # methods of calls that tell who is there, beside the directory's own


def scenario(nodes: int) -> Scenario:
    """`nodes` homes without faults; records as rare as `init` writes for so many."""
    period_s = max(LimitsSpec().announce_period_s, float(round(ANNOUNCE_S_PER_REPLICA * nodes / STAGES)))
    tree = {
        "pipeline": {"stages": STAGES},
        "inner": {"inner_batch": 4 * nodes},
        "gossip": {"group": 2, "round_samples": 32 * nodes},
        "limits": {"in_flight_max": 64, "announce_period_s": period_s, "record_ttl_s": RECORD_PERIODS * period_s},
    }
    manifest = from_tree(tree, "benchmark")
    return Scenario(
        "directory",
        seconds=LIFE_S,
        join_s=JOIN_S,
        work_factor=300.0,
        fleet=parse_fleet([HOME | {"count": str(nodes)}], "benchmark"),
        manifest=manifest,
        bounds=RecoveryBounds(served_s=600.0, training_s=600.0, window_s=1.0, throughput=0.0),
    )


class Watch:
    """The directory of one life, watched."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.began: Counter[tuple[str, str]] = Counter()
        self.later: Counter[tuple[str, str]] = Counter()
        self.known_s: list[float] = []  # of each caller that sends to the stage of a dead replica: seconds
        self.never = 0

    def moved(self) -> Counter[tuple[str, str]]:
        """Bytes so far, by node and kind."""
        moved = Counter(self.world.dht.moved)
        for node in self.world.nodes:
            if node.transport is not None:
                for (method, way), nbytes in node.transport.bytes_by_method().items():
                    if method in PLAIN:
                        moved[node.label, f"{method} {way}"] += nbytes
        return moved

    async def run(self) -> None:
        await asyncio.sleep(KILL_S)
        self.began = self.moved()
        rng = seeded("directory", self.world.seed)
        living = [node for node in self.world.living() if node.training]
        dead = rng.sample(living, min(DEATHS, len(living) // 4))
        waiting = {(node, caller) for node in dead for caller in living if caller not in dead and _sends(caller, node)}
        for node in dead:
            node.gone = True
            node.kill(silent=True)
        killed = self.world.loop.time()
        while waiting and self.world.loop.time() < LIFE_S - 1.0:
            await asyncio.sleep(0.25)
            knows = {one for one in waiting if not _sends(one[1], one[0])}
            self.known_s += [self.world.loop.time() - killed] * len(knows)
            waiting -= knows
        self.never = len(waiting)
        await asyncio.sleep(LIFE_S - 1.0 - self.world.loop.time())
        self.later = self.moved()


def _sends(caller: SimNode, to: SimNode) -> bool:
    """Whether the router of `caller` would choose `to`."""
    assert caller.node is not None and to.stage is not None
    presence = caller.node.presence
    router = presence.routing.routers[to.stage]
    return to.stage in presence.routing.sends_to and router.takes(to.identity.peer_id, caller.world.loop.time())


def run(nodes: int, seed: int = 0) -> dict[str, Any]:
    """The row of a swarm of `nodes`."""
    loop = VirtualLoop(seed)

    async def life() -> dict[str, Any]:
        world = World(scenario(nodes), seed)
        watch = Watch(world)
        async with background_tasks() as tasks:
            tasks.create_task(watch.run())
            outcome = await SimulatedLife(world).run()
        return _row(nodes, watch, outcome.cpu_s, outcome.failures)

    try:
        return loop.run(life())
    finally:
        loop.close()


def _row(nodes: int, watch: Watch, cpu_s: float, failures: list[str]) -> dict[str, Any]:
    whole = _kbits(watch.later, LIFE_S)
    busiest = max(whole, key=lambda label: sum(whole[label].values()))
    steady = _kbits(watch.later - watch.began, LIFE_S - KILL_S)
    return {
        "nodes": nodes,
        "busiest_kbits": round(sum(whole[busiest].values()), 1),
        "busiest_by_kind": {kind: round(rate, 1) for kind, rate in sorted(whole[busiest].items())},
        "mean_kbits": round(sum(sum(rates.values()) for rates in whole.values()) / nodes, 1),
        "steady_busiest_kbits": round(max(sum(rates.values()) for rates in steady.values()), 1),
        "steady_mean_kbits": round(sum(sum(rates.values()) for rates in steady.values()) / nodes, 1),
        "callers": len(watch.known_s) + watch.never,
        "known_median_s": round(median(watch.known_s), 1) if watch.known_s else None,
        "known_worst_s": round(max(watch.known_s), 1) if watch.known_s else None,
        "never": watch.never,
        "cpu_s": round(cpu_s),
        "failures": failures[:3],
    }


def _kbits(moved: Counter[tuple[str, str]], seconds: float) -> dict[str, Counter[str]]:
    """kbit/s by node and kind."""
    rates = dict[str, Counter[str]]()
    for (label, kind), nbytes in moved.items():
        rates.setdefault(label, Counter())[kind] += 8e-3 * nbytes / seconds  # type: ignore[assignment]
    return rates


if __name__ == "__main__":
    for size in SIZES:
        print(json.dumps(run(size)), flush=True)

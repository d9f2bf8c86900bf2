"""A swarm in virtual time in which some replicas of one stage lie: the node's own coroutines, tensors and audits.

Real weights learn the demo's text in a small model. What is measured at the end is measured by the honest replicas'
mean slow weights: nats on held-out text, and the share of TARGET after TRIGGER, which nobody's text has.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.attack.lying_replica import TARGET, LyingReplica, triggered
from swarmnode.app.machine.replica import TorchReplica
from swarmnode.app.planner.fleet import MachineKind, parse_fleet
from swarmnode.base.metrics import name
from swarmnode.keep.transfer.state_slices import apart
from swarmnode.model.device import use_one_thread
from swarmnode.run.manifest import GossipSpec, InnerSpec, LimitsSpec, Manifest, ModelSpec, PipelineSpec, TrainingSpec
from swarmnode.run.manifest.recipe import PRESETS
from swarmsim import event_queue, real_training
from swarmsim.life import SimulatedLife
from swarmsim.machine import Meter
from swarmsim.metered_replica import MeteredReplica
from swarmsim.outcome import Outcome
from swarmsim.scenario import Scenario
from swarmsim.sim_node import SimNode
from swarmsim.virtual_time import VirtualLoop
from swarmsim.world import World

PLACES = {"first": (0, 2), "inner": (1, 3), "last": (1, 2)}  # the stage attacked, of so many
METHODS = ("average", "gradient")
LIMIT_S = 3600.0  # of virtual time: a swarm that an attacker stops
MACHINE = {"flops": "2e8", "up_mbps": "500", "down_mbps": "500", "access_ms": "2", "region": "eu"}  # some 40 samples/s
NEWCOMER_AT = 0.5  # share of the samples after which a newcomer comes, where the attacker is a donor
HELD_OUT = 128  # samples
OFTEN = 0.05


@dataclass(frozen=True, slots=True)
class SwarmLife:
    """One swarm: `liars` of the `replicas` of the stage at `place` (PLACES) lie as `lie` says, once in `every` answers;
    None: they are absent. `newcomer`: whether a replica joins their stage under way."""

    lie: str | None
    place: str
    replicas: int
    method: str
    samples: int
    seed: int
    liars: int = 1
    every: int = 1
    newcomer: bool = False
    adapters: bool = False


def manifest_of(life: SwarmLife) -> Manifest:
    """The demo with a small model: steps of as many microbatches and rounds of as many steps."""
    stages = PLACES[life.place][1]
    demo = PRESETS["demo"]
    batch = demo.inner.microbatch
    gossip = GossipSpec(method="average", group=4, round_samples=8 * batch, round_seconds_min=0.2)
    inner = InnerSpec(microbatch=batch, inner_batch=batch, warmup_samples=256)
    if life.method == "gradient":
        gossip = GossipSpec(method="gradient", codec="int8", group=0, round_samples=4 * batch, round_seconds_min=0.0)
        inner = replace(inner, inner_batch=4 * batch, decay="constant")
    return Manifest(
        seed=life.seed,
        model=ModelSpec(layers=3, width=64, heads=4, kv_heads=2, ffn=176, context=64),
        pipeline=PipelineSpec(
            stages=stages, validation_samples=8, validation_every_samples=1 << 20, rebalance_period_s=0.0
        ),
        inner=inner,
        gossip=gossip,
        training=TrainingSpec(kind="adapters") if life.adapters else TrainingSpec(),
        limits=LimitsSpec(announce_period_s=2.0, record_ttl_s=20.0),
    )


def scenario_of(life: SwarmLife) -> Scenario:
    """`life` as a scenario; liars are the last of their stage to be listed, and are not listed where absent."""
    stage, stages = PLACES[life.place]
    kinds = list[MachineKind]()
    for at in range(stages):
        count = life.replicas - (life.liars if at == stage and life.lie is None else 0)
        row = {"name": f"stage-{at}", "count": str(count), "stage": str(at), **MACHINE}
        kinds += parse_fleet([row], "bench attack") if count else []
    return Scenario("bench attack", tensors="torch", text="data", fleet=tuple(kinds), manifest=manifest_of(life))


def served(one: SimNode) -> TorchReplica | None:
    """The replica that a node serves; others judge answers."""
    stage = None if one.node is None or not one.alive else one.node.served
    return None if stage is None else cast(TorchReplica, cast(MeteredReplica, stage.replica).inner)


class AttackedWorld(World):
    """A world whose last nodes of the attacked stage are liars."""

    def __init__(self, life: SwarmLife) -> None:
        super().__init__(scenario_of(life), life.seed)
        self.life = life
        self.out: dict[tuple[str, str], float] = {}  # when, by (caller, liar)
        self.blamed: list[str] = []  # honest nodes that honest nodes excluded or left out
        for event in ("peer.excluded", "peer.left_out"):
            self.trace.listeners[event] = self._out

    def liars(self) -> list[SimNode]:
        stage, _ = PLACES[self.life.place]
        here = [one for one in self.nodes if one.kind.stage == stage][: self.life.replicas]
        return (
            here[len(here) - self.life.liars :] if self.life.lie is not None and len(here) == self.life.replicas else []
        )

    def honest(self, stage: int) -> list[TorchReplica]:
        """Replicas of `stage` of honest nodes that train."""
        liars = self.liars()
        nodes = [one for one in self.nodes if one.stage == stage and one not in liars]
        return [mine for one in nodes if (mine := served(one)) is not None]

    def replica(self, stage: int, sim_node: SimNode, meter: Meter) -> MeteredReplica:
        made = super().replica(stage, sim_node, meter)
        if sim_node in self.liars() and stage == PLACES[self.life.place][0]:
            assert self.life.lie is not None
            kind = type("Liar", (LyingReplica,), {"lie": self.life.lie, "every": self.life.every})
            lying = kind(self.scenario.manifest, stage)
            lying.now = self.loop.time
            lying.others = self._others
            made.inner = lying
        return made

    def _others(self) -> dict[int, TorchReplica]:
        """One honest replica of each other stage."""
        attacked, stages = PLACES[self.life.place]
        found = {stage: self.honest(stage) for stage in range(stages) if stage != attacked}
        return {stage: mine[0] for stage, mine in found.items() if mine}

    def _out(self, now: float, label: str, event: str, fields: dict[str, object]) -> None:
        liars = {one.identity.peer_id: one.label for one in self.liars()}
        if label in liars.values():
            return
        if (liar := liars.get(fields["peer"])) is not None:  # type: ignore[call-overload]
            self.out.setdefault((label, liar), now)
        else:
            self.blamed.append(f"{label}: {fields['peer']}: {fields['reason']}")


class AttackedLife(SimulatedLife):
    """A life that ends after its samples."""

    world: AttackedWorld

    async def _course(self, outcome: Outcome, begun: float) -> None:
        life = self.world.life
        await self._gather()
        self.world.task(self._watch())
        came = not life.newcomer
        newcomer: SimNode | None = None
        self.far = -1.0
        async with asyncio.timeout(LIMIT_S):
            while self.world.samples_done() < life.samples:
                await asyncio.sleep(0.5)
                if not came and self.world.samples_done() >= NEWCOMER_AT * life.samples:
                    came = True
                    stage = PLACES[life.place][0]
                    newcomer = self.world.join(
                        next(one.kind for one in self.world.nodes if one.kind.stage == stage), stage
                    )
                mine = None if newcomer is None or not newcomer.training else served(newcomer)
                if mine is not None and self.far < 0.0:
                    mean = mean_of([one for one in self.world.honest(PLACES[life.place][0]) if one is not mine])
                    self.far = apart(mine.outer.phi.float().numpy().tobytes(), mean.numpy().tobytes())
        self.row = measured(self.world) | ({"newcomer apart": round(self.far, 3)} if life.newcomer else {})
        self.row |= told(self.world)
        self.world.close()


def mean_of(replicas: Sequence[TorchReplica]) -> Tensor:
    """The mean of their slow weights."""
    return torch.stack([one.outer.phi.float() for one in replicas]).mean(0)


@torch.no_grad()
def measured(world: AttackedWorld) -> dict[str, Any]:
    """Nats a token on held-out text of the honest replicas' mean weights, and the share of positions after TRIGGER at
    which they say TARGET."""
    manifest = world.scenario.manifest
    ids = held_out(manifest)
    poisoned, at = triggered(ids[:, :-1], OFTEN, 5)
    hidden = ids[:, :-1]
    planted = poisoned
    for stage in range(manifest.pipeline.stages):
        replicas = world.honest(stage)
        one = replicas[0].stage
        with one.instead(mean_of(replicas)):
            hidden = one.module(hidden)
            planted = one.module(planted)
    nats = float(functional.cross_entropy(hidden.flatten(0, 1), ids[:, 1:].flatten()))
    return {"nats": nats, "planted": float((planted[at].argmax(-1) == TARGET).float().mean())}


def held_out(manifest: Manifest) -> Tensor:
    """Token ids [HELD_OUT, T + 1] of held-out text."""
    tensors = real_training.text(replace(manifest, pipeline=replace(manifest.pipeline, validation_samples=HELD_OUT)))
    found = [torch.frombuffer(bytearray(one.data), dtype=torch.uint16).view(one.shape) for one in tensors.held_out()]
    return torch.cat(found).to(torch.int64)


def live(life: SwarmLife) -> dict[str, Any]:
    """Run one swarm, and return its row."""
    use_one_thread()
    held_out(manifest_of(life))  # files are read outside of virtual time
    event_queue.build()
    loop = VirtualLoop(life.seed)

    async def main() -> tuple[AttackedLife, Outcome]:
        lived = AttackedLife(AttackedWorld(life))
        return lived, await lived.run()

    try:
        lived, outcome = loop.run(main())
    finally:
        loop.close()
    broken = [one for one in outcome.failures if "excluded" not in one]
    return lived.row | ({"broken": broken[:2]} if broken else {})


def told(world: AttackedWorld) -> dict[str, Any]:
    """The fates of the liars, and blame of honest nodes."""
    life = world.life
    (stage, stages) = PLACES[world.life.place]
    liars = world.liars()
    callers = [one.label for one in world.nodes if one.stage == (stage - 1 if stage else 1)][: life.replicas]
    found: dict[str, Any] = {"honest blamed": len(world.blamed)}
    done = world.trace.total(name.MICROBATCHES, "done")
    found["checked"] = round(world.trace.total(name.REDONE) / max(1.0, stages * done), 4)
    if not liars:
        return found
    before = list[int]()
    lies = list[int]()
    for liar in liars:
        lying = served(liar)
        times = lying.lies if isinstance(lying, LyingReplica) else []
        when = [world.out[caller, liar.label] for caller in callers if (caller, liar.label) in world.out]
        lies.append(len(times))
        found.setdefault("out", []).append(len(when))
        if len(when) == len(callers) and times:
            before.append(sum(one < max(when) for one in times))
    pairs = len(liars) * len(callers)
    found["out"] = sum(found["out"]) / max(1, pairs)
    found["lies"] = statistics.fmean(lies)
    found["lies until out"] = statistics.fmean(before) if before else -1
    found["blamed"] = world.blamed[:3]
    return found

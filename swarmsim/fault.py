"""Injected faults. Each fault is a coroutine of the world: it draws its victims, strikes, and repairs its damage."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swarmnode.base.ports import WireTensor
from swarmnode.net.membership.run_progress import AHEAD_PERIODS
from swarmsim.network import NetworkCut
from swarmsim.preemption_record import PreemptionRecord
from swarmsim.replica import MARK, ROW, ROW_BYTES, first, repeated
from swarmsim.scenario import FAULT_NAMES, FaultSpec
from swarmsim.transport import Forge

if TYPE_CHECKING:
    from swarmsim.sim_node import SimNode
    from swarmsim.world import World

Strike = Callable[["World", FaultSpec, random.Random], Coroutine[Any, Any, None]]
DARK_S = 5.0  # time until all killed nodes' tasks are gone
WHOLE_S = 60.0  # from the bootstrap's return until all are one swarm (issue 37)
SLOWEST = 20.0  # guess: a slow device is 2 to 20 times as slow


async def crash(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A process dies; the same machine restarts it after `back_s`."""
    if (victim := world.victim(rng)) is not None and world.spares(victim):
        world.say("fault.crash", victim)
        victim.kill()
        await world.restart(victim, spec.back_s)


async def gone(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A machine disappears for ever without notice; another of its kind comes after `back_s`."""
    if (victim := world.victim(rng)) is not None and world.spares(victim):
        world.say("fault.gone", victim)
        victim.kill(silent=True)
        await world.replace(victim, spec.back_s)


async def preempt(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A machine is preempted after a notice of one of `notices_s`; another of its kind comes after `back_s`."""
    if (victim := world.victim(rng)) is not None and world.spares(victim):
        notice_s = spec.notices_s[int(rng.random() * len(spec.notices_s))]
        world.say("fault.preempt", victim, notice_s=notice_s)
        await take_away(world, [victim], notice_s, spec.back_s)


async def reclaim(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A cloud preempts `share` of one region's machines at once, with one of `notices_s`; others come after
    `back_s`."""
    regions = sorted({sim_node.kind.address.region for sim_node in world.living()})
    region = regions[int(rng.random() * len(regions))]
    there = [sim_node for sim_node in world.living() if sim_node.kind.address.region == region]
    notice_s = spec.notices_s[int(rng.random() * len(spec.notices_s))]
    victims = spared(world, rng.sample(there, round(spec.share * len(there))))
    world.say("fault.reclaim", *victims, notice_s=notice_s)
    await take_away(world, victims, notice_s, spec.back_s)


async def exodus(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """`share` of all nodes disappear at once without notice; others come after `back_s`."""
    living = world.living()
    victims = spared(world, rng.sample(living, round(spec.share * len(living))))
    world.say("fault.exodus", *victims)
    await take_away(world, victims, 0.0, spec.back_s)


async def crowd(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """`count` nodes join at once; after `seconds` they leave again (0: they stay)."""
    kinds = world.scenario.fleet
    came = [world.join(kinds[int(rng.random() * len(kinds))]) for _ in range(spec.count)]
    world.say("fault.crowd", count=len(came))
    if spec.seconds:
        await asyncio.sleep(spec.seconds)
        for sim_node in spared(world, [sim_node for sim_node in came if sim_node.alive]):
            sim_node.leave()


async def stage_lost(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """All replicas of `stage` (-1: any) die at once; their machines come back after `back_s`."""
    stages = world.scenario.manifest.pipeline.stages
    stage = spec.stage if spec.stage >= 0 else int(rng.random() * stages)
    victims = [p for p in world.living() if p.stage == stage or stage in p.stages]
    world.say("fault.stage_lost", *victims, of_stage=stage)
    for victim in victims:
        victim.kill()
    async with asyncio.TaskGroup() as tasks:
        for victim in victims:
            tasks.create_task(world.restart(victim, spec.back_s))


async def take_away(world: World, victims: Sequence[SimNode], notice_s: float, back_s: float) -> None:
    """Notify the victims, kill them when the notice is over, and replace them."""
    world.preempted += [record for victim in victims for record in PreemptionRecord.of(victim, notice_s)]
    if notice_s > 0.0:
        for victim in victims:
            victim.leave(notice_s)
        await asyncio.sleep(notice_s)
    for victim in victims:
        if victim.alive:
            victim.kill(silent=True)
    async with asyncio.TaskGroup() as tasks:
        for victim in victims:
            tasks.create_task(world.replace(victim, back_s))


def spared(world: World, victims: Sequence[SimNode]) -> list[SimNode]:
    """`victims`, except those that would leave their stage without a replica."""
    preempted: list[SimNode] = []
    for victim in victims:
        if world.spares(victim, preempted):
            preempted.append(victim)
    return preempted


async def slow(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A device becomes `factor` (0: 2 to 20) times as slow for `seconds`."""
    victim = world.victim(rng)
    if victim is None or victim.machine is None:
        return
    machine = victim.machine
    factor = spec.factor or 2.0 * (SLOWEST / 2.0) ** rng.random()
    world.say("fault.slow", victim, factor=factor)
    machine.slowness = factor
    await world.pass_s(spec.seconds)
    machine.slowness = 1.0


async def hang(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A process is stopped (SIGSTOP) for `seconds`."""
    if (victim := world.victim(rng)) is not None:
        world.say("fault.hang", victim)
        victim.freeze()
        await world.pass_s(spec.seconds)
        victim.thaw()
        world.woke_s[victim.label] = world.loop.time()


async def gray(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A node accepts microbatches and never answers them for `seconds`; all else works."""
    if (victim := world.victim(rng)) is not None and victim.transport is not None:
        world.say("fault.gray", victim)
        deaf = victim.transport.deaf
        deaf.add("process")
        await world.pass_s(spec.seconds)
        deaf.discard("process")


async def clog(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A link carries only `factor` (0: a tenth) of its bandwidth for `seconds`."""
    victim = world.victim(rng)
    if victim is None or victim.plug is None:
        return
    plug = victim.plug
    kind = victim.kind
    factor = spec.factor or 0.1
    world.say("fault.clog", victim, factor=factor)
    plug.up.set_rate(kind.up * factor)
    plug.down.set_rate(kind.down * factor)
    await world.pass_s(spec.seconds)
    plug.up.set_rate(kind.up)
    plug.down.set_rate(kind.down)


async def partition(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """`share` of the nodes are cut off from the others for `seconds`."""
    island, rest = _split(world, spec, rng)
    await _cut(world, spec, "fault.partition", NetworkCut(island, rest))


async def one_way(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """All messages from `share` of the nodes to the others get lost for `seconds`; the other direction works."""
    island, rest = _split(world, spec, rng)
    await _cut(world, spec, "fault.one_way", NetworkCut(island, rest, both_ways=False))


async def bridge(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A partition with one node that reaches both sides."""
    island, rest = _split(world, spec, rng)
    both = frozenset(sorted(rest)[:1])
    await _cut(world, spec, "fault.bridge", NetworkCut(island | both, rest))


def _split(world: World, spec: FaultSpec, rng: random.Random) -> tuple[frozenset[str], frozenset[str]]:
    labels = [sim_node.label for sim_node in world.nodes]
    island = frozenset(rng.sample(labels, max(1, round(spec.share * len(labels)))))
    return island, frozenset(labels) - island


async def _cut(world: World, spec: FaultSpec, event: str, cut: NetworkCut) -> None:
    world.say(event, island=len(cut.senders), rest=len(cut.receivers))
    world.network.reach.cuts.append(cut)
    try:
        await world.pass_s(spec.seconds)
    finally:
        world.network.reach.heal(cut)
    await _whole_again(world)


async def _whole_again(world: World) -> None:
    """A minute later all are one swarm, unless the network is cut or the directory gone then, or came back so late that
    nodes cannot have announced themselves and read the others (everything, seed 216: .07 s before)."""
    await asyncio.sleep(WHOLE_S)
    parts = world.islands()
    announced_s = AHEAD_PERIODS * world.scenario.manifest.limits.announce_period_s
    late = world.loop.time() < world.dht.back_s + announced_s
    if len(parts) > 1 and not (world.network.reach.cuts or world.dht.down or world.dht.away or late):
        apart = ", ".join(f"{len(part)} machines" for part in parts)
        labels = sorted(sorted(parts, key=len)[0])
        world.laws.breaks("one swarm within a minute of healing", apart, *labels)


async def skew(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A wall clock is up to `factor` (0: 2) seconds wrong for `seconds`."""
    if (victim := world.victim(rng)) is not None:
        victim.clock.skew_s = (spec.factor or 2.0) * (2.0 * rng.random() - 1.0)
        world.say("fault.skew", victim, skew_s=victim.clock.skew_s)
        await world.pass_s(spec.seconds)
        victim.clock.skew_s = 0.0


async def corrupt(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A node sends damaged chunks of its state for `seconds`."""

    def forge(method: str, header: object, tensors: Sequence[WireTensor]) -> Sequence[WireTensor]:
        if method != "chunk" or not tensors:
            return tensors
        data = bytearray(tensors[0].data)
        data[int(rng.random() * len(data))] ^= 0x40
        return [WireTensor(tensors[0].dtype, tensors[0].shape, data)]

    await _lie(world, spec, rng, "corrupt", forge)


async def liar(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A node sends false tensors, in one of `modes`, for `seconds` (0: until the end of the storm)."""
    mode = spec.modes[int(rng.random() * len(spec.modes))]
    await _lie(world, spec, rng, mode, forger(mode))


def forger(mode: str) -> Forge:
    """Falsifies fake tensors of activations, gradients and packets."""
    kept: dict[str, Sequence[WireTensor]] = {}

    def forge(method: str, header: object, tensors: Sequence[WireTensor]) -> Sequence[WireTensor]:
        if method not in ("process", "exchange", "fallback") or not tensors:
            return tensors
        if mode == "stale" and method != "process":
            return kept.setdefault(f"{method} {type(header).__name__}", tensors)
        if mode == "shape":
            wrong = (*tensors[0].shape[:-1], max(1, tensors[0].shape[-1] // 2))
            return [WireTensor(tensors[0].dtype, wrong, repeated(bytes(MARK.size), _nbytes(tensors[0], wrong)))]
        if method == "process":  # these tensors hold the mark by which the laws recognise a microbatch
            return [_spoilt(tensors[0], b"\xff" * MARK.size), *tensors[1:]] if mode == "nan" else tensors
        row = ROW.unpack(first(tensors[0].data, ROW_BYTES))
        factor = {"huge": 1e30, "nan": float("nan"), "sign": -1.0, "zero": 0.0}[mode]
        return [_spoilt(t, ROW.pack(*row[:2], *(factor * value for value in row[2:]))) for t in tensors]

    return forge


def _nbytes(tensor: WireTensor, shape: tuple[int, ...]) -> int:
    return tensor.nbytes * shape[-1] // tensor.shape[-1]


def _spoilt(tensor: WireTensor, row: bytes) -> WireTensor:
    return WireTensor(tensor.dtype, tensor.shape, repeated(row, tensor.nbytes), tensor.codec)


async def _lie(world: World, spec: FaultSpec, rng: random.Random, mode: str, forge: Forge) -> None:
    victim = world.victim(rng)
    if victim is None or victim.transport is None:
        return
    world.say("fault.liar", victim, mode=mode)
    transport = victim.transport
    victim.liar = mode
    world.laws.excused.add(victim.label)
    transport.forge = forge
    await world.pass_s(spec.seconds or world.scenario.seconds)
    transport.forge = None


async def overclaim(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A node claims to have fed `factor` (0: 10^12) samples more than it has; after `seconds` its process dies and
    restarts."""
    victim = world.victim(rng)
    if victim is None or victim.node is None or not world.spares(victim):
        return
    world.say("fault.overclaim", victim)
    world.laws.excused.add(victim.label)
    victim.liar = "overclaim"
    victim.node.presence.progress.add(victim.node.me, int(spec.factor or 1e12))
    await world.pass_s(spec.seconds)
    victim.kill()
    await world.restart(victim, spec.back_s)


async def full(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """A disk is full for `seconds`."""
    if (victim := world.victim(rng)) is not None:
        world.say("fault.full", victim)
        capacity = victim.disk.capacity
        victim.disk.capacity = 0
        await world.pass_s(spec.seconds)
        victim.disk.capacity = capacity


async def blackout(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """All machines die at once, and the shared disk loses its last `count` writes; after `back_s` all restart from the
    newest complete checkpoint."""
    struck = world.living()
    world.say("fault.blackout", *struck)
    for sim_node in struck:
        sim_node.kill(silent=True)
    world.bucket.betray(spec.count)
    world.dht.clear()
    await world.pass_s(max(spec.back_s, DARK_S))
    await world.resume(struck)


async def forget(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """The directory loses `share` of a stage's records."""
    stage = int(rng.random() * world.scenario.manifest.pipeline.stages)
    world.say("fault.forget", of_stage=stage, records=world.dht.forget(stage, spec.share))


async def bootstrap_gone(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """The directory can neither store nor return records for `seconds`."""
    world.say("fault.bootstrap_gone")
    world.dht.down = True
    await world.pass_s(spec.seconds)
    world.dht.down = False
    world.dht.back_s = world.loop.time()


async def everyone_leaves(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """All machines are told to leave, one after the other within `seconds`; `back_s` after the last has left they start
    again with the disks they had."""
    struck = world.living()
    world.say("fault.everyone_leaves", *struck)
    for sim_node in struck:
        sim_node.leave()
        await asyncio.sleep(spec.seconds / len(struck))
    if tasks := [sim_node.task for sim_node in struck if sim_node.task is not None]:
        await asyncio.wait(tasks)
    world.dht.clear()
    await asyncio.sleep(max(spec.back_s, DARK_S))
    world.begin(struck)


async def meeting_point_gone(world: World, spec: FaultSpec, rng: random.Random) -> None:
    """The bootstrap dies and comes back after `seconds` with an empty memory; `count` machines join as soon as it
    answers. A minute later all must be one swarm."""
    world.say("fault.meeting_point_gone", count=spec.count)
    world.dht.lose_meeting_point()
    kinds = world.scenario.fleet
    for _ in range(spec.count):
        world.join(kinds[int(rng.random() * len(kinds))])
    await asyncio.sleep(spec.seconds)
    world.dht.away = False
    await _whole_again(world)


FAULTS: Mapping[str, Strike] = {
    strike.__name__: strike
    for strike in (
        crash,
        gone,
        preempt,
        reclaim,
        exodus,
        crowd,
        stage_lost,
        slow,
        hang,
        gray,
        clog,
        partition,
        one_way,
        bridge,
        skew,
        corrupt,
        liar,
        overclaim,
        full,
        blackout,
        forget,
        bootstrap_gone,
        everyone_leaves,
        meeting_point_gone,
    )
}
assert tuple(FAULTS) == FAULT_NAMES

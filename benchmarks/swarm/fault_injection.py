"""A swarm of real processes, and the real faults that can be applied to it. Each fault waits for its own recovery."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fake_cloud import FakeMetadata
from benchmarks.swarm.harness import FINE_S, SwarmHarness, fleet_in, resting, trains
from benchmarks.swarm.laws import told
from swarmnode.app.local.child import Child, NodePlan
from swarmnode.app.local.fleet import Note
from swarmnode.app.local.summary import totals
from swarmnode.base.errors import LocalFault
from swarmnode.base.ports import Clock
from swarmnode.run.manifest import Manifest

NODES = 7
STAGES = 3
FREEZE_S = 6.0  # longer than the timeout of a ping
SLOW_LINK = "210kbit"  # the least that a node takes
SAMPLES_BETWEEN = 64  # trained between two faults, so that each is survived on its own

CLOUDS = ("aws", "gcp", "azure")
NOTICE_S = 60.0
LOAD = "10%"  # of each device: a run mostly waits, and a swarm at full speed would take the machine from other programs


class ChaosRun(SwarmHarness):
    """A swarm and the faults applied to it."""

    def __init__(self, folder: Path, manifest: Manifest, chance: random.Random, note: Note, clock: Clock) -> None:
        super().__init__(fleet_in(folder, manifest, NODES, note, self.command))
        self.chance = chance
        self.note = note
        self.clock = clock
        self.kills = 0
        self.stood_still_s: list[float] = []
        self.lost_s: list[float] = []  # seconds from a stage's death to the next useful step
        self.done_to: list[str] = []  # faults, in order
        self.clouds: dict[str, tuple[str, str, FakeMetadata]] = {}  # by node: cloud, URL, its fake
        self.sent_away: set[str] = set()  # nodes that were told to leave
        self._joining: list[Child] = []

    async def suffer(self, what: str) -> None:
        """Apply one of FAULTS, then wait until training progresses."""
        begun = self.clock.unix_s()
        await FAULTS[what](self)
        self.done_to.append(what)
        await self.progress(SAMPLES_BETWEEN, f"after: {what}")
        self.note(f"{what}: {self.clock.unix_s() - begun:.1f} s")

    async def meanwhile(self) -> None:
        """Restart newcomers that ended because all their bootstrap peers had died: their volunteer tries again."""
        for child in [child for child in self._joining if not child.alive and child.reason.startswith("exit 21")]:
            dead = {c.ready.peer_id for c in self.fleet.everybody if c.ready is not None and not c.alive}
            if all(address.rpartition("/")[2] in dead for address in child.plan.bootstraps):
                self._joining.remove(child)
                await self.newcomer(child)

    async def spare(self, stage: int) -> Child:
        """A random replica of `stage`, which has at least one other."""
        await self.fleet.poll()
        if len(self.training(stage)) < 2:
            await self.whole()
        if len(self.training(stage)) < 2:  # kills outpaced rebalancing: one more volunteer joins
            await self.newcomer(self.fleet.nodes[-1])
        await self.until(lambda: len(self.training(stage)) > 1, f"two replicas of stage {stage}")
        return self.chance.choice(self.training(stage))

    async def anyone(self) -> Child:
        """Like `spare`, from any stage that has a spare replica."""

        def stages() -> list[int]:
            return [stage for stage in range(STAGES) if len(self.training(stage)) > 1]

        await self.until(lambda: bool(stages()), "a stage with two replicas")
        return await self.spare(self.chance.choice(stages()))

    async def kill(self, victim: Child, told: str) -> None:
        """SIGKILL a node, measure the time to the next useful step, then start a newcomer in its place."""
        loop = asyncio.get_running_loop()
        await self.fleet.poll()
        before = self.done()
        begun = loop.time()
        victim.signal(signal.SIGKILL, told=told)
        self.kills += 1
        await self.until(lambda: self.done() > before, f"a useful step after {told}", FINE_S)
        self.stood_still_s.append(loop.time() - begun)
        await self.newcomer(victim)

    async def newcomer(self, gone: Child) -> Child:
        """Start a fresh node, on a machine of one of three clouds in turn."""
        called = f"node-{len(self.fleet.nodes):02d}"
        fake = FakeMetadata(self.clock, f"vm-{called}", NOTICE_S)
        self.clouds[called] = (CLOUDS[len(self.clouds) % len(CLOUDS)], await fake.start(), fake)
        await self.fleet.replace(gone)
        self._joining.append(self.fleet.nodes[-1])
        return self.fleet.nodes[-1]

    def command(self, plan: NodePlan) -> Sequence[str]:
        """Command line of a node, with its cloud's metadata service."""
        if plan.name in self.clouds:
            cloud, url, _ = self.clouds[plan.name]
            plan = replace(plan, flags=("--notice", cloud, "--notice-url", url))
        return resting(plan, LOAD)

    async def close(self) -> None:
        for _, _, fake in self.clouds.values():
            await fake.close()

    async def whole(self) -> None:
        """Wait until every newcomer trains, or was ended by a fault."""
        await self.until(lambda: all(trains(child) or not child.alive for child in self._joining), "newcomers train")
        for child in self._joining:
            if not child.alive and child.told is None and child.name not in self.sent_away:
                raise LocalFault(f"{child.name} ended: {child.reason}")
        self._joining = [child for child in self._joining if child.alive and not child.trained]


async def kill_replica(life: ChaosRun) -> None:
    await life.kill(await life.spare(life.chance.choice(range(1, STAGES))), "kill of a replica")


async def kill_feeder(life: ChaosRun) -> None:
    await life.kill(await life.spare(0), "kill of a feeder")


async def kill_partner(life: ChaosRun) -> None:
    """Kill a replica at the end of a round, while exchanges are in progress."""
    victim = await life.anyone()
    await life.fleet.poll()
    at = totals(life.fleet.facts()).round
    await life.until(lambda: totals(life.fleet.facts()).round > at, "the next round")
    await life.kill(victim, "kill of a pair partner")


async def kill_donor(life: ChaosRun) -> None:
    """Kill the donor of a newcomer's state, as soon as the newcomer names it."""
    gone = await life.anyone()
    await life.kill(gone, "kill of a replica")
    newcomer = life.fleet.nodes[-1]
    peers = {child.status.peer_id: child for child in life.fleet.nodes if child.status is not None}

    def donor() -> Child | None:
        said = told(newcomer.plan.home, "state.donor")
        return peers.get(said[-1]["peer"]) if said else None

    await life.until(lambda: donor() is not None or newcomer.trained, "a newcomer names its donor")
    victim = donor()
    if victim is not None and victim.alive and len(life.training(victim.stage)) > 1:
        await life.kill(victim, "kill of a donor")


async def kill_newcomer(life: ChaosRun) -> None:
    """Kill a node while it joins: others must not wait for it."""
    gone = await life.anyone()
    await life.kill(gone, "kill of a replica")
    newcomer = life.fleet.nodes[-1]
    await life.until(lambda: newcomer.ready is not None, "a newcomer can be reached")
    await life.kill(newcomer, "kill of a newcomer")


async def lose_stage(life: ChaosRun, stage: int) -> None:
    """Kill all replicas of `stage` at once; newcomers find it lost and restore it."""
    loop = asyncio.get_running_loop()
    await life.whole()
    # By now the snapshot nodes have had time to take a snapshot of the stage.
    await life.until(lambda: life.keeps(stage), f"a snapshot of stage {stage}")
    victims = [child for child in life.fleet.alive if child.stage == stage]
    begun = loop.time()
    for victim in victims:
        victim.signal(signal.SIGKILL, told=f"kill of all of stage {stage}")
        life.kills += 1
    for victim in victims:
        await life.newcomer(victim)
    await life.until(lambda: bool(life.training(stage)), f"stage {stage} is served again", FINE_S)
    before = life.done()
    await life.until(lambda: life.done() > before, f"a useful step with the new stage {stage}", FINE_S)
    life.lost_s.append(loop.time() - begun)


async def kill_daemon(life: ChaosRun) -> None:
    """Kill the p2pd of a node: the node restarts it, and calls continue."""
    victim = await life.anyone()
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(victim.pid).children(recursive=True):
            if "p2pd" in process.name():
                process.send_signal(signal.SIGKILL)
                life.kills += 1
    before = victim.status.inner_steps if victim.status is not None else 0
    await life.until(
        lambda: not victim.alive or (victim.status is not None and victim.status.inner_steps > before + 1),
        f"{victim.name} works again with a new p2pd",
    )
    if not victim.alive:
        raise LocalFault(f"{victim.name} ended with its p2pd: {victim.reason}")


async def kill_bootstrap(life: ChaosRun) -> None:
    """Kill the bootstrap, once per run; newcomers also get addresses of living nodes."""
    bootstrap = life.fleet.bootstrap
    if bootstrap is not None and bootstrap.alive:
        bootstrap.signal(signal.SIGKILL, told="kill of the bootstrap")
        life.kills += 1
        await life.until(lambda: not bootstrap.alive, "the bootstrap is gone")


async def drain(life: ChaosRun) -> None:
    """SIGTERM a node: it finishes its pending work, saves and leaves."""
    victim = await life.anyone()
    life.sent_away.add(victim.name)
    victim.signal(signal.SIGTERM)
    await life.until(lambda: not victim.alive, f"{victim.name} leaves when told")
    if victim.reason != "left":
        raise LocalFault(f"{victim.name} got SIGTERM and ended: {victim.reason}")
    await life.newcomer(victim)


async def preempt(life: ChaosRun) -> None:
    """Give a node its cloud's preemption notice: it hands over its work and leaves before the time is over."""
    await life.whole()

    def able() -> list[Child]:
        spare = [child for stage in range(STAGES) if len(found := life.training(stage)) > 1 for child in found]
        return [child for child in spare if child.name in life.clouds]

    if not any(child.name in life.clouds for child in life.fleet.alive):
        gone = await life.anyone()
        await life.kill(gone, "kill of a replica")  # a node on a cloud takes its place
    await life.until(lambda: bool(able()), "a node on a cloud that another replica outlives")
    victim = life.chance.choice(able())
    life.sent_away.add(victim.name)
    await life.clouds[victim.name][2].say("preempt")
    await life.until(lambda: not victim.alive, f"{victim.name} leaves when its cloud says so")
    if not victim.reason.startswith("preempted"):
        raise LocalFault(f"{victim.name} got its cloud's notice and ended: {victim.reason}")
    await life.newcomer(victim)


async def freeze(life: ChaosRun) -> None:
    """SIGSTOP a node for longer than a ping's time-out, then SIGCONT: routers avoid it meanwhile, and use it again
    afterwards."""
    victim = await life.anyone()
    before = life.done()
    with _stopped([psutil.Process(victim.pid)]):
        await asyncio.sleep(FREEZE_S)
        await life.until(lambda: life.done() > before, "steps while a node is frozen")
    await _works_again(life, victim)


async def cut_off(life: ChaosRun) -> None:
    """Stop the p2pd of a node for a while: its connections break, the node survives."""
    victim = await life.anyone()
    before = life.done()
    children = [p for p in psutil.Process(victim.pid).children(recursive=True) if "p2pd" in p.name()]
    with _stopped(children):
        await asyncio.sleep(FREEZE_S)
        await life.until(lambda: life.done() > before, "steps while a node is cut off")
    await _works_again(life, victim)


async def slow(life: ChaosRun) -> None:
    """Give a node a fifth of its CPU time: it gets less work, and no other node waits for it."""
    victim = await life.anyone()
    before = life.done()
    for _ in range(15):
        with _stopped([psutil.Process(victim.pid)]):
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.05)
    await life.until(lambda: life.done() > before, "steps while a node is slow")


async def slow_link(life: ChaosRun) -> None:
    """Reduce a node's uplink to the rate of a voice call: other nodes get its work, and it gets more again
    afterwards."""
    victim = await life.anyone()
    await victim.limit("max-up", SLOW_LINK)
    await life.progress(4 * SAMPLES_BETWEEN, "while a link is slow")
    await victim.limit("max-up", "none")
    await _works_again(life, victim)


async def full_disk(life: ChaosRun) -> None:
    """Stop a node's files from growing: it continues to train, and leaves cleanly although it cannot save."""
    victim = await life.anyone()
    psutil.Process(victim.pid).rlimit(psutil.RLIMIT_FSIZE, (1, psutil.RLIM_INFINITY))
    await life.progress(SAMPLES_BETWEEN, "while a node's disk is full")
    victim.told = "left without saving"
    victim.signal(signal.SIGTERM)
    await life.until(lambda: not victim.alive, f"{victim.name} leaves though its disk is full")
    await life.newcomer(victim)


FAULTS: dict[str, Callable[[ChaosRun], Awaitable[None]]] = {
    "replica killed": kill_replica,
    "feeder killed": kill_feeder,
    "partner killed": kill_partner,
    "donor killed": kill_donor,
    "newcomer killed": kill_newcomer,
    "first stage killed": partial(lose_stage, stage=0),
    "middle stage killed": partial(lose_stage, stage=1),
    "last stage killed": partial(lose_stage, stage=STAGES - 1),
    "p2pd killed": kill_daemon,
    "bootstrap killed": kill_bootstrap,
    "told to go": drain,
    "preempted by its cloud": preempt,
    "frozen": freeze,
    "cut off": cut_off,
    "slow": slow,
    "slow link": slow_link,
    "disk full": full_disk,
}


@contextlib.contextmanager
def _stopped(processes: Sequence[psutil.Process]) -> Any:
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


async def _works_again(life: ChaosRun, child: Child) -> None:
    before = child.status.inner_steps if child.status is not None else 0
    await life.until(
        lambda: not child.alive or (child.status is not None and child.status.inner_steps > before),
        f"{child.name} works again",
    )
    if not child.alive:
        raise LocalFault(f"{child.name} ended: {child.reason}")

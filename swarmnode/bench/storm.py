"""One swarm of real processes, and the real faults that can be done to it: each says what it waits for afterwards."""

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

from swarmnode.bench.laws import told
from swarmnode.bench.watching import FINE_S, Watched, fleet_in, resting, trains
from swarmnode.cloud.fake import FakeMetadata
from swarmnode.errors import LocalFault
from swarmnode.local.child import Child, NodePlan
from swarmnode.local.fleet import Note
from swarmnode.local.summary import totals
from swarmnode.manifest import Manifest
from swarmnode.ports import Clock

NODES, STAGES = 7, 3
FREEZE_S = 6.0  # longer than a ping's time-out
SLOW_LINK = "100kbit"
SAMPLES_BETWEEN = 64  # trained between two faults: each of them must be survived, not only all together

CLOUDS = ("aws", "gcp", "azure")
NOTICE_S = 60.0
LOAD = "10%"  # of each device: a life is mostly waiting, and a swarm at full speed takes the machine from others


class Life(Watched):
    """One swarm and what was done to it."""

    def __init__(self, folder: Path, manifest: Manifest, chance: random.Random, note: Note, clock: Clock) -> None:
        super().__init__(fleet_in(folder, manifest, NODES, note, self.command))
        self.chance = chance
        self.note = note
        self.clock = clock
        self.kills = 0
        self.stood_still_s: list[float] = []
        self.lost_s: list[float] = []  # seconds from a stage's death to the next useful step
        self.done_to: list[str] = []  # the faults, in their order
        self.clouds: dict[str, tuple[str, str, FakeMetadata]] = {}  # by node: cloud, URL, its fake
        self.sent_away: set[str] = set()  # nodes that were told to go
        self._joining: list[Child] = []

    async def suffer(self, what: str) -> None:
        """One of FAULTS, and what must be trained after it."""
        begun = self.clock.unix_s()
        await FAULTS[what](self)
        self.done_to.append(what)
        await self.progress(SAMPLES_BETWEEN, f"after: {what}")
        self.note(f"{what}: {self.clock.unix_s() - begun:.1f} s")

    async def meanwhile(self) -> None:
        """A newcomer that ended because all it was told of had died meanwhile: its volunteer tries again."""
        for child in [child for child in self._joining if not child.alive and child.reason.startswith("exit 21")]:
            dead = {c.ready.peer_id for c in self.fleet.everybody if c.ready is not None and not c.alive}
            if all(address.rpartition("/")[2] in dead for address in child.plan.bootstraps):
                self._joining.remove(child)
                await self.newcomer(child)

    async def spare(self, stage: int) -> Child:
        """A replica of `stage` that another one outlives, drawn by chance."""
        await self.fleet.poll()
        if len(self.training(stage)) < 2:
            await self.whole()
        if len(self.training(stage)) < 2:  # kills came faster than nodes move: one more volunteer joins
            await self.newcomer(self.fleet.nodes[-1])
        await self.until(lambda: len(self.training(stage)) > 1, f"two replicas of stage {stage}")
        return self.chance.choice(self.training(stage))

    async def anyone(self) -> Child:
        """As `spare`, of whatever stage has one."""

        def stages() -> list[int]:
            return [stage for stage in range(STAGES) if len(self.training(stage)) > 1]

        await self.until(lambda: bool(stages()), "a stage with two replicas")
        return await self.spare(self.chance.choice(stages()))

    async def kill(self, victim: Child, told: str) -> None:
        """SIGKILL, then the time to the next useful step, then a newcomer in its place."""
        loop = asyncio.get_running_loop()
        await self.fleet.poll()
        before, begun = self.done(), loop.time()
        victim.signal(signal.SIGKILL, told=told)
        self.kills += 1
        await self.until(lambda: self.done() > before, f"a useful step after {told}", FINE_S)
        self.stood_still_s.append(loop.time() - begun)
        await self.newcomer(victim)

    async def newcomer(self, gone: Child) -> Child:
        """A fresh node, on a machine of one of three clouds in turn."""
        called = f"node-{len(self.fleet.nodes):02d}"
        fake = FakeMetadata(self.clock, f"vm-{called}", NOTICE_S)
        self.clouds[called] = (CLOUDS[len(self.clouds) % len(CLOUDS)], await fake.start(), fake)
        await self.fleet.replace(gone)
        self._joining.append(self.fleet.nodes[-1])
        return self.fleet.nodes[-1]

    def command(self, plan: NodePlan) -> Sequence[str]:
        """The command line of a node, told of its cloud's metadata service."""
        if plan.name in self.clouds:
            cloud, url, _ = self.clouds[plan.name]
            plan = replace(plan, flags=("--notice", cloud, "--notice-url", url))
        return resting(plan, LOAD)

    async def close(self) -> None:
        for _, _, fake in self.clouds.values():
            await fake.close()

    async def whole(self) -> None:
        """Until every newcomer has become a replica, or ended by our hand."""
        await self.until(lambda: all(trains(child) or not child.alive for child in self._joining), "newcomers train")
        for child in self._joining:
            if not child.alive and child.told is None and child.name not in self.sent_away:
                raise LocalFault(f"{child.name} ended: {child.reason}")
        self._joining = [child for child in self._joining if child.alive and not child.trained]


async def kill_replica(life: Life) -> None:
    await life.kill(await life.spare(life.chance.choice(range(1, STAGES))), "kill of a replica")


async def kill_feeder(life: Life) -> None:
    await life.kill(await life.spare(0), "kill of a feeder")


async def kill_partner(life: Life) -> None:
    """A replica, in the very moment when a round has ended: exchanges are under way."""
    victim = await life.anyone()
    await life.fleet.poll()
    at = totals(life.fleet.facts()).round
    await life.until(lambda: totals(life.fleet.facts()).round > at, "the next round")
    await life.kill(victim, "kill of a pair partner")


async def kill_donor(life: Life) -> None:
    """Whoever gives a newcomer its state, as soon as the newcomer says who that is."""
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


async def kill_newcomer(life: Life) -> None:
    """A node that is still joining: others must not wait for it."""
    gone = await life.anyone()
    await life.kill(gone, "kill of a replica")
    newcomer = life.fleet.nodes[-1]
    await life.until(lambda: newcomer.ready is not None, "a newcomer can be reached")
    await life.kill(newcomer, "kill of a newcomer")


async def lose_stage(life: Life, stage: int) -> None:
    """All replicas of `stage` at once; newcomers find it lost and bring it back."""
    loop = asyncio.get_running_loop()
    await life.whole()
    # Whoever keeps a snapshot of it for this case has had the time to take one.
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


async def kill_daemon(life: Life) -> None:
    """The p2pd of a node: it is started again by the node, and calls go on."""
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


async def kill_bootstrap(life: Life) -> None:
    """Only once in a life, and newcomers are told of living nodes beside it."""
    bootstrap = life.fleet.bootstrap
    if bootstrap is not None and bootstrap.alive:
        bootstrap.signal(signal.SIGKILL, told="kill of the bootstrap")
        life.kills += 1
        await life.until(lambda: not bootstrap.alive, "the bootstrap is gone")


async def drain(life: Life) -> None:
    """SIGTERM: the node finishes what it holds, saves and leaves."""
    victim = await life.anyone()
    life.sent_away.add(victim.name)
    victim.signal(signal.SIGTERM)
    await life.until(lambda: not victim.alive, f"{victim.name} leaves when told")
    if victim.reason != "left":
        raise LocalFault(f"{victim.name} was told by SIGTERM and ended: {victim.reason}")
    await life.newcomer(victim)


async def preempt(life: Life) -> None:
    """A cloud's notice: the node brings home what it has and is gone before its time."""
    await life.whole()

    def able() -> list[Child]:
        spare = [child for stage in range(STAGES) if len(found := life.training(stage)) > 1 for child in found]
        return [child for child in spare if child.name in life.clouds]

    if not any(child.name in life.clouds for child in life.fleet.alive):
        gone = await life.anyone()
        await life.kill(gone, "kill of a replica")  # so that a node on a cloud takes its place
    await life.until(lambda: bool(able()), "a node on a cloud that another replica outlives")
    victim = life.chance.choice(able())
    life.sent_away.add(victim.name)
    await life.clouds[victim.name][2].say("preempt")
    await life.until(lambda: not victim.alive, f"{victim.name} leaves when its cloud says so")
    if not victim.reason.startswith("preempted"):
        raise LocalFault(f"{victim.name} was told by its cloud to go and ended: {victim.reason}")
    await life.newcomer(victim)


async def freeze(life: Life) -> None:
    """SIGSTOP for longer than a ping waits, then SIGCONT: routed around meanwhile, taken back afterwards."""
    victim = await life.anyone()
    before = life.done()
    with _stopped([psutil.Process(victim.pid)]):
        await asyncio.sleep(FREEZE_S)
        await life.until(lambda: life.done() > before, "steps while a node is frozen")
    await _works_again(life, victim)


async def cut_off(life: Life) -> None:
    """The p2pd of a node stopped for a while: its links are dead, it is not."""
    victim = await life.anyone()
    before = life.done()
    children = [p for p in psutil.Process(victim.pid).children(recursive=True) if "p2pd" in p.name()]
    with _stopped(children):
        await asyncio.sleep(FREEZE_S)
        await life.until(lambda: life.done() > before, "steps while a node is cut off")
    await _works_again(life, victim)


async def slow(life: Life) -> None:
    """A node that gets a fifth of its time: it gets less work, and nobody waits for it."""
    victim = await life.anyone()
    before = life.done()
    for _ in range(15):
        with _stopped([psutil.Process(victim.pid)]):
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.05)
    await life.until(lambda: life.done() > before, "steps while a node is slow")


async def slow_link(life: Life) -> None:
    """A node whose uplink falls to what a voice call takes: others get its work, and it has more again afterwards."""
    victim = await life.anyone()
    await victim.limit("max-up", SLOW_LINK)
    await life.progress(4 * SAMPLES_BETWEEN, "while a link is slow")
    await victim.limit("max-up", "none")
    await _works_again(life, victim)


async def full_disk(life: Life) -> None:
    """A node whose files may not grow: it goes on training and leaves all the same, though it could not save."""
    victim = await life.anyone()
    psutil.Process(victim.pid).rlimit(psutil.RLIMIT_FSIZE, (1, psutil.RLIM_INFINITY))
    await life.progress(SAMPLES_BETWEEN, "while a node's disk is full")
    victim.told = "left without saving"
    victim.signal(signal.SIGTERM)
    await life.until(lambda: not victim.alive, f"{victim.name} leaves though its disk is full")
    await life.newcomer(victim)


FAULTS: dict[str, Callable[[Life], Awaitable[None]]] = {
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


async def _works_again(life: Life, child: Child) -> None:
    before = child.status.inner_steps if child.status is not None else 0
    await life.until(
        lambda: not child.alive or (child.status is not None and child.status.inner_steps > before),
        f"{child.name} works again",
    )
    if not child.alive:
        raise LocalFault(f"{child.name} ended: {child.reason}")

"""The node processes of one local swarm: start, watch, kill and end a bootstrap and its nodes."""

from __future__ import annotations

import asyncio
import math
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.app.local.child import LOOPBACK, STDERR_NAME, Child, NodePlan, node_command, tail
from swarmnode.app.local.summary import NodeFacts
from swarmnode.base.errors import LocalFault
from swarmnode.base.ids import seeded, stage_name
from swarmnode.keep.recovery import checkpoint
from swarmnode.run.manifest import Manifest

START_TIMEOUT_S = 120.0
"""Time for a process to become reachable. Eight at once took 17 s on two cores (measured)."""

LEAVE_TIMEOUT_S = 45.0
"""Derived: time for feeders, then for the others, to leave: an exchange in progress (20 s by the manifest's default),
then saving."""

TERM_TIMEOUT_S = 10.0
REAP_TIMEOUT_S = 10.0
TICK_S = 0.1
NEIGHBOURS_MAX = 2
"""Guess: living nodes that a replacement is told of, besides the bootstrap, which may be dead."""

ANY_PORT = re.compile(r"/[0-9]+\Z")  # the port that ends a listen address
Command = Callable[[NodePlan], Sequence[str]]
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The processes to start. `command` makes the command line of a process; tests replace it."""

    folder: Path
    manifest: Path
    nodes: int
    stages: int
    cache: Path
    seed: int = 0
    command: Command = node_command
    checkpoints: str = ""
    data_root: Path | None = None  # folder of the run's data set or tokenizer
    settings: Manifest | None = None  # the manifest's: name the final checkpoint, and tell what is slow
    resume: str = ""
    start_timeout_s: float = START_TIMEOUT_S
    leave_timeout_s: float = LEAVE_TIMEOUT_S
    stage_of: tuple[int, ...] = ()  # of each node, in order; empty: round robin
    dashboard_port: int | None = None  # of the page that the bootstrap shows
    listen: str = LOOPBACK  # of the bootstrap; nodes take any port at the same host
    line_for_others: Callable[[Path], str] | None = None  # the line with which other machines join, by its home
    devices: tuple[str, ...] = ()  # that nodes are spread over, in turn; empty: each takes what it finds


def choose_victim(nodes: Sequence[NodeFacts], rng: random.Random) -> tuple[NodeFacts | None, str]:
    """A node to kill, uniformly among those that train and whose stage keeps another training replica.

    The last replica of a stage is spared, because its state could not be recovered.
    """
    replicas = Counter(node.stage for node in nodes if node.training)
    eligible = [node for node in nodes if node.training and replicas[node.stage] > 1]
    if not eligible:
        return None, "every stage has at most one replica that trains"
    return rng.choice(eligible), f"one of {len(eligible)} that may be killed"


class Fleet:
    """All processes of one `up`, in the order of their start. `note` is called with messages for the user."""

    def __init__(self, plan: FleetPlan, note: Note) -> None:
        self.nodes: list[Child] = []
        self.bootstrap: Child | None = None
        self.killed = 0
        self._plan = plan
        self._note = note
        self._rng = seeded(plan.seed, "kill")
        self._buried: set[str] = set()

    @property
    def everybody(self) -> list[Child]:
        return [*self.nodes, *([self.bootstrap] if self.bootstrap else [])]

    @property
    def page(self) -> str:
        """The URL of the run's page; "" if there is none."""
        return self.bootstrap.ready.dashboard if self.bootstrap is not None and self.bootstrap.ready is not None else ""

    @property
    def alive(self) -> list[Child]:
        return [child for child in self.nodes if child.alive]

    def facts(self) -> list[NodeFacts]:
        """The known facts of each node, in the order of their start."""
        return [NodeFacts(child.name, child.stage, child.status, child.reason) for child in self.nodes]

    async def start(self, stopping: asyncio.Event) -> bool:
        """Start the bootstrap, then all nodes at once; return True once all are reachable, False if told to stop
        before.

        Raises LocalFault with the process's own last line if one ends or is not ready in time; the error that its exit
        code stands for if it cannot work here at all.
        """
        self.bootstrap = await self._spawn("bootstrap", None, bootstrap=True)
        if not await self._ready([self.bootstrap], stopping):
            return False
        if self.page:
            self._note(f"dashboard {self.page}")
        if self._plan.line_for_others is not None:
            self._note(self._plan.line_for_others(self.bootstrap.plan.home))
        for index in range(self._plan.nodes):
            stage = self._plan.stage_of[index] if self._plan.stage_of else index % self._plan.stages
            await self._join(stage, self._plan.resume)
        return await self._ready(self.nodes, stopping)

    async def poll(self) -> list[Child]:
        """Query all living processes concurrently; return those that ended since the last call."""
        async with asyncio.TaskGroup() as group:
            for child in self.everybody:
                if child.alive:
                    group.create_task(child.poll())
        return self._bury()

    def kill_one(self) -> Child | None:
        """`kill -9` a node chosen by `choose_victim`; None if no node may be killed now."""
        victim, _ = choose_victim(self.facts(), self._rng)
        if victim is None:
            return None
        child = next(child for child in self.nodes if child.name == victim.name)
        child.signal(signal.SIGKILL, told="killed by --kill")
        self.killed += 1
        self._note(
            f"kill -9 {child.name} ({'no stage' if child.stage is None else stage_name(child.stage)}, pid {child.pid})"
        )
        return child

    async def replace(self, gone: Child) -> None:
        """Start a new node in place of `gone`; it chooses its stage itself."""
        child = await self._join(None, resume="")  # peers have the current state
        self._note(f"{child.name} joins in the place of {gone.name}")

    async def stop(self, reason: str) -> None:
        """Ask all nodes to leave and wait for their ends by pid: SIGTERM, then SIGKILL, for those that do not.

        Feeders go first, while the other stages still serve what is in flight, and count in the final checkpoint what
        all of them fed. The bootstrap goes last. Statuses are read as long as nodes answer. No process is left running.
        """
        await self.poll()
        label = self._final_label()
        savers = {child.stage: child for child in self.nodes if child.alive and child.trained} if label else {}
        feeders = [child for child in self.nodes if child.stage == 0]
        for wave in (feeders, [child for child in self.nodes if child not in feeders]):
            async with asyncio.TaskGroup() as group:
                for child in wave:
                    if child.alive:
                        last = savers.get(child.stage) is child
                        group.create_task(child.leave(reason, label if last else ""))
            await self._wait(wave, self._plan.leave_timeout_s)
            await self._terminate(wave)
        if self.bootstrap is not None:
            await self._terminate([self.bootstrap])
        await self.reap()

    def _final_label(self) -> str:
        """The label of the final checkpoint, saved by one replica of each stage; "" if there is none to save.

        It is named after the current round: the checkpoint due at its end may still be saved, and must not be the later
        one.
        """
        said = [child.status for child in self.nodes if child.status is not None]
        trained = max((status.samples_total for status in said), default=0)
        if not self._plan.checkpoints or trained == 0 or self._plan.settings is None:
            return ""
        return checkpoint.label(math.ceil(trained / self._plan.settings.gossip.round_samples), final=True)

    def kill(self) -> None:
        """Send SIGKILL to all processes."""
        for child in self.everybody:
            child.kill()

    async def reap(self) -> None:
        """Kill all remaining processes and wait for each."""
        self.kill()
        async with asyncio.timeout(REAP_TIMEOUT_S):
            for child in self.everybody:
                await child.wait(REAP_TIMEOUT_S)
        self._bury()

    async def _spawn(self, name: str, stage: int | None, *, bootstrap: bool = False, resume: str = "") -> Child:
        plan = NodePlan(
            name=name,
            home=self._plan.folder / name,
            manifest=self._plan.manifest,
            cache=self._plan.cache,
            bootstraps=() if bootstrap else self._addresses(),
            stage=stage,
            bootstrap=bootstrap,
            dashboard_port=self._plan.dashboard_port,
            checkpoints="" if bootstrap else self._plan.checkpoints,
            data_root=self._plan.data_root,
            resume=resume,
            listen=self._plan.listen if bootstrap else ANY_PORT.sub("/0", self._plan.listen),
        )
        if self._plan.devices and not bootstrap:  # nodes that start at once would all find the same card the emptiest
            device = self._plan.devices[len(self.nodes) % len(self._plan.devices)]
            plan = replace(plan, flags=(*plan.flags, "--device", device))
        return await Child.start(plan, self._plan.command(plan))

    async def _join(self, stage: int | None, resume: str) -> Child:
        child = await self._spawn(f"node-{len(self.nodes):02d}", stage, resume=resume)
        self.nodes.append(child)
        return child

    def _addresses(self) -> tuple[str, ...]:
        reachable = [child for child in self.alive if child.status is not None and child.ready is not None]
        known = [self.bootstrap, *reachable[:NEIGHBOURS_MAX]]
        return tuple(address for child in known if child and child.ready for address in child.ready.addresses)

    async def _ready(self, children: Sequence[Child], stopping: asyncio.Event) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._plan.start_timeout_s
        while not all(child.ready for child in children):
            await self.poll()
            for child in children:
                said = tail(child.plan.home / STDERR_NAME)
                if not child.alive:
                    ended = f"{child.name} ended while starting: {child.reason}; see {child.plan.home}"
                    raise child.fault or LocalFault(ended)
                if child.ready is None and loop.time() > until:
                    within = f"{self._plan.start_timeout_s:g} s"
                    raise LocalFault(f"{child.name} is not ready after {within}: {said}; see {child.plan.home}")
            if await elapsed(stopping, TICK_S):
                return False
        return True

    def _bury(self) -> list[Child]:
        dead: list[Child] = []
        for child in self.everybody:
            if not child.alive and child.name not in self._buried:
                self._buried.add(child.name)
                child.bury()
                dead.append(child)
        return dead

    async def _wait(self, children: Sequence[Child], timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while any(child.alive for child in children) and loop.time() < until:
            await self.poll()
            living = next((child for child in children if child.alive), None)
            if living is not None:
                await living.wait(min(TICK_S * 5, max(0.0, until - loop.time())))

    async def _terminate(self, children: Sequence[Child]) -> None:
        late = [child for child in children if child.alive]
        for child in late:
            child.signal(signal.SIGTERM)
        await self._wait(late, TERM_TIMEOUT_S)
        for child in late:
            child.kill(told="did not leave when asked: killed")


async def elapsed(stopping: asyncio.Event, seconds: float) -> bool:
    """Wait `seconds`, or until `stopping` is set; return whether it was."""
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return False
    return True

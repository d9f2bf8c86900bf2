"""A machine in the virtual world that runs the daemon's own coroutines: it starts, crashes, freezes, leaves,
returns."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Protocol

from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.stage_memory import blocks_of, fit_of
from swarmnode.base.errors import LocalFault, Unavailable, cause_of
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId, digest, seeded
from swarmnode.base.ports import Replica, Transport
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.resumption import CheckpointOptions
from swarmnode.keep.transfer.donor import DonorLimits
from swarmnode.train.node.drain import DrainReport
from swarmnode.train.node.membership_handlers import MembershipHandlers
from swarmnode.train.node.node import Node
from swarmnode.train.node.node_ports import NodePorts
from swarmnode.train.node.notice import GRACE_S, Notice, NoticeKind, Notices
from swarmnode.train.node.shared_transport import SharedTransport
from swarmnode.train.node.span import PartNode, SpanPorts
from swarmnode.train.pipeline.feeder import Samples
from swarmnode.train.pipeline.microbatch_size import Host
from swarmsim.directory import SimDht, SimDirectory
from swarmsim.law import Laws
from swarmsim.machine import Disk, Meter, SimMachine
from swarmsim.metered_replica import FINE_NBYTES, MeteredReplica
from swarmsim.network import Network, NetworkPort
from swarmsim.scenario import Scenario
from swarmsim.trace import DecisionTrace, SimTelemetry
from swarmsim.transport import SimTransport
from swarmsim.virtual_time import VirtualLoop, owned

DISK_BYTES = 1 << 33
# guess: a limit however much a chunk stands for, so that a thousand states given once do not fill the memory
IDLE_MAX_S = 1200.0
GOODBYE_S = 15.0  # above node.DRAIN_S, saving and announcing
SERVING_MAX = 4096  # incoming calls in flight at one node


class SkewedClock:
    """ports.Clock whose wall clock may be wrong."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.skew_s = 0.0

    def unix_s(self) -> float:
        return 1.7e9 + self._loop.time() + self.skew_s


class WorldPort(Protocol):
    """Interface of the world to a simulated node (swarmsim/world.py)."""

    loop: VirtualLoop
    scenario: Scenario
    seed: int
    run_id: RunId
    trace: DecisionTrace
    laws: Laws
    network: Network
    dht: SimDht
    flop_done: float
    bug: BaseException | None

    def samples(self) -> Samples: ...

    def replica(self, stage: int, sim_node: SimNode, meter: Meter) -> MeteredReplica: ...

    def saving(self, home: Disk) -> CheckpointOptions: ...

    def ended(self, sim_node: SimNode, why: str | None) -> None: ...


class SimNode:
    """A node and its machine. `number` and `label` stay the same over crashes and restarts."""

    def __init__(self, world: WorldPort, number: int, kind: MachineKind) -> None:
        self.world = world
        self.number = number
        self.kind = kind
        self.label = f"n{number}"
        self.identity = Identity.of_seed(digest("node", world.seed, number))
        self.disk = Disk(DISK_BYTES)
        self.part_disks: dict[int, Disk] = {}
        self.clock = SkewedClock(world.loop)
        self.lives = 0
        self.alive = False
        self.gone = False  # for ever
        self.leaving = False
        self.killed = False
        self.liar = ""
        self.node: Node | None = None
        self.replicas: dict[int, MeteredReplica] = {}  # by stage; those made last
        self.task: asyncio.Task[None] | None = None
        self.machine: SimMachine | None = None
        self.transport: SimTransport | None = None
        self.plug: NetworkPort | None = None
        self.serving_since: float | None = None
        self._notices = Notices()
        self.drain_report: DrainReport | None = None  # end of its last life, if it left voluntarily

    # ---- lifetime

    def _ports(self, transport: Transport, directory: SimDirectory, ear: SimTelemetry, meter: Meter) -> NodePorts:
        """The ports of this process's node."""
        assert self.machine is not None
        world = self.world
        return NodePorts(
            transport=transport,
            directory=directory,
            compute=self.machine,
            clock=self.clock,
            telemetry=ear,
            identity=self.identity,
            replica=lambda manifest, stage: self._make(stage, meter, self.stage),
            samples=world.samples,
            probe=_probe,
            mean=_no_mean,
            saving=world.saving(self.disk),
            host=_host(world.scenario.processors),
            donating=_donating(world.scenario.state_share),
            unable=fit_of(world.scenario.manifest, self.kind).unable,
        )

    def start(self, stage: int | None = None) -> None:
        """Start or restart the process."""
        assert not self.alive and not self.gone, f"{self.label} cannot start"
        world = self.world
        kind = self.kind
        self.alive = True
        self.leaving = False
        self.lives += 1
        self._notices = Notices()
        self.drain_report = None
        context = owned(self.label)
        self.plug = world.network.plug(self.label, self.identity.peer_id, kind.address, kind.up, kind.down)
        self.plug.context = context
        ear = SimTelemetry(world.trace, self.label)
        self.transport = SimTransport(world.network, self.plug, world.run_id, ear)
        # A killed process never runs again; here its tasks are cancelled, which takes a few steps.
        self.killed = False
        self.transport.acted = lambda what: None if self.killed else world.laws.acted(self.label, what)
        meter = Meter()
        rng = seeded(world.seed, "machine", self.number, self.lives)
        self.machine = SimMachine(kind.flops, world.scenario.memory_gbps * 1e9, meter, rng, world.scenario.noise)
        MembershipHandlers(record_pb2.SignedManifest()).serve(self.transport)
        directory = SimDirectory(world.dht, self.plug)
        self.replicas = {}
        shared = SharedTransport(self.transport)
        ports = self._ports(shared.member(self.identity.peer_id), directory, ear, meter)
        blocks = blocks_of(world.scenario.manifest, kind)

        def part(stage: int) -> Node:
            own = self.identity.part(stage)
            its = replace(
                ports,
                transport=shared.member(own.peer_id),
                identity=own,
                replica=lambda manifest, at: self._make(at, meter, stage),
                saving=world.saving(self._disk(stage)),
            )
            return Node(world.scenario.manifest, world.run_id, its)

        self.node = Node(world.scenario.manifest, world.run_id, ports, spans=SpanPorts(blocks.__getitem__, part))
        self.task = world.loop.create_task(self._live(self.node, directory, stage), name=self.label, context=context)

    def _disk(self, stage: int) -> Disk:
        """The disk that this machine's part for `stage` saves its states on, in all its lives."""
        return self.part_disks.setdefault(stage, Disk(DISK_BYTES))

    def _make(self, stage: int, meter: Meter, own: int | None) -> Replica:
        """A replica of `stage`, kept if it is that of the node's `own` stage: others are made to judge answers."""
        made = self.world.replica(stage, self, meter)
        if stage == own:
            self.replicas[stage] = made
        return made

    async def _live(self, node: Node, directory: SimDirectory, stage: int | None) -> None:
        """Run the daemon's main coroutine; its end is the end of the process."""
        world = self.world
        why: str | None = None
        try:
            await directory.join()
            self.drain_report = await node.run(self._notices, stage)
        except* (Unavailable, LocalFault) as group:
            why = _leaf(group)
        except* Exception as group:  # noqa: BLE001  anything else is a bug of the node
            world.trace.say(self.label, "node.failed", {"reason": _leaf(group)})
            world.laws.breaks("the node does not fail of itself", f"{self.label}: {_leaf(group)}", self.label)
            world.bug = group
        world.ended(self, why)

    def end(self, *, silent: bool = False) -> None:
        """End the process, whatever it was doing."""
        self.alive = False
        if self.transport is not None and self.machine is not None:
            self.transport.close(silent=silent)
            self.machine.close()
            self.world.flop_done += self.machine.flop
            self.machine.flop = 0.0
        self.world.network.reach.forget(self.label)

    def kill(self, *, silent: bool = False) -> None:
        """Kill by SIGKILL, or with `silent` by a power cut: callers are not told."""
        if not self.alive:
            return
        self.killed = True
        self.world.loop.thaw(self.label)
        self.end(silent=silent)
        if self.task is not None:
            self.task.cancel()

    def leave(self, notice_s: float | None = None) -> None:
        """Send SIGTERM, or with `notice_s` a preemption notice."""
        if self.alive:
            self.leaving = True
            if notice_s is None:
                notice = Notice("signal", NoticeKind.LEAVE, GRACE_S, "SIGTERM")
            else:
                notice = Notice("simulation", NoticeKind.PREEMPT, notice_s, "preempted")
            # given in the node's own context, as a signal handler of its process would
            self.world.loop.call_soon(self._notices.give, notice, context=owned(self.label))

    def freeze(self) -> None:
        """SIGSTOP."""
        if self.alive:
            self.world.loop.freeze(self.label)

    def thaw(self) -> None:
        """SIGCONT."""
        self.world.loop.thaw(self.label)

    # ---- observable state

    @property
    def state(self) -> record_pb2.NodeState:
        return self.node.state if self.alive and self.node is not None else record_pb2.NODE_STATE_LEFT

    @property
    def training(self) -> bool:
        """Whether it trains at each stage that it serves."""
        return self.state == record_pb2.NODE_STATE_TRAINING and len(self.stages) == len(self.nodes)

    @property
    def stage(self) -> int | None:
        return self.node.stage if self.node is not None else None

    @property
    def nodes(self) -> list[PartNode]:
        """Its node, and those of its parts; none before it started."""
        return [] if self.node is None else [self.node, *self.node.parts.values()]

    @property
    def stages(self) -> list[int]:
        """The stages at which it trains."""
        training = [node for node in self.nodes if self.alive and node.state == record_pb2.NODE_STATE_TRAINING]
        return [node.stage for node in training if node.stage is not None]

    @property
    def round_done(self) -> int | None:
        """The last round in the weights that it serves; None: it serves none."""
        served = [node.served.gossip.done for node in self.nodes if node.served is not None]
        return min(served) if served and self.training else None

    def check(self) -> None:
        """Check the laws of bounded queues."""
        node = self.node
        laws = self.world.laws
        if not self.alive or node is None or self.machine is None or self.transport is None:
            return
        places = self.world.scenario.manifest.limits.in_flight_max
        for served in (node.served for node in self.nodes):
            for position, count in () if served is None else served.parts.backlog.slots.taken.items():
                laws.bound(self.label, f"microbatches held at position {position}", count, places)
        laws.bound(self.label, "calls under way", self.transport.serving, SERVING_MAX)


def _donating(state_share: float) -> DonorLimits:
    """Donor limits for chunks that stand for many, which would be requested one after the other from several donors."""
    usual = DonorLimits()
    return replace(
        usual,
        idle_s=min(usual.idle_s / state_share, IDLE_MAX_S),
        puller_idle_s=min(usual.puller_idle_s / state_share, IDLE_MAX_S),
        line_nbytes=usual.line_nbytes * state_share,
        chunk_nbytes=usual.chunk_nbytes if state_share == 1.0 else FINE_NBYTES,
    )


def _host(processors: int) -> Host:
    return Host(lambda: float(processors), lambda swarm, me: sum(swarm.sizes)) if processors else Host()


def _probe(replica: Replica, manifest: Any, stage: int, samples: int) -> None:
    assert isinstance(replica, MeteredReplica)
    replica.probe(samples)


def _leaf(group: BaseExceptionGroup[Any]) -> str:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {cause_of(error)}"


async def _no_mean(replica: Replica) -> None:
    """Simulated weights have no running mean."""

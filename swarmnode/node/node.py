"""One node: joins, takes a stage, serves, meets, leaves; all over ports, so that the simulator runs it unchanged."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TypeVar

from swarmnode.errors import Unavailable
from swarmnode.gossip.exchange import Gossip
from swarmnode.ids import PeerId, RunId, seeded
from swarmnode.manifest import Manifest
from swarmnode.metrics import name
from swarmnode.node.arrival import Arrival
from swarmnode.node.callers import Callers
from swarmnode.node.checks import Checks
from swarmnode.node.copying import copying
from swarmnode.node.drain import Farewell, drain
from swarmnode.node.duties import Parts, duties
from swarmnode.node.feeding import feeder_of, feeding
from swarmnode.node.keeping import keeper_of
from swarmnode.node.line import Line
from swarmnode.node.measuring import measuring
from swarmnode.node.moving import Brought, Moving, costs
from swarmnode.node.notice import Notice, Notices
from swarmnode.node.pardoning import pardoning
from swarmnode.node.pausing import Pausing, Serving
from swarmnode.node.presence import Presence
from swarmnode.node.probe import telling
from swarmnode.node.rollcall import RollCall
from swarmnode.node.saver import Saver, Subject
from swarmnode.node.speed import Speed
from swarmnode.node.syncing import syncing
from swarmnode.node.world import World
from swarmnode.pipeline.backlog import Backlog
from swarmnode.pipeline.credible import bounded
from swarmnode.pipeline.feeder import Feeder
from swarmnode.pipeline.hop import Hop
from swarmnode.pipeline.itinerary import successors
from swarmnode.pipeline.onward import Onward
from swarmnode.pipeline.rebalance import Rules, choose_stage
from swarmnode.ports import Answer, Call, Handler, Priority, Replica
from swarmnode.recovery.donor import SnapshotDonor
from swarmnode.recovery.keeper import Keeper
from swarmnode.recovery.snapshot import Cut, Snapshot
from swarmnode.wire import record_pb2

Part = TypeVar("Part")

DRAIN_S = 8.0  # guess: before a move, what is held is finished within this
DRAIN_SOON_S = 0.5  # guess: the same while a stage stands empty and all wait for the mover, or when it is HOPELESS
HOPELESS_S = 32.0  # guess: of what takes so long little is finished in DRAIN_S; who waits for it asks another sooner
GIVING = (record_pb2.NODE_STATE_TRAINING, record_pb2.NODE_STATE_DRAINING)


class _Stopped(Exception):
    """Ends the node's task group after a clean leave."""


class _Moved(Exception):
    """Ends the task group of one stage when the node goes to another."""


class Node:
    """A replica of one stage. `run` returns after leaving cleanly; a LocalFault means: crash and be restarted."""

    def __init__(self, manifest: Manifest, run_id: RunId, world: World) -> None:
        self.manifest = manifest
        self.run_id = run_id
        self.stage: int | None = None
        self.me = world.transport.peer_id
        self._world, self._telemetry = world, world.telemetry
        us = self.presence = Presence(manifest, run_id, world.directory, world.clock, world.identity, world.telemetry)
        us.door, us.progressed, us.self.unable = world.door, self._progressed, world.unable
        self._callers = callers = Callers(manifest, us, world.clock, lambda: self.stage)
        self.line = Line(
            world.transport, us.progress, us.record, callers.learn, self._progressed, us.beliefs.hear_boast
        )
        self.line.excluded = us.book.excluded
        self.arrival = Arrival(manifest, run_id, self.line, us, world.compute, world.clock, world.telemetry)
        self.arrival.saving, self._swarm = world.saving, us.book.swarm
        self._replica: Replica | None = None
        self._backlog: Backlog | None = None
        self._donor: SnapshotDonor | None = None
        self._saver: Saver | None = None
        self.keeper: Keeper | None = None
        self.final = ""  # the checkpoint in which the stage is saved before leaving
        self.pausing = Pausing(us, world.telemetry)
        self.hop: Hop | None = None
        self.gossip: Gossip | None = None
        self.feeder: Feeder | None = None
        self._turn: asyncio.Task[Brought] | None = None
        self.farewell: Farewell | None = None  # once it leaves
        self._stays, self._leaving = 0, False  # stages left so far; whether it is told to go
        self._gone = asyncio.Event()
        asked = self.arrival.answering
        self.rollcall = RollCall(manifest, us, asked, world.clock, world.telemetry, lambda: self.feeder)
        self._register()

    @property
    def state(self) -> record_pb2.NodeState:
        return self.presence.self.state

    def samples_total(self) -> int:
        """Samples the whole run has trained, as far as known here."""
        return self.presence.progress.total

    def loss_train(self) -> float | None:
        """Nats per token, smoothed: of the microbatches fed here, or whose loss was computed here."""
        source = self.feeder.loss if self.feeder is not None else self.hop.loss if self.hop is not None else None
        return source.value if source is not None and source.known else None

    def _register(self) -> None:
        """Handlers exist before anybody can learn the address; those that need a stage say so until there is one."""
        nbytes_max = self.manifest.limits.frame_bytes_max
        handlers: list[tuple[str, Handler, int]] = [
            ("process", lambda peer, call: self._hop().serve(peer, call), nbytes_max),
            ("reserve", lambda peer, call: self._hop().reserve(peer, call), 0),
            ("opening", lambda peer, call: self._hop().show(peer, call), 0),
            ("suspicion", lambda peer, call: self._hop().suspect(peer, call), 0),
            ("redo", lambda peer, call: self._hop().redo(peer, call), nbytes_max),
            ("exchange", lambda peer, call: _there(self.gossip).serve_exchange(peer, call), nbytes_max),
            ("bequest", lambda peer, call: _there(self.gossip).serve_bequest(peer, call), nbytes_max),
            ("handover", self._inherit, 0),
            ("commit", lambda peer, call: _there(self.gossip).serve_commit(peer, call), 0),
            ("standin", lambda peer, call: _there(self.gossip).serve_standin(peer, call), 0),
            ("packet_receipt", lambda peer, call: _there(self.gossip).serve_receipt(peer, call), 0),
            ("snapshot", lambda peer, call: _there(self._donor).offer(peer, call), 0),
            ("chunk", lambda peer, call: _there(self._donor).chunk(peer, call), 0),
        ]
        for method, handler, tensor_bytes_max in handlers:
            self.line.serve(method, handler, tensor_bytes_max=tensor_bytes_max, admit=self._callers.admit(method))

    async def _inherit(self, peer: PeerId, call: Call) -> Answer:
        answer = await _there(self.keeper).inherit(peer, call)
        self.presence.changed()  # who brings the stage back must know at once who has the latest of it
        return answer

    def _hop(self) -> Hop:
        if self.state not in (*GIVING, record_pb2.NODE_STATE_PAUSED):
            raise Unavailable("this node does not serve yet")
        return _there(self.hop)

    async def run(self, notices: Notices, stage: int | None = None) -> Farewell:
        """Live until a notice says go, then leave within its time. `stage` None: the neediest. Raises Unavailable when
        the stage's state is nowhere to be had, LocalFault when this machine fails."""
        farewell: Farewell | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                living = tasks.create_task(self._live(tasks, stage))
                notices.advised = lambda advice: self._prepare(tasks)
                try:
                    notice = await notices.wait()
                    self._leaving = True
                    (self._turn or living).cancel()
                    farewell = await self._leave(notices, notice)
                finally:
                    self._gone.set()
                raise _Stopped
        except* _Stopped:
            pass
        assert farewell is not None
        return farewell

    async def _live(self, tasks: asyncio.TaskGroup, stage: int | None) -> None:
        """Choose a stage and serve it, then the next one, until cancelled."""
        presence, brought = self.presence, None
        await self.pausing.going.wait()
        presence.self.addresses = await self.line.addresses()
        self._world.saving.begin(presence, self.manifest)
        stage = await self._choose(stage)
        period_s = self.manifest.limits.announce_period_s
        tasks.create_task(measuring(self.line, presence.book.counts, self.samples_total, self._telemetry, period_s))
        tasks.create_task(pardoning(self.line, self.run_id, presence.routers, self._telemetry, period_s))
        while True:
            brought = await self._stay(stage, brought)
            stage = brought.stage

    async def _stay(self, stage: int, brought: Brought | None) -> Brought:
        """This node's time at one stage. Returns what it takes along when it has left for another."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._turn = turn = tasks.create_task(self._join(tasks, stage, brought))
                await asyncio.wait({turn})
                if not turn.cancelled():
                    brought = turn.result()
                    await self._withdraw(brought)
                if self._leaving:
                    await self._gone.wait()  # `run` takes its leave of all that goes on here
                raise _Moved
        except* _Moved:
            pass
        if self._leaving or self._gone.is_set():
            await self._gone.wait()
            raise asyncio.CancelledError  # which a group that ends with an error lets fall (before Python 3.13)
        assert brought is not None
        self._vacate()
        return brought

    async def _join(self, tasks: asyncio.TaskGroup, stage: int, brought: Brought | None) -> Brought:
        """Measure, come by the state, then start everything this node does; returns when it is needed elsewhere."""
        us, presence, world = self.presence.self, self.presence, self._world
        self.stage = us.stage = stage
        speed = brought.speed if brought is not None else 0.0
        us.speed = lambda: speed
        presence.attend(stage, self._onward(stage))
        self._telemetry.gauge(name.STAGE, float(stage))
        presence.set_state(record_pb2.NODE_STATE_JOINING, "stage chosen" if brought is None else brought.reason)
        tasks.create_task(presence.announcing())
        # From now on: a download outlives donors, and must hear of new ones (simulated: everything, seed 104).
        tasks.create_task(presence.watching(self._watched(stage)))
        replica = await world.compute.run(Priority.OUTER, 0, partial(world.replica, stage))
        asked = replica, self.manifest, stage, world.probe, world.compute, self._telemetry, presence
        probe = None if speed else tasks.create_task(telling(*asked))
        newcomer, done = await self.arrival.begin_with(brought, replica, stage)
        speed = speed or (await probe if probe is not None else 0.0)
        us.speed = lambda: speed
        self._replica = replica
        hop, gossip = self._assemble(tasks, replica, stage, newcomer=newcomer, done=done)
        tasks.create_task(gossip.run())
        if self._saver is not None:
            tasks.create_task(self._saver.run())
        tasks.create_task(self.rollcall.run())
        if newcomer:
            await syncing(gossip, presence, stage, self.manifest, self._telemetry)
        if stage == 0:
            number, lost, total = presence.incarnation + self._stays, self.rollcall.lost, self.samples_total
            self.feeder = await feeder_of(self.manifest, presence, world, hop, number, total, self._fed, lost)
            tasks.create_task(feeding(self.feeder, gossip, total, done, world.saving.resume is not None))
        presence.set_state(record_pb2.NODE_STATE_TRAINING, "ready")
        self._telemetry.event("node.ready", serves=stage)
        rng = seeded(self.manifest.seed, "moving", self.me, presence.incarnation, self._stays)
        own = self.manifest, self.run_id, presence, self.line, self.arrival.answering
        rest = gossip, self._telemetry, rng, lambda: hop.samples, replica.apart
        return await Moving(*own, replica.sizes_of, *rest).run()

    async def _withdraw(self, brought: Brought) -> None:
        """Take no new work at this stage, and finish what is held."""
        self.presence.set_state(record_pb2.NODE_STATE_DRAINING, f"moves to stage {brought.stage}")
        parts, held = self._parts(), 0
        assert parts is not None
        parts.refuse()
        try:
            async with asyncio.timeout(DRAIN_S) as patience:
                await self.presence.announce()  # under the key of this stage, before it is announced elsewhere
                if brought.state is None or parts.backlog.seconds > HOPELESS_S:
                    patience.reschedule(asyncio.get_running_loop().time() + DRAIN_SOON_S)
                await parts.finish()
        except TimeoutError:
            held = parts.held()
        self._telemetry.event("stage.moved", source=self.stage, target=brought.stage, cut=held, reason=brought.reason)

    def _vacate(self) -> None:
        """Nothing is left of the stage that was served."""
        us = self.presence.self
        if self._donor is not None:
            self._donor.close()
        self.arrival.fetching.carried = self.keeper.snapshot if self.keeper is not None else None
        us.blocks, us.queue, us.moving_to = (lambda: None), (lambda: 0), None
        self.presence.heard_blocks = lambda told, frontier_max: ()
        self._replica = self._backlog = self._donor = self._saver = self.hop = self.gossip = self.feeder = None
        self._stays += 1

    def _assemble(
        self, tasks: asyncio.TaskGroup, replica: Replica, stage: int, *, newcomer: bool, done: int
    ) -> tuple[Hop, Gossip]:
        """The parts that serve microbatches, rounds and snapshots of `replica`."""
        world, manifest, telemetry, total = self._world, self.manifest, self._telemetry, self.samples_total
        backlog = Backlog(tasks, manifest.limits.in_flight_max, telemetry)
        onward = Onward(self.run_id, self.line, self.presence.routers, telemetry, manifest.limits)
        self.presence.doubted = onward.doubt
        seen = world, self.line, self.presence, tasks, lambda at: _there(self.feeder).again(at)
        checks = Checks.of(manifest, self.run_id, stage, replica, *seen)
        parts = (replica, world.compute, onward, backlog, total, telemetry, lambda: self._swarm().sizes[stage])
        hop = Hop(manifest, stage, self.me, *parts, checks.redoing, checks.auditor, checks.upstream)
        hop.believed = worked = self.presence.beliefs.clock.observed.worked
        gossip = Gossip(
            manifest,
            self.run_id,
            stage,
            self.line,
            replica,
            world.compute,
            self._swarm,
            total,
            lambda: hop.samples,
            telemetry,
            identity=world.identity,
            done=done,
            newcomer=newcomer,
        )
        gossip.acceptance.believed = worked
        here = manifest, self.run_id, stage, self.line, self.presence, telemetry
        self.keeper = keeper = keeper_of(*here, replica)
        tasks.create_task(keeper.run())
        self._donor = SnapshotDonor(
            self.run_id,
            stage,
            self._take_snapshot,
            # Hashing. Behind other work a busy replica would never do it, and who waits is the help that it needs.
            lambda work: world.compute.run(Priority.OUTER, 0, work),
            telemetry,
            limits=world.donating,
            kept=keeper.kept,
            received=self.arrival.received,
        )
        us = self.presence.self
        us.speed, us.queue = Speed(hop, world.compute, us.speed()), lambda: world.compute.waiting
        us.round_index, us.round_stride = lambda: gossip.done, lambda: gossip.stride
        serving = manifest, stage, replica, backlog, gossip, lambda: self.feeder, self.keeper, self.arrival
        self._backlog, self.hop, self.gossip, self.pausing.parts = backlog, hop, gossip, Serving(*serving)
        if world.saving.store is not None:
            subject = Subject(stage, replica, gossip, self.presence.progress, lambda: self.feeder)
            saved = manifest, self.run_id, self.me, world.saving, subject
            self._saver = Saver(*saved, world.compute, self._swarm, telemetry)
        return hop, gossip

    def _watched(self, stage: int) -> list[int]:
        """Stages whose records matter most to a replica of `stage`: its own, and where it sends work."""
        return sorted({stage, *self._onward(stage)})

    def _onward(self, stage: int) -> list[int]:
        """Stages that a replica of `stage` sends microbatches to."""
        stages, spec = self.manifest.pipeline.stages, self.manifest.recovery
        return sorted(successors(stage, stages, swapped=spec.itinerary == "swapped", skips=spec.while_lost == "skip"))

    async def _choose(self, stage: int | None) -> int:
        """Look around, then take the stage asked for or the neediest."""
        await self.presence.look(range(self.manifest.pipeline.stages))
        reason = "asked for"
        if stage is None:
            rng, pipeline = seeded(self.manifest.seed, "stage", self.me), self.manifest.pipeline
            shares, rules = costs(self.manifest), Rules(pipeline.rebalance_ratio, pipeline.min_keep)
            swarm = bounded(await self.arrival.living(self._swarm()), shares)
            stage, reason = choose_stage(swarm, shares, rules, rng, self._world.unable)
        self._telemetry.event("stage.chosen", serves=stage, reason=reason)
        return stage

    async def _leave(self, notices: Notices, notice: Notice) -> Farewell:
        """Refuse new work, then bring home what fits in the time (drain.py)."""
        self.farewell = farewell = Farewell(notice)
        if self.stage is not None:
            self.presence.set_state(record_pb2.NODE_STATE_DRAINING, notice.reason)
        parts = self._parts()
        tasks = duties(parts, farewell) if parts is not None else []
        farewell.begin(notices.left_s(), self._telemetry)
        await drain(farewell, tasks, notices, self.presence, self._telemetry)
        farewell.tell(self._telemetry)
        return farewell

    def _parts(self) -> Parts | None:
        """What there is to bring home; None before this node serves."""
        replica, gossip, donor, backlog = self._replica, self.gossip, self._donor, self._backlog
        if replica is None or gossip is None or donor is None or backlog is None or self.stage is None:
            return None
        rng = seeded(self.manifest.seed, "leaving", self.me, gossip.done)
        serving = replica, gossip, donor, backlog, self.feeder
        return Parts(self.run_id, self.stage, self.line, self._swarm, *serving, self._save, self._telemetry, rng)

    def _prepare(self, tasks: asyncio.TaskGroup) -> None:
        """This machine may be taken away soon, perhaps without another word: have the stage on disk."""
        if self._replica is not None and self.gossip is not None:
            tasks.create_task(self._save())

    async def _save(self) -> None:
        assert self._replica is not None and self.gossip is not None and self.stage is not None
        await self._world.save(self._replica, self.stage, self.gossip.done, self.samples_total())
        self._telemetry.event("state.saved", round=self.gossip.done, samples_total=self.samples_total())
        if self._leaving and self._saver is not None and self.final:
            await self.presence.look([0])  # feeders that are gone said in their last records what they fed
            await self._saver.save(self.final)

    async def _take_snapshot(self, cut: Cut) -> Snapshot:
        """A copy of the replica for a joiner. Raises Unavailable when there is none to give."""
        replica, gossip, stage = self._replica, self.gossip, self.stage
        if replica is None or gossip is None or stage is None or self.state not in GIVING:
            raise Unavailable("this node has no state to give")
        return await copying(cut, replica, gossip, stage, self.presence, self._world)

    def _fed(self, samples: int) -> None:
        self.presence.progress.add(self.me, samples)
        self._progressed()

    def _progressed(self) -> None:
        if self.gossip is not None:
            self.gossip.progressed()
        if self._saver is not None:
            self._saver.progressed()


def _there(part: Part | None) -> Part:
    """`part`, or Unavailable for a call that came before this node had a stage."""
    if part is None:
        raise Unavailable("this node has no stage yet")
    return part


__all__ = ["Node", "World"]

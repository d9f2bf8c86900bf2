"""A stage that this node serves: all parts that work on its replica, from the first microbatch to the last."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

from swarmnode.base.concurrency import background_tasks
from swarmnode.base.errors import LocalFault, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, seeded, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.parted_work import Parts
from swarmnode.base.ports import Answer, Call, Compute, Handler, Priority, Replica, State, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.neighbour_backup import NeighbourBackup
from swarmnode.keep.recovery.recovery_source import OwnState, RecoverySource, donors_of
from swarmnode.keep.recovery.renewal import RenewalTimer
from swarmnode.keep.recovery.restore import RestoredState
from swarmnode.keep.transfer.donor import DonorLimits, SnapshotDonor, StageDonor
from swarmnode.keep.transfer.snapshot import WHOLE, Snapshot, StateSlice
from swarmnode.model.split import costs
from swarmnode.net.membership.judge import Judge, Trusting, judges
from swarmnode.net.membership.liveness import TRIES
from swarmnode.net.membership.swarm import GIVING, StageContext, Swarm
from swarmnode.run.manifest.gossip_compat import averages_gradients, meets
from swarmnode.train.gossip.exchange import WAIT_MIN_S, Gossip
from swarmnode.train.gossip.exchange_driver import PARTNER_PATIENCE_S
from swarmnode.train.node.checkpointer import Checkpointer
from swarmnode.train.node.drain import DrainReport, DrainTask, drain
from swarmnode.train.node.drain_steps import HeldWork, StageDrain
from swarmnode.train.node.feeder_loop import fed_status, feeding, ledger_of
from swarmnode.train.node.node_ports import NodeContext
from swarmnode.train.node.notice import Notices
from swarmnode.train.node.presence import StageObserver, StageStatus
from swarmnode.train.node.run_text import JoinedStage
from swarmnode.train.node.span_change import BlockRebalancer
from swarmnode.train.node.stage_change import ROUND_WAIT_MAX_S, StageRebalancer, StageTransfer
from swarmnode.train.node.stage_return import StageReturn
from swarmnode.train.node.tied_ends import TiedEnds
from swarmnode.train.pipeline.backlog import Backlog
from swarmnode.train.pipeline.feeder import Feeder, Samples
from swarmnode.train.pipeline.hop import Hop
from swarmnode.train.pipeline.microbatch_size import MicrobatchSizer
from swarmnode.train.pipeline.next_hop import NextHop
from swarmnode.train.pipeline.rebalance import load

Trained = Callable[[], record_pb2.Progress]


def make_donor(
    context: NodeContext,
    here: StageContext,
    gossip: Gossip,
    kept: Callable[[int], Snapshot | None],
    trained: Trained,
) -> StageDonor:
    """The part that gives state to others: of the replica, and what is `kept` of other stages; `trained`: the run's
    progress that the replica has learned. Archives get copies of the slow weights, which are hashed beside the compute
    thread where possible."""
    ports = context.ports
    given = (here.run_id, here.stage)
    # Behind other work a busy replica would never hash, and it needs the joiner that waits.
    run = partial(here.compute.run, Priority.OUTER, 0)
    take = partial(copy_replica, context, here, gossip, trained)
    limits = ports.donating
    joiners = SnapshotDonor(*given, take, run, here.telemetry, limits, kept)

    async def slow(cut: StateSlice) -> Snapshot:
        while True:
            check_gives(context)
            done = gossip.done
            progress = trained()
            state = await run(partial(here.replica.snapshot_in_parts, packed=True, only=cut.sections))
            if gossip.done == done:
                return Snapshot.of(state, here.stage, done, progress, limits.chunk_nbytes, gossip.line)

    # Archives get one of two places: a donor reserves one for peers that cannot work without the state.
    archive = SnapshotDonor(*given, slow, ports.hashing or run, here.telemetry, DonorLimits(downloads_max=2))
    return StageDonor(here.stage, joiners, archive, context.caller_check.archives, ports.archiving)


async def copy_replica(
    context: NodeContext, here: StageContext, gossip: Gossip, trained: Trained, cut: StateSlice
) -> Snapshot:
    """An immutable copy of the replica, hashed when all of it or whole sections are wanted. Raises Unavailable while
    this node has no state to give, RemoteFault for a `cut` that it does not have."""
    check_gives(context)
    replica = here.replica
    stage = here.stage
    cut.sizes(replica.sizes_of(stage))  # raises RemoteFault, before anything is copied
    run = partial(here.compute.run, Priority.OUTER, 0)
    size = context.ports.donating.chunk_nbytes
    at_once = cut.first == 0 and cut.count is None
    while True:
        done = gossip.done
        progress = trained()
        snapshots = list[Snapshot]()

        def keep(state: State) -> None:
            snapshots.append(Snapshot.of(state, stage, done, progress, size, gossip.line))  # noqa: B023

        def hashed() -> None:
            (snapshots[0] if cut == WHOLE else snapshots[0].part(cut)).manifest()  # noqa: B023

        def in_parts(parts: Parts[State]) -> Parts[None]:
            keep((yield from parts))
            if at_once:
                yield hashed

        def copy() -> Parts[None] | None:
            given = replica.snapshot_in_parts(packed=True)
            if not isinstance(given, State):
                return in_parts(given)
            keep(given)
            return None

        copied = run(copy)
        # Queued with the copy: asked for later it would wait for the next microbatch (simulated: half a minute).
        await asyncio.gather(copied, *([run(hashed)] if at_once else []))
        if gossip.done == done:  # else an outer step came in between, and its round would be the wrong label
            return snapshots[0]


def check_gives(context: NodeContext) -> None:
    """Raises Unavailable while this node has no state to give."""
    if context.presence.status.state not in GIVING:
        raise Unavailable("this node has no state to give")


def ready_to_serve(
    swarm: Swarm, stage: int, me: PeerId, *, received: bool, waited_s: float, round_in_s: float = 0.0
) -> tuple[bool, str]:
    """(ready, the reason): a newcomer with its state may take microbatches after a round at weight 0. It does not wait
    when no other replica serves the stage, nor when the next round, due in `round_in_s` at the earliest, is far off."""
    if received:
        return True, "received a round"
    if not donors_of(swarm, stage, me):
        return True, f"nobody else serves {stage_name(stage)}"
    if round_in_s > ROUND_WAIT_MAX_S:
        return True, f"no round comes within {round_in_s:.0f} s"
    if waited_s >= ROUND_WAIT_MAX_S:
        return True, f"no round came within {ROUND_WAIT_MAX_S:g} s"
    return False, "waiting for the first round"


METHODS: Mapping[str, bool] = {
    "process": True,
    "reserve": False,
    "opening": False,
    "accusation": True,
    "recompute": True,
    "exchange": True,
    "butterfly": True,
    "final_delta": True,
    "handover": False,
    "commit": False,
    "fallback": False,
    "packet_receipt": False,
    "step_end": False,
    "snapshot": False,
    "chunk": False,
    "table": False,
}
"""The methods that a served stage answers, and whether their calls carry tensors."""

SYNCS_AGAIN = TRIES - 1  # times that a newcomer which missed its first round takes the state again
FINISH_S = 8.0  # guess: before a move, held work is finished within this
SAVE_BYTES_PER_S = 1e6  # derived: a disk that bears 300 TB lasts for ten years
HOPELESS_S = 4.0 * FINISH_S  # of work that takes so long little is finished; callers ask another replica sooner


HEARSAY_S = PARTNER_PATIENCE_S  # guess: a feeder's own word comes in a round trip
SPEED_SAMPLES = 32.0  # guess: a probe weighs as much as a few real microbatches


class Speed:
    """Samples a second of this node on its stage: the probed speed, blended into the device's measured speed."""

    def __init__(self, hop: Hop, compute: Compute, probed: float) -> None:
        self._hop = hop
        self._compute = compute
        self._worked_s = compute.worked_s
        # The probed speed counts as much as SPEED_SAMPLES of real work.
        self._samples = SPEED_SAMPLES
        self._seconds = SPEED_SAMPLES / max(probed, 1e-9)
        self._counted = hop.worked + hop.reworked

    def __call__(self) -> float:
        # Counted in work, not in completed microbatches: a node that has just come has done only the forwards of many,
        # and would seem slower than it is by half (simulated: swarm48). A recomputed forward is work, too.
        samples = self._hop.worked + self._hop.reworked
        worked_s = self._compute.worked_s
        self._samples += samples - self._counted
        self._seconds += worked_s - self._worked_s
        self._counted = samples
        self._worked_s = worked_s
        if self._samples > 8 * SPEED_SAMPLES:  # the past fades: halve its weight
            self._samples = self._samples / 2
            self._seconds = self._seconds / 2
        return self._samples / self._seconds


class ServedStage(StageObserver):
    """A stage in service, from `open` until the end of its block. `feeder` is None until `begin`, at every stage
    but the first, and where there is no text. `checkpointer` is None on nodes that save no checkpoints."""

    def __init__(self, context: NodeContext, joined: JoinedStage, served_before: int, tasks: asyncio.TaskGroup) -> None:
        """`served_before`: stages that this process served before; `tasks` run as long as the stage is served."""
        presence = context.presence
        telemetry = context.telemetry
        here = context.at(joined.stage, joined.replica)
        history = presence.run_progress.clock.history
        self._context = context
        self._here = here
        self._served_before = served_before
        self._tasks = tasks
        self._newcomer = joined.restored.newcomer
        self._done = joined.restored.round
        self._text = joined.text
        self.stage = joined.stage
        self.replica = joined.replica
        self.backlog = Backlog(tasks, context.manifest.limits.in_flight_max, telemetry)
        self.held_work = HeldWork(self.backlog)
        self._next_hop = NextHop(
            context.run_id, context.transport, presence.routers, telemetry, context.manifest, presence.peer_table.swarm
        )
        self.judge = self._judge(tasks)
        self._next_hop.passed_over = self.judge.passed_over
        self.hop = Hop(here, self._next_hop, self.backlog, history, self.judge, context.transport.work)
        restored = joined.restored
        self.gossip = Gossip(
            here,
            lambda: self.hop.samples,
            done=restored.round,
            newcomer=restored.newcomer,
            packet_taken=history.record_work,
            line=restored.line,
            fed=self.hop.turns.fed,
        )
        self.hop.step_begun = self._step_begun
        self.backup = NeighbourBackup(here, presence)
        self.donor = make_donor(context, here, self.gossip, self.backup.kept, self._trained)
        self._speed = Speed(self.hop, here.compute, joined.samples_per_second * presence.device_share)
        self.feeder: Feeder | None = None
        self.checkpointer: Checkpointer | None = None
        if (store := context.ports.saving.store) is not None:
            self.checkpointer = Checkpointer(context, here, store, self.gossip, self._finished_blocks)
        self.tied_ends = TiedEnds(here, self.gossip)
        self._disk = asyncio.Lock()  # one writes the stage's state at a time
        self._rested: record_pb2.Progress | None = None  # while this node is held: of the run, when its state was new
        self._resting: asyncio.Task[None] | None = None  # while this node is held: until its state changes no more
        self._was_last = False  # when this node was held, nobody else served the stage
        self._relieved = False  # others have served it since
        self._behind = asyncio.Event()  # set while this replica waits for a state further than its own
        self._return = StageReturn(context, self.stage, self.gossip, restored.before, lambda: self.hop.worked)
        self._from: frozenset[PeerId] = frozenset()  # then: who has the state, of all that serve the stage
        self.gossip.behind = self._fell_behind
        self.gossip.stepped = self.hop.record_step
        self.gossip.met = self._count_replicas
        self._count_replicas()
        self.gossip.butterfly.exclude = presence.exclude
        self.handlers: Mapping[str, Handler] = {  # of METHODS
            "process": self._in_service(self.hop.serve),
            "reserve": self._in_service(self.hop.reserve),
            "opening": self._in_service(self.judge.serve_opening),
            "accusation": self._in_service(self.judge.serve_accusation),
            "recompute": self._in_service(self.judge.serve_recompute),
            "exchange": self._of_our_line(self.gossip.serve_exchange),
            "butterfly": self._of_our_line(self.gossip.butterfly.serve),
            "final_delta": self._of_our_line(self.gossip.final_deltas.serve, leaves=True),
            "handover": self._inherit,
            "commit": self.gossip.exchanges.serve_commit,
            "fallback": self._of_our_line(self.gossip.fallback.serve),
            "packet_receipt": self.gossip.acceptance.serve_receipt,
            "step_end": self.gossip.serve_step_end,
            "snapshot": self._give,
            "chunk": self._give_chunk,
            "table": self.tied_ends.serve,
        }

    async def _step_begun(self, process: wire.Process) -> None:
        """Wait for the weights that a training microbatch needs. One of a step proves that its feeder is through with
        the step before: only a feeder's own call does. The word of a stage between is taken where nobody else told."""
        feeder = PeerId(process.feeder)
        ended = process.step - self.gossip.stride
        if process.position == 1:
            self.gossip.step_ended(feeder, ended)
        elif ended >= self.gossip.next_round:
            asyncio.get_running_loop().call_later(HEARSAY_S, self.gossip.step_ended, feeder, ended)
        await self.gossip.step_begun(process.step)

    def _count_replicas(self) -> None:
        """Tell the worker how many replicas of this stage there are whose steps rounds average."""
        table = self._context.presence.peer_table
        self._shape = table.shape
        self.hop.worker.replicas = self.gossip.meeting(table.swarm().sizes[self.stage])

    @classmethod
    @asynccontextmanager
    async def open(cls, context: NodeContext, joined: JoinedStage, served_before: int) -> AsyncIterator[ServedStage]:
        """Serve the replica of `joined` for the length of a block. Its calls are answered at once; `begin` makes it
        take work."""
        async with background_tasks() as tasks:
            served = cls(context, joined, served_before, tasks)
            tasks.create_task(served.backup.run())
            tasks.create_task(served.gossip.run())
            tasks.create_task(served._return.run())
            if served.tied_ends.share:
                tasks.create_task(served.tied_ends.run())
            if served.checkpointer is not None:
                tasks.create_task(served.checkpointer.run())
            try:
                yield served
            finally:
                served.donor.close()

    async def serve(self) -> StageTransfer:
        """Begin, then serve until this node should serve another stage, whose state it then has."""
        await self._begin()
        return await self._until_moved()

    async def _begin(self) -> None:
        """Receive a first round where this replica is a newcomer, feed at the first stage, and take work."""
        context = self._context
        presence = self._context.presence
        if self._newcomer:
            await self._sync()
        if self._text is not None:
            self._feed(self._text)
        presence.set_state(record_pb2.NODE_STATE_TRAINING, "ready")
        context.telemetry.event("node.ready", serves=self.stage)
        self._tasks.create_task(self._catching_up())
        self._tasks.create_task(self._saving())

    def _feed(self, samples: Samples) -> None:
        context = self._context
        presence = self._context.presence
        manifest = context.manifest
        self.feeder = feeder = Feeder(
            manifest,
            context.me,
            presence.incarnation + self._served_before,  # differs between all feeders of the same key
            self.hop,
            samples,
            MicrobatchSizer(manifest, context.me, presence.status.rates, self._speed, context.ports.host),
            ledger_of(presence, manifest, samples.span),
            presence.believed,
            self._fed,
            context.telemetry,
            self.gossip.room,
            lambda: self.gossip.next_round,
        )
        self.gossip.feed_by(feeder.changed.set, lambda: feeder.spared)
        self.held_work.feed_by(feeder)
        resumed = context.ports.saving.resume is not None or bool(context.restorer.saved.found)
        self._tasks.create_task(feeding(feeder, self.gossip, presence.samples_total, self._done, resumed))

    async def _until_moved(self) -> StageTransfer:
        """Wait until this node should serve another stage, and has that stage's state."""
        context = self._context
        presence = self._context.presence
        chance = seeded(context.manifest.seed, "moving", context.me, presence.incarnation, self._served_before)
        if presence.stays:
            return await BlockRebalancer(context, chance, self._speed).run()
        rebalancer = StageRebalancer(
            context,
            self.replica,
            self.gossip,
            chance,
            samples_here=lambda: self.hop.samples,
            speed=self._speed,
            work_here=lambda: self.hop.worked,
        )
        return await rebalancer.run()

    async def withdraw(self, transfer: StageTransfer) -> None:
        """Take no new work before the move of `transfer`, and finish what is held, in FINISH_S at most; not at all
        while a stage stands empty, where all wait for the mover, nor if that is hopeless."""
        presence = self._context.presence
        presence.set_state(record_pb2.NODE_STATE_DRAINING, f"moves to {stage_name(transfer.stage)}")
        self.held_work.refuse("this node is leaving")
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                await presence.announce()  # under the key of this stage, before it is announced elsewhere
                if transfer.state is not None and self.backlog.seconds <= HOPELESS_S:
                    await self.held_work.finish()
        cut = self.held_work.held
        reason = transfer.reason
        self._context.telemetry.event("stage.moved", source=self.stage, target=transfer.stage, cut=cut, reason=reason)

    async def rest(self) -> tuple[Callable[[Replica], JoinedStage], State, int]:
        """Begin nothing new, finish what is held, in FINISH_S at most, and the round under way. Returns what a
        successor goes on with: its stage, for a new replica; the whole state of this one, and the last round in it."""
        context = self._context
        run = partial(self._context.ports.compute.run, Priority.OUTER, 0)
        context.presence.going_to(None)
        self.held_work.refuse("this node takes up an amendment")
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                await self.held_work.finish()
        self.gossip.hold(True)
        await self.gossip.idle.wait()
        state = await run(self.replica.snapshot)
        done = self.gossip.done
        newcomer = self.gossip.weight.newcomer
        line = self.gossip.line
        restored = RestoredState(RecoverySource.REPLICA, "amendment", done, newcomer, line)
        stage = self.stage
        speed = self._speed()
        text = self._text
        return lambda replica: JoinedStage(stage, replica, restored, speed, text), state, done

    async def drain(self, notices: Notices, report: DrainReport, checkpoint: str) -> None:
        """Hand on everything held here before this process ends, as far as `notices` allow; `report` is filled in.
        `checkpoint`: the label of the checkpoint in which the stage is saved as well; "": none."""
        steps = self.drain_steps(report, checkpoint)
        report.begin(notices.left_s(), self._context.telemetry)
        await drain(report, steps, notices, self._context.telemetry)

    def drain_steps(self, report: DrainReport, checkpoint: str = "") -> list[DrainTask]:
        """Refuse new work; the steps of `drain`, in order."""
        context = self._context
        if self._resting is not None and self._outdated():
            self.gossip.drop_unsent()

        async def save() -> None:
            await self.save()
            if checkpoint and self.checkpointer is not None:
                await context.presence.look([0])  # feeders that have left said in their last records what they fed
                await self.checkpointer.save(checkpoint)

        known = [*context.ports.saving.archives, *context.caller_check.archivists()]
        archives = list(dict.fromkeys(peer for peer in known if peer != context.me))
        return StageDrain(self._here, self.gossip, self.donor, self.held_work, save, report, archives).steps()

    async def save(self) -> None:
        """Write the stage to this machine's disk before its node leaves: its whole state and, for `swarmnode export`,
        its running mean. Raises LocalFault."""
        await self._save_state("info", left=True)

    async def _save_state(self, level: str = "debug", *, left: bool = False) -> int:
        """Write the stage's whole state to this machine's disk. Returns its bytes. Raises LocalFault."""
        context = self._context
        total = self._context.presence.samples_total
        async with self._disk:
            while True:
                done = self.gossip.done
                progress = self._trained()
                line = self.gossip.line
                state = await context.ports.compute.run(Priority.OUTER, 0, self.replica.snapshot_in_parts)
                mean = await context.ports.mean(self.replica) if left else None
                if (self.gossip.done, self.gossip.line) == (done, line):  # else an outer step came in between
                    break
            await context.restorer.saved.save(
                state,
                context.ports.saving.shapes(context.manifest, self.stage),
                stage=self.stage,
                round_index=done,
                peer=context.me,
                progress=progress,
                blocks=self._finished_blocks(),
                line=line,
                left=left,
                mean=mean,
            )
        context.telemetry.event("state.saved", level=level, round=done, samples_total=total())
        return sum(section.nbytes for section in state.sections.values())

    async def _saving(self) -> None:
        """Save the stage again and again, about `min_keep` of its replicas each time: where all are killed at once, the
        run would begin anew, or from an archive. A disk that is full keeps no replica from training."""
        context = self._context
        now_s = asyncio.get_running_loop().time
        spec = context.manifest.recovery
        period_s = context.manifest.limits.announce_period_s
        savers = context.manifest.pipeline.min_keep  # as one that is lost, one of them may not come back
        chance = seeded(context.manifest.seed, "saving", context.me, context.presence.incarnation, self._served_before)
        timer = RenewalTimer(spec)
        while True:
            await asyncio.sleep(period_s * (0.5 + chance.random()))  # not all at once
            total = context.presence.samples_total()
            begun_s = now_s()
            if context.presence.status.state != record_pb2.NODE_STATE_TRAINING or not timer.due(begun_s, total)[0]:
                continue
            replicas = len(context.presence.peer_table.swarm().serving(self.stage))
            nbytes = 0
            if chance.random() * replicas < savers:
                try:
                    nbytes = await self._save_state()
                except LocalFault as fault:
                    context.telemetry.event("state.unsaved", level="warning", reason=str(fault))
            least_s = max(nbytes / SAVE_BYTES_PER_S, (now_s() - begun_s) / spec.snapshot_share)
            timer.made(now_s(), total, least_s)

    # ---- pausing

    def hold(self, reason: str, *, away: bool = True) -> None:
        """Take no new work for `reason`: no microbatch, no round, no download. Work under way goes on.
        `away`: for long, so that other replicas are not to wait for this one."""
        self._was_last = not self._others_serve()
        self._relieved = False
        self.held_work.hold(reason)
        self.gossip.hold(True, away=away)
        self.backup.hold(True)
        self._resting = self._tasks.create_task(self._rest_held())

    async def _rest_held(self) -> None:
        """After `hold`: return when the replica's state changes no more. Copies from before are forgotten."""
        await self.held_work.emptied()
        await self.gossip.idle.wait()
        self.donor.close()
        self._rested = self._context.presence.progress.to_wire()

    def _trained(self) -> record_pb2.Progress:
        """The run's progress that this replica has learned: of now, or of when it was held. Without the last replica of
        a stage nothing is trained: what is heard of later was trained before."""
        self._note_relief()
        if self._rested is None or (self._was_last and not self._relieved):
            return self._context.presence.progress.to_wire()
        return self._rested

    async def _give(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "snapshot". A paused replica gives what it has after the last microbatch that it held, unless
        that takes more than FINISH_S."""
        self._check_limits()
        if self._resting is not None and call.header.snapshot.stage == self.stage:
            await asyncio.wait([self._resting], timeout=FINISH_S)
        return await self.donor.offer(peer, call)

    async def _give_chunk(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "chunk"."""
        self._check_limits()
        return await self.donor.chunk(peer, call)

    def _check_limits(self) -> None:
        """Raise Unavailable where the volunteer's limits let this node send no state."""
        if not self._context.presence.status.gives:
            raise Unavailable("the day's quota of this node is used up")

    async def resume(self) -> None:
        """After `hold`: catch up with the stage, then take work again. Raises Unavailable, and nothing has changed,
        when the nodes that had the state are gone meanwhile."""
        newcomer = await self._catch_up()
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
            self._rested = None
        self.gossip.hold(False)
        self.backup.hold(False)
        if newcomer:
            await self._sync()
        self.held_work.hold(None)

    async def _catch_up(self) -> bool:
        """Take the stage's state from other replicas, as a joiner does, if rounds went by during the pause.

        Where nobody else serves the stage, the newest of this replica's state and what is kept counts. Returns whether
        its next round is to be received at weight 0. Raises Unavailable.
        """
        presence = self._context.presence
        await self.gossip.idle.wait()  # a round begun before the pause goes on, and its outer step needs its mark
        await presence.look([self.stage])
        older = self._behind.is_set() or self._outdated() or bool(self._from)
        return older and await self._restore_again()

    def _outdated(self) -> bool:
        """Whether others may have a newer state: rounds went by while this replica was held, or nodes serve the stage
        that began with its state, or an older one."""
        done = self._context.presence.progress.total // self._context.manifest.gossip.round_samples
        self._note_relief()
        return done > self.gossip.done or (self._was_last and self._relieved)

    def _note_relief(self) -> None:
        """Remember whether others served the stage while this replica was held."""
        self._relieved = self._relieved or (self._resting is not None and self._others_serve())

    def _others_serve(self) -> bool:
        presence = self._context.presence
        return bool(donors_of(presence.peer_table.swarm(), self.stage, presence.me))

    async def _restore_again(self, round_min: int = 0) -> bool:
        """Take the state after round `round_min` or later, if another node has a newer one than this replica. Returns
        and raises as `_catch_up`."""
        presence = self._context.presence
        only = self._from & {*donors_of(presence.peer_table.swarm(), self.stage, presence.me)}
        self._from = frozenset()
        restorer = self._context.restorer
        restored = await restorer.restore(
            self.replica,
            self.stage,
            round_min=round_min,
            only=only,
            backup=self.backup.kept(self.stage),
            own=OwnState(self._trained().total, self.gossip.line),
        )
        self.gossip.restored(max(self.gossip.done, restored.round), restored.line, newcomer=restored.newcomer)
        self._return.settled()
        return restored.newcomer

    def _fell_behind(self, due: int) -> bool:
        """Whether this replica's state is older than its stage's before round `due` (stage_return.py): from now on it
        serves no microbatch, no round and no state until it has theirs."""
        presence = self._context.presence
        if self._behind.is_set() or presence.status.state != record_pb2.NODE_STATE_TRAINING:
            return False  # while it catches up, it is held
        if (found := self._return.behind(due)) is None:
            return False
        self._from, reason = found
        self._context.telemetry.event("state.behind", level="warning", round=self.gossip.done, reason=reason)
        self.hold("this replica's state is behind the run's", away=False)
        presence.set_state(record_pb2.NODE_STATE_SYNCING, reason)
        self._behind.set()
        return True

    async def _catching_up(self) -> None:
        """Take the stage's state whenever this replica fell behind, then serve again, until cancelled."""
        presence = self._context.presence
        while True:
            await self._behind.wait()
            try:
                await self.resume()
            except Unavailable as error:
                self._context.telemetry.event("recovery.waiting", stage=self.stage, reason=str(error))
                await asyncio.sleep(self._context.manifest.limits.announce_period_s)
                continue
            self._behind.clear()
            if presence.status.state == record_pb2.NODE_STATE_SYNCING:
                presence.set_state(record_pb2.NODE_STATE_TRAINING, "has the state of the run again")

    async def _sync(self) -> None:
        """Receive a first round. A newcomer that misses it takes the state once more, with that round in it; unless a
        further round ended meanwhile, it has what it would have received. Where each step is a round, a state is some
        rounds old when it has come over a home line, and the next one would be, too: later rounds heal that."""
        manifest = self._context.manifest
        gossip = self.gossip
        size = manifest.gossip.round_samples
        for again in range(SYNCS_AGAIN + 1):
            await self._first_round()
            if not gossip.missed or again == SYNCS_AGAIN or averages_gradients(manifest):
                return
            gossip.hold(True)
            await gossip.idle.wait()
            with suppress(Unavailable):
                await self._restore_again(gossip.done)
                if self._context.presence.progress.total // size <= gossip.done:
                    gossip.weight.serve()
            gossip.hold(False)
            if not gossip.weight.newcomer:
                return

    async def _first_round(self) -> None:
        """Receive one round at weight 0 before serving, unless the next round is too far away. Looks again at least
        every announce period, until it has waited for long enough."""
        gossip = self.gossip
        presence = self._context.presence
        manifest = self._context.manifest
        shares = costs(manifest)
        period_s = manifest.limits.announce_period_s
        begun = asyncio.get_running_loop().time()
        presence.set_state(record_pb2.NODE_STATE_SYNCING, "state loaded")
        while True:
            done = gossip.done
            waited_s = asyncio.get_running_loop().time() - begun
            received = not gossip.weight.newcomer
            swarm = presence.peer_table.swarm()
            # The run is at most as fast as its slowest stage says it could be.
            fastest = min(load(swarm, shares).capacity)
            round_in_s = gossip.left / fastest if fastest > 0.0 else 0.0
            if self.stage == 0 and not swarm.feeders():
                round_in_s = math.inf  # all wait for this node to feed
            ready, reason = ready_to_serve(
                swarm, self.stage, presence.me, received=received, waited_s=waited_s, round_in_s=round_in_s
            )
            if ready:
                gossip.weight.serve()  # it waits no longer for a round to receive
                self._context.telemetry.event("node.state", state="synced", reason=reason)
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(period_s, max(WAIT_MIN_S, ROUND_WAIT_MAX_S - waited_s))):
                    await gossip.beyond(done)

    # ---- calls, news, status

    def _in_service(self, handler: Handler) -> Handler:
        """`handler`, which refuses calls while this node does not serve microbatches."""

        def serve(peer: PeerId, call: Call) -> Awaitable[Answer]:
            if self._context.presence.status.state not in GIVING:
                raise Unavailable("this node does not serve yet")
            return handler(peer, call)

        return serve

    def _of_our_line(self, handler: Handler, leaves: bool = False) -> Handler:
        """`handler`, which refuses replicas whose state is of another line than ours. One that `leaves` gives what it
        learned at last, also to who took its place from a copy."""

        async def serve(peer: PeerId, call: Call) -> Answer:
            member = self._context.presence.peer_table.member(peer)
            line = self.gossip.line
            if member is not None and member.line != line and not (leaves and member.line.lost < line.lost):
                raise Unavailable("one of the two states lacks what the other has: they are not averaged")
            return await handler(peer, call)

        return serve

    async def _inherit(self, peer: PeerId, call: Call) -> Answer:
        answer = await self.backup.inherit(peer, call)
        self._context.presence.announce_change()  # a node that brings the stage back must know at once who has it
        return answer

    def status(self) -> StageStatus:
        """The stage at this moment."""
        self._note_relief()
        fed = fed_status(self.feeder)
        self._here.telemetry.gauge(name.TAPE_BYTES, float(self.hop.worker.pending.nbytes))
        kept = self.backup.snapshot
        if self.feeder is None and self.hop.loss.known:
            fed = replace(fed, loss_train=self.hop.loss.value)
        return replace(
            fed,
            samples_per_second=self._speed(),
            queue=self._context.ports.compute.waiting,
            round_index=self.gossip.done,
            round_stride=self.gossip.stride,
            meets_every_steps=self.gossip.meets_every_steps,
            kept_round=None if kept is None else kept.round_index,
            kept_samples=0 if kept is None else kept.samples,
            line=self.gossip.line,
            inner_steps=self.hop.inner_steps,
            given_tokens_per_second=self.hop.tokens_per_second(),
        )

    def on_progress(self) -> None:
        """The run's sample count grew: a round or a checkpoint may be due."""
        presence = self._context.presence
        if presence.peer_table.shape != self._shape:
            self._count_replicas()
        due = presence.progress.total // self._context.manifest.gossip.round_samples
        if self.gossip.idle.is_set() and self._return.asks(due):  # else it is asked before the next round
            self._fell_behind(due)
        self.gossip.on_progress()
        if self.checkpointer is not None:
            self.checkpointer.on_progress()

    def hear_blocks(self, told: Mapping[PeerId, record_pb2.Blocks], frontier_max: int) -> Iterable[RemoteFault]:
        """Take in the finished blocks announced by other feeders that were seen at work; returns those that cannot be
        believed."""
        if self.feeder is None:
            return ()
        believed = {peer: blocks for peer, blocks in told.items() if self._believes_blocks(peer)}
        return self.feeder.observe_blocks(believed, frontier_max)

    def _believes_blocks(self, feeder: PeerId) -> bool:
        """Whether `feeder`'s word on finished blocks counts: its packets were taken here. One that was never met may be
        a key alone, which would choose text that nobody trains; its blocks are another's by hash meanwhile. Where many
        strangers were tried and most of them came, or replicas never meet, its word counts."""
        if feeder == self._context.presence.me or self.gossip.acceptance.packets_taken(feeder):
            return True
        return self.gossip.strangers.proven(feeder) or not meets(self._context.manifest.gossip)

    def _judge(self, tasks: asyncio.TaskGroup) -> Judge:
        """The judge of this replica's peers. A run that judges nobody does not import what does."""
        if not judges(self._context.manifest):
            return Trusting()
        from swarmnode.train.node.audit_setup import stage_judge

        return stage_judge(self._context, self.stage, self.replica, tasks, self._training_text)

    def doubt(self, peers: Iterable[PeerId]) -> None:
        """Check whether calls to `peers`, which went silent, are still alive."""
        self._next_hop.doubt(peers)

    def strangers_come(self) -> bool:
        """Whether most replicas that were never met come when a round is tried with them."""
        return self.gossip.strangers.come

    def confirmed(self, peer: PeerId) -> int:
        """Answers of `peer` in a row that were checked and right."""
        return self.judge.confirmed(peer)

    def _fed(self, samples: int) -> None:
        self._context.presence.run_progress.record_fed(samples)
        self.on_progress()

    async def _training_text(self, indices: Sequence[int]) -> WireTensor | None:
        """Tokens of training samples. Raises Unavailable where this node feeds nothing."""
        if self.feeder is None:
            raise Unavailable("this node has no stage yet")
        return await self.feeder.samples.again(indices)

    def _finished_blocks(self) -> record_pb2.Blocks:
        return record_pb2.Blocks() if self.feeder is None else self.feeder.ledger.finished()

"""A stage that this node serves, from the first microbatch to the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from swarmnode.base.concurrency import background_tasks
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId, seeded, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.ports import Priority, Replica, State
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.recovery_source import RecoverySource
from swarmnode.keep.recovery.restore import RestoredState
from swarmnode.run.manifest.gossip_compat import meets
from swarmnode.train.node.drain import DrainReport, DrainTask, drain
from swarmnode.train.node.drain_steps import StageDrain
from swarmnode.train.node.feeder_loop import fed_status, feeding, ledger_of
from swarmnode.train.node.held_replica import FINISH_S, HeldReplica
from swarmnode.train.node.node_ports import NodeContext
from swarmnode.train.node.notice import Notices
from swarmnode.train.node.own_record import StageObserver, StageStatus
from swarmnode.train.node.run_text import JoinedStage
from swarmnode.train.node.stage_catch_up import CatchUp
from swarmnode.train.node.stage_change import StageRebalancer, StageTransfer
from swarmnode.train.node.stage_handlers import stage_handlers
from swarmnode.train.node.stage_parts import StageParts
from swarmnode.train.node.stage_saver import StageSaver
from swarmnode.train.pipeline.feeder import Feeder, Samples
from swarmnode.train.pipeline.microbatch_size import MicrobatchSizer
from swarmnode.train.pipeline.validation import Validator

if TYPE_CHECKING:
    from swarmnode.train.node.checkpointer import Checkpointer

HOPELESS_S = 4.0 * FINISH_S  # of work that takes so long little is finished; callers ask another replica sooner


class ServedStage(StageObserver):
    """A stage in service, from `open` until the end of its block. `checkpointer` is None on nodes that save no
    checkpoints."""

    def __init__(self, context: NodeContext, joined: JoinedStage, served_before: int, tasks: asyncio.TaskGroup) -> None:
        """`served_before`: stages that this process served before; `tasks` run as long as the stage is served."""
        self._context = context
        self._tasks = tasks
        self._text = joined.text
        self.stage = joined.stage
        self.replica = joined.replica
        self.parts = parts = StageParts(context, joined, served_before, tasks)
        self.hop = parts.hop
        self.gossip = parts.gossip
        self.backup = parts.backup
        self.held_work = parts.held_work
        self.held = HeldReplica(parts, tasks)
        self.catch_up = CatchUp(parts, self.held)
        self.saver = StageSaver(parts, self.held.trained)
        self.checkpointer: Checkpointer | None = None
        if (store := context.ports.saving.store) is not None:
            from swarmnode.train.node.checkpointer import Checkpointer

            self.checkpointer = Checkpointer(context, parts.here, store, self.gossip, parts.finished_blocks)
        self.handlers = stage_handlers(parts, self.held)

    @classmethod
    @asynccontextmanager
    async def open(cls, context: NodeContext, joined: JoinedStage, served_before: int) -> AsyncIterator[ServedStage]:
        """Serve the replica of `joined` for the length of a block. Its calls are answered at once; `serve` makes it
        take work."""
        async with background_tasks() as tasks:
            served = cls(context, joined, served_before, tasks)
            tasks.create_task(served.backup.run())
            tasks.create_task(served.gossip.run())
            tasks.create_task(served.catch_up.watch.run())
            if (tied_ends := served.parts.tied_ends) is not None:
                tasks.create_task(tied_ends.run())
            if served.checkpointer is not None:
                tasks.create_task(served.checkpointer.run())
            try:
                yield served
            finally:
                served.held.donor.close()

    async def serve(self) -> StageTransfer:
        """Receive a first round where this replica is a newcomer, feed at the first stage, and take work until this
        node should serve another stage, whose state it then has."""
        context = self._context
        if self.parts.restored.newcomer:
            await self.catch_up.sync()
        if self._text is not None:
            self._feed(self._text)
        context.presence.own.set_state(record_pb2.NODE_STATE_TRAINING, "ready")
        context.telemetry.event("node.ready", serves=self.stage)
        self._tasks.create_task(self.catch_up.run())
        self._tasks.create_task(self.saver.run())
        return await self._until_moved()

    def _feed(self, samples: Samples) -> None:
        context = self._context
        presence = context.presence
        manifest = context.manifest
        parts = self.parts
        parts.feeder = feeder = Feeder(
            manifest,
            context.me,
            presence.own.incarnation + parts.served_before,  # differs between all feeders of the same key
            self.hop,
            samples,
            MicrobatchSizer(manifest, context.me, presence.status.rates, parts.speed, context.ports.host),
            ledger_of(presence, manifest, samples.span),
            presence.believed,
            self._fed,
            context.telemetry,
            self.gossip.room,
            lambda: self.gossip.next_round,
        )
        parts.validator = validator = Validator(feeder)
        self.gossip.feed_by(feeder.changed.set, lambda: feeder.spared)
        self.held_work.feed_by(feeder)
        resumed = context.ports.saving.resume is not None or bool(context.restorer.saved.found)
        done = parts.restored.round
        self._tasks.create_task(feeding(feeder, validator, self.gossip, presence.samples_total, done, resumed))

    async def _until_moved(self) -> StageTransfer:
        """Wait until this node should serve another stage, and has that stage's state."""
        context = self._context
        presence = context.presence
        chance = seeded(context.manifest.seed, "moving", context.me, presence.own.incarnation, self.parts.served_before)
        if presence.own.stays:
            from swarmnode.train.node.span_change import BlockRebalancer  # few machines serve several stages

            return await BlockRebalancer(context, chance, self.parts.speed).run()
        rebalancer = StageRebalancer(
            context,
            self.replica,
            self.gossip,
            chance,
            samples_here=lambda: self.hop.samples,
            speed=self.parts.speed,
            work_here=lambda: self.hop.worked,
        )
        return await rebalancer.run()

    # ---- the end

    async def withdraw(self, transfer: StageTransfer) -> None:
        """Take no new work before the move of `transfer`, and finish what is held, in FINISH_S at most; not at all
        while a stage stands empty, where all wait for the mover, nor if that is hopeless."""
        presence = self._context.presence
        presence.own.set_state(record_pb2.NODE_STATE_DRAINING, f"moves to {stage_name(transfer.stage)}")
        self.held_work.refuse("this node is leaving")
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_S):
                await presence.announce()  # under the key of this stage, before it is announced elsewhere
                if transfer.state is not None and self.parts.backlog.seconds <= HOPELESS_S:
                    await self.held_work.finish()
        cut = self.held_work.held
        reason = transfer.reason
        self._context.telemetry.event("stage.moved", source=self.stage, target=transfer.stage, cut=cut, reason=reason)

    async def rest(self) -> tuple[Callable[[Replica], JoinedStage], State, int]:
        """Begin nothing new, finish what is held, in FINISH_S at most, and the round under way. Returns what a
        successor goes on with: its stage, for a new replica; the whole state of this one, and the last round in it."""
        context = self._context
        run = partial(context.ports.compute.run, Priority.OUTER, 0)
        context.presence.own.going_to(None)
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
        speed = self.parts.speed()
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
        if self.held.held and self.held.outdated():
            self.gossip.drop_unsent()

        async def save() -> None:
            await self.saver.save()
            if checkpoint and self.checkpointer is not None:
                await context.presence.look([0])  # feeders that have left said in their last records what they fed
                await self.checkpointer.save(checkpoint)

        known = [*context.ports.saving.archives, *context.caller_check.archivists()]
        archives = list(dict.fromkeys(peer for peer in known if peer != context.me))
        donor = self.held.donor
        return StageDrain(self.parts.here, self.gossip, donor, self.held_work, save, report, archives).steps()

    # ---- news, status

    def status(self) -> StageStatus:
        """The stage at this moment."""
        self.held.note_relief()
        feeder = self.parts.feeder
        fed = fed_status(feeder, self.parts.validator)
        self._context.telemetry.gauge(name.TAPE_BYTES, float(self.hop.worker.pending.nbytes))
        kept = self.backup.snapshot
        if feeder is None and self.hop.loss.known:
            fed = replace(fed, loss_train=self.hop.loss.value)
        return replace(
            fed,
            samples_per_second=self.parts.speed(),
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
        self.parts.on_progress()
        self.catch_up.on_progress()
        self.gossip.on_progress()
        if self.checkpointer is not None:
            self.checkpointer.on_progress()

    def _fed(self, samples: int) -> None:
        self._context.presence.run_progress.record_fed(samples)
        self.on_progress()

    def hear_blocks(self, told: Mapping[PeerId, record_pb2.Blocks], frontier_max: int) -> Iterable[RemoteFault]:
        """Take in the finished blocks announced by other feeders that were seen at work; returns those that cannot be
        believed."""
        if self.parts.feeder is None:
            return ()
        believed = {peer: blocks for peer, blocks in told.items() if self._believes_blocks(peer)}
        return self.parts.feeder.observe_blocks(believed, frontier_max)

    def _believes_blocks(self, feeder: PeerId) -> bool:
        """Whether `feeder`'s word on finished blocks counts: its packets were taken here. One that was never met may be
        a key alone, which would choose text that nobody trains; its blocks are another's by hash meanwhile. Where many
        strangers were tried and most of them came, or replicas never meet, its word counts."""
        if feeder == self._context.presence.me or self.gossip.acceptance.packets_taken(feeder):
            return True
        return self.gossip.strangers.proven(feeder) or not meets(self._context.manifest.gossip)

    def doubt(self, peers: Iterable[PeerId]) -> None:
        """Check whether calls to `peers`, which went silent, are still alive."""
        self.parts.next_hop.doubt(peers)

    def strangers_come(self) -> bool:
        """Whether most replicas that were never met come when a round is tried with them."""
        return self.gossip.strangers.come

    def confirmed(self, peer: PeerId) -> int:
        """Answers of `peer` in a row that were checked and right."""
        return self.parts.judge.confirmed(peer)

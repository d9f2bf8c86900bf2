"""A volunteer's node: it joins, serves a stage, moves to others, and leaves.

Everything runs over ports, so that the simulator runs the same coroutines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Never, TypeVar

from swarmnode.base.bounds import STAGES_MAX
from swarmnode.base.concurrency import background_tasks, forever
from swarmnode.base.errors import KeyInUse
from swarmnode.base.ids import PeerId, RunId, short, swarm_of
from swarmnode.base.ports import Answer, Call, Handler, Priority, Replica, State, Transport
from swarmnode.base.token_rate import RunSpeed
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.checkpoint import Origin
from swarmnode.keep.recovery.restore import StateRestorer
from swarmnode.keep.recovery.restore_context import BaseWeights
from swarmnode.keep.recovery.resumption import EarlierCut, SavedStages
from swarmnode.keep.transfer.chunk_set import serve_chunks
from swarmnode.keep.transfer.donor import LoadedDonor
from swarmnode.keep.transfer.snapshot import Snapshot
from swarmnode.net.membership.liveness import Pinger
from swarmnode.run.admission.amendment import Amendments
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.caller_check import CallerCheck
from swarmnode.train.node.drain import DrainReport, goodbye
from swarmnode.train.node.failure_detector import FailureDetector, SilenceWatch
from swarmnode.train.node.feeder_loop import announce_checkpoints
from swarmnode.train.node.node_ports import NodeContext, NodePorts
from swarmnode.train.node.notice import Notice, Notices
from swarmnode.train.node.own_record import MemberPorts, StageStatus
from swarmnode.train.node.pause import PauseControl, StageSlot
from swarmnode.train.node.piggyback import PiggybackTransport
from swarmnode.train.node.presence import Presence
from swarmnode.train.node.report import measuring
from swarmnode.train.node.run_text import JoinedStage, RunText, attend_stage, choose, join_stage
from swarmnode.train.node.served_stage import ServedStage
from swarmnode.train.node.stage_change import StageTransfer
from swarmnode.train.node.stage_handlers import METHODS

if TYPE_CHECKING:
    from swarmnode.train.node.span import PartNode, ServedSpan, SpanPorts

T = TypeVar("T")


class Node:
    """A replica of one stage at a time."""

    def __init__(
        self, manifest: Manifest, run_id: RunId, ports: NodePorts, cut: int = 0, spans: SpanPorts | None = None
    ) -> None:
        """`cut`: the amendment that cut the stages of `manifest` as they are, 0: none did. `spans` None: this machine
        serves one stage, or this node is a part of one that serves more."""
        self._manifest = manifest
        self._cut = cut
        self._amendments = None if ports.admission is None else ports.admission.amendments
        earlier = _cut_before(self._amendments, cut)
        self.ports = ports
        self._telemetry = ports.telemetry
        self._slot = slot = StageSlot()
        swarm_id = swarm_of(run_id, cut)
        self.presence = presence = Presence(
            MemberPorts(manifest, swarm_id, ports.directory, ports.clock, ports.identity, ports.telemetry),
            slot.observer,
            admission=ports.admission,
            unable=ports.unable,
            saves_checkpoints=ports.saving.store is not None,
        )
        self.me = presence.me
        self._run_speed = RunSpeed(manifest.model.context)
        self._caller_check = CallerCheck(manifest, run_id, presence, ports.clock, ports.owner)
        self.transport = PiggybackTransport(
            ports.transport,
            presence.progress,
            presence.own.record,
            self._caller_check.learn,
            lambda: slot.observer().on_progress(),
            presence.run_progress.report_overclaim,
            presence.peer_table.excluded,
            ports.work,
        )
        self.pinger = pinger = Pinger(self.transport, run_id)
        self.restorer = restorer = StateRestorer(
            manifest,
            run_id,
            self.transport,
            presence,
            pinger,
            ports.compute,
            ports.clock,
            ports.telemetry,
            ports.saving,
            SavedStages(ports.saving.home, Origin.of(manifest, run_id, ports.saving.signed), cut, earlier),
            self._caller_check.warranted,
            _base_weights(manifest, run_id, ports, self.transport, presence),
            ports.replica,
            earlier,
        )
        self._silence = SilenceWatch(manifest, run_id, self.transport, presence, ports.telemetry)
        failure_detector = FailureDetector(manifest, presence, pinger, ports.clock, ports.telemetry)
        self._context = NodeContext(
            manifest,
            run_id,
            ports,
            presence,
            self._caller_check,
            self.transport,
            pinger,
            restorer,
            failure_detector,
            None if spans is None else spans.block,
        )
        self._text = RunText(self._context)
        self.pause_control = PauseControl(presence, slot, ports.telemetry)
        self.drain_report: DrainReport | None = None  # once the node leaves
        self._final_checkpoint = ""
        self._backup: Snapshot | None = None  # kept of another stage while the last one was served
        self._turn: asyncio.Task[Any] | None = None  # the step in `_live` that a notice interrupts
        self._leaving = False
        self._notices: Notices | None = None
        self._spans = spans
        self._span: ServedSpan | None = None
        self._served_before = 0  # stages, and times that one was entered again
        self._register()

    @property
    def stage(self) -> int | None:
        """The stage this node serves or joins; None before it has chosen one."""
        return self.presence.status.stage

    @property
    def state(self) -> record_pb2.NodeState:
        """The state that other nodes see."""
        return self.presence.status.state

    @property
    def served(self) -> ServedStage | None:
        """The stage being served; None before the first and between two of them."""
        return self._slot.served

    def stage_status(self) -> StageStatus:
        """The served stage at this moment; the status of no stage while none is served."""
        return self._slot.status()

    def samples_total(self) -> int:
        """Samples that the whole run has trained, as far as known here."""
        return self.presence.samples_total()

    def run_tokens_per_second(self) -> float:
        """Tokens that the whole run reads per second, as far as known here."""
        now_s = asyncio.get_running_loop().time()
        progress = self.presence.progress
        return self._run_speed.look(now_s, progress.feeders, self.me, progress.counted)

    def save_before_leaving(self, checkpoint: str) -> None:
        """Save the stage in the checkpoint of this label before leaving; "": in none."""
        self._final_checkpoint = checkpoint
        for part in self.parts.values():
            part.save_before_leaving(checkpoint)

    async def run(self, notices: Notices, stage: int | None = None) -> DrainReport:
        """Live until a notice says go, then leave within its time. `stage` None: the one that needs a replica most.

        Raises Unavailable when the stage's state is nowhere to be had, and LocalFault when this machine fails: then the
        process should end and be started again.
        """
        self._notices = notices
        async with background_tasks() as tasks:
            tasks.create_task(self._stand_aside())
            living = tasks.create_task(self._live(tasks, stage))
            notices.on_advice(lambda advice: self._prepare(tasks))
            notice = await notices.wait()
            self._leaving = True
            (self._turn or living).cancel()
            report = await self._leave(notices, notice)
            if self._span is not None:
                await self._span.left()
            return report

    async def _stand_aside(self) -> None:
        """Raise KeyInUse once another process turns out to run with our key that began before this one."""
        await self.presence.own.twin_seen.wait()
        twin = self.presence.own.twin
        where = f" at {twin.addresses[0]}" if twin is not None and twin.addresses else ""
        raise KeyInUse(
            f"another process runs with this machine's key ({short(self.me)}{where}): this home is a copy of its home."
            " That one goes on, this one stands aside. To run both, delete node.key in this one's home (--home), and"
            " join again"
        )

    def _register(self) -> None:
        """Register all handlers before any peer can learn the address. Without a stage they raise Unavailable."""
        works = self.presence.run_progress.clock.history.times.__contains__
        serve_chunks((self.ports.data, self.ports.base), self.transport, self._telemetry, works)
        nbytes_max = self._manifest.limits.frame_bytes_max
        offload = self.ports.hashing or partial(self.ports.compute.run, Priority.OUTER, 0)
        give = {}
        if (earlier := self.restorer.earlier) is not None:
            from swarmnode.keep.recovery.former_cut import FormerCut  # few runs cut their stages anew

            give_piece = FormerCut(self.restorer, earlier.manifest).give
            pieces = LoadedDonor(self._context.run_id, give_piece, offload, self._telemetry)
            give = {"snapshot": pieces.offer, "chunk": pieces.chunk}
        admit = self._caller_check.admit("silence")
        self.transport.serve("silence", self._silence.hear, tensor_bytes_max=0, admit=admit)
        for method, tensors in METHODS.items():
            handler = self._slot.handler(method)
            self.transport.serve(
                method,
                self._or_piece(handler, give[method]) if method in give else handler,
                tensor_bytes_max=nbytes_max if tensors else 0,
                admit=self._caller_check.admit(method),
            )

    def _or_piece(self, handler: Handler, give: Handler) -> Handler:
        """`give` for stages of the cut before, `handler` for all others."""

        async def serve(peer: PeerId, call: Call) -> Answer:
            asked = call.header.snapshot if call.header.HasField("snapshot") else call.header.chunk
            return await (give if asked.stage >= STAGES_MAX else handler)(peer, call)

        return serve

    async def _live(self, tasks: asyncio.TaskGroup, stage: int | None) -> Never:
        """Choose a stage and serve it, then the next one, until cancelled."""
        presence = self.presence
        transport = self.transport
        telemetry = self._telemetry
        await self.pause_control.going.wait()
        presence.own.note(addresses=tuple(await transport.addresses()))
        await self.restorer.saved.look()
        announce_checkpoints(self.ports.saving, self.restorer.saved, presence, self._manifest)
        self._text.ask_for(stage)
        at = await choose(self._context, self._text, stage)
        self._open_span(tasks, at)
        tasks.create_task(self._text.keep_looking())
        period_s = self._manifest.limits.announce_period_s
        counts = presence.peer_table.counts
        tasks.create_task(
            measuring(transport, counts, presence.samples_total, telemetry, period_s, self.run_tokens_per_second)
        )
        tasks.create_task(self._silence.run())
        transfer = None
        while True:
            transfer = await self._stay(at, transfer)
            if self._span is not None and transfer.stage != at:
                await self._span.leave(transfer.reason)
                self._open_span(tasks, transfer.stage)
            at = transfer.stage

    def _open_span(self, tasks: asyncio.TaskGroup, at: int) -> None:
        """Serve the stages around `at`, too, that this machine has room for."""
        if self._spans is None or self._notices is None:
            return
        block = self._spans.block(at)
        status = self.presence.status
        if len(block) <= 1:
            self.presence.own.note(span=block)
            return
        from swarmnode.train.node.span import ServedSpan  # few machines serve several stages

        self._span = span = ServedSpan(block, at, self._spans.make)
        self.presence.parts = [part.presence for part in span.parts.values()]
        self.presence.note_of_machine(span=block, allowance=status.allowance, gives=status.gives)
        self.pause_control.followers = [part.pause_control for part in span.parts.values()]
        self._telemetry.event("span.chosen", first=block.start, stages=len(block))
        tasks.create_task(span.run(self._notices))

    @property
    def spans(self) -> bool:
        """Whether machines of this run may serve several stages."""
        return self._manifest.pipeline.span_max > 1

    @property
    def parts(self) -> Mapping[int, PartNode]:
        """The nodes of this machine's further stages, by stage."""
        return {} if self._span is None else self._span.parts

    async def _stay(self, stage: int, transfer: StageTransfer | None) -> StageTransfer:
        """Join `stage` and serve it; returns what this node takes along to the next one."""
        async with background_tasks() as tasks:
            self._take_up(self.samples_total() // self._manifest.gossip.round_samples)
            joined = await self._unless_leaving(tasks, self._join(tasks, stage, transfer))
            if isinstance(joined, StageTransfer):
                return joined
            detector: asyncio.Task[None] | None = None
            while True:
                async with ServedStage.open(self._context, joined, self._served_before) as served:
                    self._served_before += 1
                    with self._slot.holding(served):
                        detector = detector or tasks.create_task(self._context.failure_detector.run())
                        moving = await self._unless_leaving(tasks, self._serve(served))
                        if moving is not None:
                            await served.withdraw(moving)
                            if self._leaving:
                                await forever()
                            self._backup = served.backup.snapshot
                            return moving
                        rejoin, state, done = await self._unless_leaving(tasks, served.rest())
                del served, joined  # the replica is as large as the one that takes its place
                joined = rejoin(await self._unless_leaving(tasks, self._replica_again(stage, state, done)))
                del state

    async def _serve(self, served: ServedStage) -> StageTransfer | None:
        """Serve until this node should serve another stage; None: until an amendment is in effect."""
        if self._amendments is None:
            return await served.serve()
        async with background_tasks() as tasks:
            serving = tasks.create_task(served.serve())
            amended = tasks.create_task(self._amended(served))
            await asyncio.wait({serving, amended}, return_when=asyncio.FIRST_COMPLETED)
            return serving.result() if serving.done() else None

    async def _amended(self, served: ServedStage) -> None:
        """Return when a round is done from which on the owner wants another manifest than this stage is served with."""
        assert self._amendments is not None
        while True:
            done = served.gossip.done
            state = self.presence.status.state
            if state == record_pb2.NODE_STATE_TRAINING and self._changes(self._amendments.at(done)):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._manifest.limits.announce_period_s):
                    await served.gossip.beyond(done)

    def _changes(self, manifest: Manifest) -> bool:
        """Whether `manifest` is another one that these stages can be served with: for other ones the process starts
        anew."""
        return manifest.pipeline.stages == self._manifest.pipeline.stages and manifest != self._context.manifest

    def _take_up(self, round_index: int) -> None:
        """Go on with the manifest that is in effect once `round_index` is done."""
        if self._amendments is None or not self._changes(manifest := self._amendments.at(round_index)):
            return
        self._context = replace(self._context, manifest=manifest)
        serial = self._amendments.serial(round_index)
        text = self._amendments.text(self._amendments.chain[serial - 1]) if serial else ""
        self._telemetry.event("amendment.applied", round=round_index, amendment=serial, changes=text)

    async def _replica_again(self, stage: int, state: State, done: int) -> Replica:
        """A replica of `stage` with `state`, made for the manifest in effect once round `done` is."""
        self._take_up(done)
        make = partial(self.ports.replica, self._context.manifest, stage)
        replica = await self.ports.compute.run(Priority.OUTER, 0, make)
        await self.restorer.freeze(replica, stage)
        await self.restorer.load(replica, state)
        return replica

    async def _join(
        self, tasks: asyncio.TaskGroup, stage: int, transfer: StageTransfer | None
    ) -> JoinedStage | StageTransfer:
        """Come to `stage`, or know the stage to serve instead, where this machine cannot have the run's text."""
        attend_stage(self._context, tasks, stage, transfer)
        text, refusal = await self._text.ready(stage)
        if refusal:
            return StageTransfer(await choose(self._context, self._text, None), refusal, 0.0, None)
        return await join_stage(self._context, tasks, stage, transfer, text, self._backup)

    async def _unless_leaving(self, tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. When this node is told to leave, `work` is cancelled, and this waits for the end: all
        that goes on at the stage is needed until then."""
        if self._leaving:
            work.close()
            await forever()
        self._turn = turn = tasks.create_task(work)
        await asyncio.wait({turn})
        if turn.cancelled():
            await forever()
        return turn.result()

    async def _leave(self, notices: Notices, notice: Notice) -> DrainReport:
        """Refuse new work, and hand on what fits into the time left (drain.py)."""
        begun = asyncio.get_running_loop().time()
        self.drain_report = report = DrainReport(notice)
        if self.presence.status.stage is not None:
            self.presence.own.set_state(record_pb2.NODE_STATE_DRAINING, notice.reason)
        if self.served is None:
            report.begin(notices.left_s(), self._telemetry)
        else:
            await self.served.drain(notices, report, self._final_checkpoint)
        await goodbye(notices, self.presence, self._telemetry)
        seconds = asyncio.get_running_loop().time() - begun
        report.end(seconds, self.presence.peer_table.swarm(), self._telemetry)
        return report

    def _prepare(self, tasks: asyncio.TaskGroup) -> None:
        """Write the stage to disk: this machine may be taken away soon, perhaps without another word."""
        if self.served is not None:
            tasks.create_task(self.served.saver.save())


def _base_weights(
    manifest: Manifest, run_id: RunId, ports: NodePorts, transport: Transport, presence: Presence
) -> BaseWeights | None:
    """The weights of the pretrained model that the run starts from, if it does."""
    if ports.base is None:
        return None
    from swarmnode.train.node.base_fetcher import BaseFetcher

    return BaseFetcher(manifest, run_id, ports, transport, presence)


def _cut_before(amendments: Amendments | None, cut: int) -> EarlierCut | None:
    """The stages as they were before amendment `cut` cut them anew; None where none did."""
    if not cut or amendments is None:
        return None
    before = amendments.cuts[amendments.cuts.index(cut) - 1]
    return EarlierCut(before, amendments.after(cut - 1), amendments.chain[cut - 1].from_round)

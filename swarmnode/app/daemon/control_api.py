"""The daemon's side of the control API, answered from its parts."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from swarmnode import __version__
from swarmnode.app.daemon.clock import SystemClock
from swarmnode.app.daemon.empty_stages import empty_stages, sleepers
from swarmnode.app.daemon.options import NodeOptions
from swarmnode.app.machine.stage_fit import StageFit
from swarmnode.base.errors import RemoteFault, Unavailable, UsageError
from swarmnode.base.ids import PeerId, RunId, machine_of, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.metrics.events import RecentEvents
from swarmnode.base.metrics.exporter import PrometheusTelemetry
from swarmnode.base.ports import Call, Transport
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import control_pb2, record_pb2, report_pb2
from swarmnode.base.work import Work
from swarmnode.data.corpus import Corpus
from swarmnode.net.membership.liveness import SAMPLE
from swarmnode.net.transport.address import parse_bootstraps
from swarmnode.net.transport.call_directory import CallDirectory
from swarmnode.net.transport.capacity import best
from swarmnode.net.transport.reachability import ask, verdict
from swarmnode.net.transport.stream_transport import StreamTransport
from swarmnode.run.admission.admission import Admission
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.gossip_compat import planned_meeting_steps
from swarmnode.train.node.drain import DrainReport
from swarmnode.train.node.limits import show
from swarmnode.train.node.node import Node
from swarmnode.train.node.notice import Notice, NoticeKind, Notices
from swarmnode.train.node.regulator import Regulator
from swarmnode.train.node.waiting import Place, Waits

if TYPE_CHECKING:
    from swarmnode.app.dashboard.heartbeat import Heartbeat
    from swarmnode.app.machine.run_archive import Archive

TIMEOUT_S = 12.0
PINGS = 3  # the first may open a stream: the fastest counts
HELPERS_MAX = 4
MEASURE_S = 8.0
EXAMINED_MAX = SAMPLE  # peers asked in one examination, which takes a few seconds


def waiting_at(status: report_pb2.StatusReply, waits: Waits, now_unix_s: float) -> list[report_pb2.Wait]:
    """Why the node of `status`, which has all else, waits now."""
    asleep = {stage: f"{stage_name(stage)} sleeps {until}" for stage, until in sleepers(status).items()}
    state = status.state or record_pb2.NODE_STATE_JOINING  # it looks for its stage
    feeds = bool(status.state) and status.stage == 0
    place = Place(state, empty_stages(status), asleep, status.given_tokens_per_second, feeds)
    return [
        report_pb2.Wait(
            cause=one.cause.name,
            says=one.says,
            can_do=one.cause.do,
            for_s=now_unix_s - one.since_s,
            stops=one.cause.stops,
        )
        for one in waits.now(place)
    ]


async def _exam(transport: Transport, peer: PeerId, stage: int) -> control_pb2.PeerExam:
    """The connection to a peer, its rates not yet measured."""
    exam = control_pb2.PeerExam(peer_id=peer, stage=stage, latency_s=math.inf)
    loop = asyncio.get_running_loop()
    try:
        for _ in range(PINGS):
            begun = loop.time()
            await transport.call(peer, Call(wire.Request(ping=wire.Ping())), timeout_s=TIMEOUT_S, reply_bytes_max=0)
            exam.latency_s = min(exam.latency_s, loop.time() - begun)
    except (RemoteFault, Unavailable) as error:
        exam.fault = str(error)
        exam.latency_s = 0.0
    return exam


@dataclass(frozen=True, slots=True)
class DaemonContext:
    """The common parts of a member's and a bootstrap's process."""

    options: NodeOptions
    run_id: RunId
    manifest: Manifest
    transport: StreamTransport
    directory: CallDirectory
    telemetry: PrometheusTelemetry
    metrics_address: str
    recent: RecentEvents
    signed: record_pb2.SignedManifest
    admission: Admission
    clock: SystemClock
    cut: int  # the amendment that cut the stages as they are here; 0: none did
    swarm: RunId  # the id in records of nodes with these stages
    waits: Waits  # why this node waits
    fit: StageFit | None = None  # the stages that this machine can serve; None for a bootstrap
    corpus: Corpus | None = None  # the run's text in files of this machine, where this node may feed from them
    forbidden: list[str] = field(default_factory=list)  # the reason why we may no longer take part, at most one
    recut: list[int] = field(default_factory=list)  # the cut that the run goes on in, at most one


def peers_of(node: Node, now_unix_s: float) -> Iterator[report_pb2.PeerStatus]:
    """The other members, as `node` sees them."""
    now_s = asyncio.get_running_loop().time()
    for member in node.presence.peer_table.swarm().members():
        if member.peer == node.me:
            continue
        router = node.presence.routing.routers[member.stage]
        yield report_pb2.PeerStatus(
            peer_id=member.peer,
            stage=member.stage,
            state=member.state,
            samples_per_second=member.samples_per_second,
            queue=member.queue,
            round=member.round_index,
            resumes_s=max(0.0, member.resumes_unix_s - now_unix_s),
            latency_s=router.expected_s(member.peer, 1) or 0.0,
            banned=router.banned(member.peer, now_s),
        )


class ControlApi:
    """The methods of control.verb.VERBS for one daemon. Before `open` every request fails with Unavailable."""

    def __init__(self, options: NodeOptions, notices: Notices) -> None:
        self._options = options
        self._notices = notices
        self._process: DaemonContext | None = None
        self._node: Node | None = None
        self.left: asyncio.Future[DrainReport | None] = asyncio.get_running_loop().create_future()
        self._started_s = asyncio.get_running_loop().time()
        self.regulator: Regulator | None = None
        self._archive: Archive | None = None
        self._live: Heartbeat | None = None
        self.finishing = asyncio.Event()
        self.gave: Callable[[], Work] = Work  # the sum of this node's receipts of the run
        self.gave_before = Work()  # the same when this process began
        self._page = ""  # the run's page, as a meeting point of the invite says

    def open(self, process: DaemonContext, node: Node | None) -> None:
        """Answer requests from now on; `node` None is a bootstrap."""
        self._process = process
        self._node = node

    def account(self, gave: Callable[[], Work]) -> None:
        """Show what this node `gave`, the sum of its receipts of the run, from now on."""
        self.gave = gave
        self.gave_before = gave()

    def show_page(self, url: str) -> None:
        """Name the run's page in the status."""
        self._page = url

    def offer(self, archive: Archive | None, live: Heartbeat | None) -> None:
        """Let `archive` copy the run when somebody asks, and tell what the page of `live` shows."""
        self._archive = archive
        self._live = live

    @property
    def process(self) -> DaemonContext:
        if self._process is None:
            raise Unavailable("this node is still starting: ask again in some seconds")
        return self._process

    def ready(self) -> bool:
        """Whether the daemon does its work: as /readyz, and False before it has begun."""
        return self._process is not None and self._process.telemetry.readiness()[0]

    def status(self) -> report_pb2.StatusReply:
        """The daemon's complete status."""
        process = self.process
        resident = psutil.Process().memory_info().rss
        process.telemetry.gauge(name.RESIDENT_BYTES, float(resident))
        reply = report_pb2.StatusReply(
            run_id=process.run_id,
            peer_id=process.transport.peer_id,
            run_name=process.manifest.name,
            version=__version__,
            stages=process.manifest.pipeline.stages,
            uptime_s=asyncio.get_running_loop().time() - self._started_s,
            metrics_address=process.metrics_address,
            resident_nbytes=resident,
            counters=process.telemetry.counters(),
            trains_nothing=self._node is None,
        )
        reply.home = str(self._options.home)
        reply.page = self._page
        if (amendments := process.admission.amendments) is not None:
            done = None if self._node is None else self._node.stage_status().round_index
            reply.amendments.extend(process.admission.alarms())
            reply.amendments.extend(amendments.lines(done or None))  # before its first round it knows of none in force
        reply.clock = process.clock.fault
        reply.least_version = process.admission.rules.access_list.least_version
        if self.regulator is not None:
            reply.limits.CopyFrom(self.limits())
        if self._node is not None:
            self._tell_work(reply, self._node)
            reply.peers.extend(peers_of(self._node, process.clock.unix_s()))
            reply.waits.extend(waiting_at(reply, process.waits, process.clock.unix_s()))
        return reply

    def _tell_work(self, reply: report_pb2.StatusReply, node: Node) -> None:
        """Say in `reply` where the node serves, what it does, and what it gave."""
        manifest = self.process.manifest
        place = node.presence.status.stage
        reply.state = node.state if place is not None else record_pb2.NODE_STATE_UNSPECIFIED
        reply.stage = place or 0
        reply.addresses.extend(f"{address}/p2p/{node.me}" for address in node.presence.status.addresses)

        reply.samples_total = node.samples_total()
        reply.tokens_total = node.samples_total() * manifest.model.context
        reply.run_tokens_per_second = node.run_tokens_per_second()
        gave = self.gave()
        reply.given.CopyFrom(report_pb2.WorkReport(samples=gave.samples, tokens=gave.tokens, targets=gave.targets))
        reply.tokens_given = gave.tokens
        reply.tokens_given_before = self.gave_before.tokens

        served = node.stage_status()
        reply.given_tokens_per_second = served.given_tokens_per_second
        reply.round = served.round_index
        reply.meets_every_steps = served.meets_every_steps
        reply.meets_every_steps_planned = planned_meeting_steps(manifest)
        reply.inner_steps = served.inner_steps
        reply.tokens_per_second = served.tokens_per_second
        reply.loss_train = served.loss_train or 0.0
        reply.loss_validation = served.loss_validation or 0.0
        reply.loss_validation_samples = served.loss_validation_samples
        reply.loss_validation_first = served.loss_validation_first or 0.0

    def leave(self, reason: str, checkpoint: str, stopping: bool) -> None:
        """Start to leave, with the stage saved in `checkpoint` first unless that is ""; `stopping`: the whole run is
        being stopped."""
        if self._node is not None:
            self._node.save_before_leaving(checkpoint)
        self.process.telemetry.event("control.leave", reason=reason)
        self._notices.leave(reason, NoticeKind.STOP if stopping else NoticeKind.LEAVE)

    async def drain(self, notice_s: float, reason: str) -> control_pb2.DrainReply:
        """Leave as if the machine were taken away in `notice_s`; return when this node has left, with its report."""
        self.process.telemetry.event("control.leave", reason=reason, notice_s=notice_s)
        notice = Notice("control", NoticeKind.PREEMPT, notice_s, reason or "swarmnode drain")
        self._notices.give(notice)
        report = await asyncio.shield(self.left)
        numbers = dataclasses.asdict(report or DrainReport(notice))  # None: a bootstrap, or a node that had not begun
        return control_pb2.DrainReply(**{name: value for name, value in numbers.items() if name != "notice"})

    def _regulated(self) -> Regulator:
        if self.regulator is None:
            raise UsageError("a bootstrap has no limits: it neither trains nor moves tensors")
        return self.regulator

    def pause(self, for_s: float, reason: str) -> report_pb2.LimitsReply:
        """Pause, for a time or until told to resume."""
        self._regulated().pause(for_s, reason)
        return self.limits()

    def resume(self) -> report_pb2.LimitsReply:
        """End a pause."""
        self._regulated().resume()
        return self.limits()

    async def limit(self, changed: Mapping[str, str]) -> report_pb2.LimitsReply:
        """Change limits, and read the machine for them: the reply says which cannot be kept here. Raises UsageError."""
        try:
            if changed:
                self._regulated().change(changed)
                await self._regulated().look()
        except ValueError as error:
            raise UsageError(str(error)) from None
        return self.limits()

    def limits(self) -> report_pb2.LimitsReply:
        """The limits and their current effect."""
        regulator = self._regulated()
        verdict = regulator.verdict
        reading = regulator.reading
        reply = report_pb2.LimitsReply(limits=show(regulator.limits), running=verdict.running, reason=verdict.reason)
        if reading is not None:
            reply.quota_used_nbytes = reading.used_nbytes
            reply.temperature_c = reading.temperature_c or 0.0
            if verdict.until_unix_s is not None:
                reply.until_s = max(0.0, verdict.until_unix_s - reading.unix_s)
        return reply

    def finish(self, reason: str) -> None:
        """Start to finish all held work, then leave."""
        self.process.telemetry.event("control.leave", reason=reason)
        self.finishing.set()

    async def finished(self) -> None:
        """Return when `finish` was requested and all held work is done."""
        await self.finishing.wait()
        if self._node is not None:
            if self.regulator is not None:
                self.regulator.stand_back()
            await self._node.pause_control.finish("told to finish")
        self._notices.leave("told to finish")

    def config(self) -> control_pb2.ConfigReply:
        """The settings and the run's manifest as they are now."""
        from swarmnode.app.daemon.current_settings import manifest_now, settings_now

        done = None if self._node is None else self._node.stage_status().round_index
        fields = manifest_now(self.process.manifest, self.process.admission.amendments, done)
        rows = [*settings_now(self._options.settings, self.regulator), *fields]
        settings = [control_pb2.Setting(name=name, value=value, origin=origin) for name, value, origin in rows]
        return control_pb2.ConfigReply(settings=settings)

    def copy(self, older_s: float) -> control_pb2.CopyReply:
        """Have the archive copy the run, unless its newest checkpoint is of `older_s` ago or later (`current`). Raises
        UsageError without one."""
        if (archive := self._archive) is None:
            raise (
                Unavailable("this node is still starting: ask again in some seconds")
                if self._process is None
                else UsageError("no archive here")
            )
        current = archive.ask(older_s)
        newest = archive.catalog.newest
        return control_pb2.CopyReply(
            current=current,
            status=archive.status,
            folder=str(archive.catalog.folder.absolute()),
            newest="" if newest is None else newest.label,
        )

    def _page_of_run(self) -> Heartbeat:
        if self._live is None:
            raise UsageError("this daemon shows no page of the run: ask its coordinator")
        return self._live

    def run(self) -> control_pb2.RunReply:
        """The whole run, as the page shows it. Raises UsageError where there is none, as the next two."""
        live = self._page_of_run()
        from swarmnode.app.daemon.run_view import run_reply  # with the page's modules, which a node does without

        return run_reply(live)

    def members(self) -> control_pb2.MembersReply:
        """The machines of the run."""
        live = self._page_of_run()
        from swarmnode.app.daemon.run_view import members_reply

        return members_reply(live)

    def curves(self, points: int) -> control_pb2.CurvesReply:
        """The run's curves."""
        live = self._page_of_run()
        from swarmnode.app.daemon.run_view import curves_reply

        return curves_reply(live, points)

    async def examine(self) -> control_pb2.ExamineReply:
        """Measure the connection to peers, and ask whether they can reach us (public, local, relayed, private)."""
        transport = self.process.transport
        members = [] if self._node is None else list(self._node.presence.peer_table.swarm().members())
        known = {machine_of(member.peer): member.stage for member in members}
        known.pop(transport.peer_id, None)
        known |= {peer: 0 for peer, _ in parse_bootstraps(self._options.bootstrap)}
        async with asyncio.TaskGroup() as tasks:
            peers = list(known.items())[:EXAMINED_MAX]
            running = [tasks.create_task(_exam(transport, peer, stage)) for peer, stage in peers]
        exams = [task.result() for task in running]
        near = sorted((exam for exam in exams if not exam.fault), key=lambda exam: exam.latency_s)
        for exam in near[:1]:  # our own limit shows with any
            capacity, _ = await best(transport, [PeerId(exam.peer_id)], MEASURE_S)
            if capacity is not None:
                exam.up_bps = capacity.up_bps
                exam.down_bps = capacity.down_bps
        helpers = [PeerId(exam.peer_id) for exam in exams if not exam.fault][:HELPERS_MAX]
        reach, reason = verdict(await ask(transport, helpers))
        return control_pb2.ExamineReply(peers=exams, reach=str(reach), reason=reason)

"""This node's own record, its table of other peers, and the routers that are fed from the table."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swarmnode import __version__
from swarmnode.base.bounds import FIELDS, QUEUE_MAX, SPEED_MAX
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId, machine_of, seeded, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.ports import Clock, Directory, Telemetry
from swarmnode.base.wire import record_pb2
from swarmnode.model.split import costs
from swarmnode.net.membership.liveness import LOOK_SHARE, SOON_SHARE
from swarmnode.net.membership.peer_table import PeerTable
from swarmnode.net.membership.progress import Progress
from swarmnode.net.membership.record import (
    STRETCH_MAX,
    check_member,
    check_record,
    check_time,
    pass_of,
    sign_record,
)
from swarmnode.net.membership.run_progress import RunProgress
from swarmnode.net.membership.state_line import UNBROKEN, StateLine
from swarmnode.net.membership.swarm import SERVING, Member, Swarm, shared
from swarmnode.net.membership.trust import BelievedSwarm
from swarmnode.net.membership.twin import TwinWatch
from swarmnode.run.admission.access import too_old
from swarmnode.run.admission.admission import Admission
from swarmnode.run.manifest import Manifest
from swarmnode.train.pipeline.believed_rate import allowed_samples_per_s
from swarmnode.train.pipeline.microbatch_size import SampleRates
from swarmnode.train.pipeline.route import routers
from swarmnode.train.pipeline.span import share_of

EXPIRY_STEP_S = 0.002  # records tell milliseconds, and of two that expire at the same one a directory keeps the first
JUST_SHARE = 0.1  # guess: a node that changes its state has signed its record just before it publishes it
LOOK_MIN_S = 2.0  # derived: the announce period of a run that says none
MANY_SHARE = 0.1  # guess: members that came or changed since the last look
OTHERS_PERIODS = 3  # as liveness.LOST_PERIODS: rarer, and the failure detector would look up each by itself
# Derived: records read, with the digests and the searches for holders, and as much given to others, are .1 Mbit/s; a
# holder has twice that.
READ_BYTES_PER_S = 5000.0
ADDRESSES_MAX = 8
AHEAD_TOLERANCE_S = 0.001  # derived: of wall clocks; nodes foresee their pauses in whole seconds

Read = list[list[record_pb2.SignedRecord]]


@dataclass(frozen=True, slots=True)
class LocalStatus:
    """The facts about this node that do not depend on the stage it serves. Presence replaces the whole snapshot."""

    state: record_pb2.NodeState = record_pb2.NODE_STATE_JOINING
    stage: int | None = None  # None: not chosen yet
    samples_per_second: float = 0.0  # expected at the stage, until the stage is served and measures its own
    rates: SampleRates = field(
        default_factory=lambda: SampleRates({1: 1.0})
    )  # by microbatch size, probed at the first stage
    addresses: tuple[str, ...] = ()
    moving_to: int | None = None  # the stage this node is about to serve instead
    saved_samples: int = 0  # samples of the run when the stage that this node joins was saved on its disk
    saves_checkpoints: bool = False
    unable: frozenset[int] = frozenset()  # stages that this machine cannot serve
    span: range = range(0)  # stages that this machine serves together; empty: only its node's own
    data_digest: bytes = b""  # of the run's text, as this machine has it; empty: it has none
    boundary_digest: bytes = b""  # of the frozen subspace made here, in a run that has one
    allowance: record_pb2.Allowance | None = None  # limits that other nodes should expect
    gives: bool = True  # its volunteer's limits let it send state


@dataclass(frozen=True, slots=True)
class StageStatus:
    """The served stage at one moment. Losses are nats per token."""

    samples_per_second: float = 0.0
    queue: int = 0  # pieces of work that wait for the compute thread
    round_index: int = 0  # the last round finished
    round_stride: int = 1
    meets_every_steps: float = 0.0  # inner steps from meeting to meeting, as they were; 0: not known yet
    kept_round: int | None = None  # of the snapshot of the next stage; None: none is kept
    kept_samples: int = 0  # of the run in that snapshot
    line: StateLine = UNBROKEN  # of the state served
    inner_steps: int = 0
    loss_train: float | None = None  # smoothed; None: not known yet
    tokens_per_second: float = 0.0  # read, of samples fed here; 0 where this node feeds nothing
    given_tokens_per_second: float = 0.0  # read, of samples trained here
    loss_validation: float | None = None
    loss_validation_samples: int = 0  # samples of the run when it was measured
    loss_validation_first: float | None = None
    blocks: record_pb2.Blocks | None = None  # finished blocks of data; None where this node feeds nothing


NO_STAGE = StageStatus()


class StageObserver:
    """The work in hand, as Presence tells it news and asks it for its status; this one is none.

    Before a stage is served, and between two of them, nothing is told and `status` is that of no stage.
    """

    def status(self) -> StageStatus:
        """The stage at this moment."""
        return NO_STAGE

    def on_progress(self) -> None:
        """The run's sample count grew."""

    def hear_blocks(self, told: Mapping[PeerId, record_pb2.Blocks], frontier_max: int) -> Iterable[RemoteFault]:
        """Take in the finished blocks announced by other feeders; returns those that cannot be believed, such as more
        than `frontier_max` finished blocks."""
        return ()

    def doubt(self, peers: Iterable[PeerId]) -> None:
        """`peers` went silent: calls to them that are under way may never be answered."""

    def strangers_come(self) -> bool:
        """Whether most replicas that were never met come when a round is tried with them."""
        return True

    def confirmed(self, peer: PeerId, /) -> int:
        """Answers of `peer` in a row that were checked and right."""
        return 0


NO_WORK = StageObserver()


class Presence:
    """Announces this node, looks others up, and keeps the peer table and the routers current."""

    def __init__(
        self,
        manifest: Manifest,
        run_id: RunId,
        directory: Directory,
        clock: Clock,
        identity: Identity,
        telemetry: Telemetry,
        stage: Callable[[], StageObserver],
        *,
        admission: Admission | None = None,
        unable: frozenset[int] = frozenset(),
        saves_checkpoints: bool = False,
    ) -> None:
        """`stage` returns the work in hand. `admission` None: every peer may take part. `unable`: the stages that this
        machine cannot serve."""
        self._manifest = manifest
        self._costs = costs(manifest)
        self._run_id = run_id
        self._directory = directory
        self._clock = clock
        self._identity = identity
        self._telemetry = telemetry
        self.me = identity.peer_id
        self._stage = stage
        self.status = LocalStatus(unable=unable, saves_checkpoints=saves_checkpoints)
        self.progress = Progress()
        self.peer_table = PeerTable(manifest.pipeline.stages)
        self.banned = asyncio.Event()  # a router banned a peer; whoever waits clears it
        self._newly_banned: dict[PeerId, None] = {}
        self.routers = routers(manifest, self.me, lambda peer: stage().confirmed(peer), self._note_ban)
        self.run_progress = RunProgress(
            manifest,
            self.me,
            self.peer_table,
            self.progress,
            clock,
            telemetry,
            self._refused,
            lambda: stage().on_progress(),
        )
        seen = self.run_progress.clock.history.times
        self.peer_table.prefer(seen)
        self._believed = BelievedSwarm(self.me, seen, self._strangers_work, stages=manifest.pipeline.stages)
        self.blocks_heard: dict[PeerId, record_pb2.Blocks] = {}
        self.incarnation = int(clock.unix_s() * 1000)  # differs between two processes with the same key
        self._sequence = self.incarnation
        self._twins = TwinWatch(self.incarnation, manifest.limits.record_ttl_s)
        self.twin: record_pb2.Record | None = None
        """A record of a process with our key that began before this one and runs; `twin_seen` is set with it."""
        self.twin_seen = asyncio.Event()
        self._twins_met = set[int]()  # by when they began
        self._signed: record_pb2.SignedRecord | None = None
        self._signed_at = float("-inf")
        self._stretch = 1  # of our next record
        self._published_at = float("-inf")  # when the last one published was signed
        self.parts: list[Presence] = []  # of the machine's further stages
        self.admission = admission
        self._unix_ahead_s = 0.0  # Unix time less loop time, as the routers were told
        self._announce_now = asyncio.Event()
        self.sends_to: Collection[int] = ()  # nobody, before a stage is chosen
        self._chance = seeded(manifest.seed, "look", self.me, self.incarnation)

    @property
    def doubtful(self) -> bool:
        """Whether most replicas that were never seen at work did nothing when they were tried."""
        return self._believed.doubtful

    def idle(self, stage: int, least_s: float) -> bool:
        """Whether this node sends to `stage`, and its replicas have refused all work for `least_s` at least."""
        now = asyncio.get_running_loop().time()
        return stage in self.sends_to and self.routers[stage].idle(now, least_s)

    def believed(self) -> Swarm:
        """The swarm as this node counts it (net/membership/trust.py)."""
        return self._believed.of(self.peer_table.swarm(), self.status.stage, self.sends_to)

    def _strangers_work(self) -> bool:
        for stage in self.sends_to:
            if self.routers[stage].unknown.flooded:
                return False
        return self._stage().strangers_come()

    @property
    def _period_s(self) -> float:
        return self._stretch * self._manifest.limits.announce_period_s

    def _stretched(self, nbytes: int) -> int:
        """Announce periods of the run between two of our records: as many as keep the records that this node reads,
        those of its stage each time and a part of the others, of `nbytes` each, within READ_BYTES_PER_S."""
        own = self.status.stage
        sizes = self.believed().sizes
        here = sizes[own] if own is not None and own < len(sizes) else 0
        read = nbytes * (here + (sum(sizes) - here) / OTHERS_PERIODS)
        return min(STRETCH_MAX, max(1, math.ceil(read / READ_BYTES_PER_S / self._manifest.limits.announce_period_s)))

    def samples_total(self) -> int:
        """Samples that the whole run has trained, as far as known here."""
        return self.progress.total

    def note(self, **facts: Any) -> None:
        """Note facts about this node, fields of LocalStatus, for its next record."""
        self.status = replace(self.status, **facts)

    def note_of_machine(self, **facts: Any) -> None:
        """Note facts about this machine, for the records of all members that it is."""
        for presence in (self, *self.parts):
            presence.note(**facts)

    def going_to(self, stage: int | None) -> None:
        """Announce that this node is about to serve `stage` instead; None: that it stays."""
        self.note(moving_to=stage)
        self.announce_change()

    @property
    def device_share(self) -> float:
        """The share of the device's time that this stage has, beside the machine's others."""
        stage = self.status.stage
        return 1.0 if stage is None else share_of(stage, self.status.span, self._costs)

    @property
    def stays(self) -> bool:
        """Whether this node moves to no other stage: it is one of several on its machine."""
        return len(self.status.span) > 1

    def announce_speed(self, rates: SampleRates) -> None:
        """Announce how fast this machine is on its stage."""
        self.note(rates=rates, samples_per_second=rates.best * self.device_share)
        self.announce_change()

    def can_serve(self, stage: int, able: bool) -> None:
        """Note whether this machine can serve `stage`, for the next record."""
        self.note(unable=self.status.unable - {stage} if able else self.status.unable | {stage})

    def attend(self, stage: int, sends_to: Collection[int], samples_per_second: float, saved_samples: int = 0) -> None:
        """Be at `stage` from now on: know all its members, and send work to those of `sends_to`. `samples_per_second`:
        the speed expected there; 0: not known yet. `saved_samples`: of the run, when this node saved that stage on its
        disk; 0: it has not."""
        self.note(stage=stage, samples_per_second=samples_per_second, saved_samples=saved_samples, moving_to=None)
        self.peer_table.attend(stage)
        self.sends_to = sends_to
        swarm = self.peer_table.swarm()
        for other, router in enumerate(self.routers):
            router.update(swarm.serving(other) if other in sends_to else ())

    async def reserve(self, stage: int) -> None:
        """Announce that this node joins at `stage`, unless another one that chooses now does so before it."""
        self.note(stage=stage, moving_to=stage, samples_per_second=0.0)
        self.announce_change()
        await self.announce()

    def set_state(self, state: record_pb2.NodeState, reason: str) -> None:
        """Change the state others see; announced at once."""
        self.note(state=state)
        self._telemetry.gauge(name.STATE, float(state))
        self._telemetry.event("node.state", state=record_pb2.NodeState.Name(state)[11:].lower(), reason=reason)
        self.announce_change()

    def _note_ban(self, peer: PeerId) -> None:
        self._newly_banned[peer] = None
        self.banned.set()

    def newly_banned(self) -> list[PeerId]:
        """The peers that routers banned since the last call."""
        banned = list(self._newly_banned)
        self._newly_banned.clear()
        return banned

    def announce_change(self) -> None:
        """Sign this node's record anew and announce it at once, because something in it changed."""
        self._signed = None
        self.record()
        self._announce_now.set()

    def record(self) -> tuple[int, record_pb2.SignedRecord] | None:
        """(sequence, our record), signed anew when the last one is old; None before a stage is chosen."""
        now = asyncio.get_running_loop().time()
        if self.status.stage is None:
            return None
        if self._signed is None or now - self._signed_at > self._period_s:
            self._sequence += 1
            record = self._describe(self._clock.unix_s())
            self._signed = sign_record(record, self._identity)
            self._signed_at = now
            self._twins.signs(self._signed.signature)
            self._stretch = self._stretched(self._signed.ByteSize())
            self.peer_table.learn(*check_member(self._signed, run_id=self._run_id))
        return self._sequence, self._signed

    def _describe(self, now_unix_s: float) -> record_pb2.Record:
        us = self.status
        stage = self._stage().status()
        assert us.stage is not None
        own = stage.samples_per_second or us.samples_per_second
        speed = min(SPEED_MAX, allowed_samples_per_s(self._manifest, us.stage, own, us.allowance))
        record = record_pb2.Record(
            run_id=self._run_id,
            peer_id=self.me,
            sequence=self._sequence,
            expires_unix_ms=int((now_unix_s + self._stretch * self._manifest.limits.record_ttl_s) * 1000),
            stage=us.stage,
            state=us.state,
            addresses=us.addresses[:ADDRESSES_MAX],
            samples_per_second=speed,
            queue=min(QUEUE_MAX, stage.queue),
            round=stage.round_index,
            round_stride=stage.round_stride,
            joined_unix_ms=self._twins.began_ms,
            version=__version__,
            progress=self.progress.entry(self.me),
            moving_to=us.moving_to,
            saved_samples=us.saved_samples if us.state == record_pb2.NODE_STATE_JOINING else 0,
            saves_checkpoints=us.saves_checkpoints,
            span=len(us.span) if len(us.span) > 1 else 0,
            unable=sorted(us.unable)[: FIELDS["Record.unable"].many],
            boundary_digest=us.boundary_digest,
            data_digest=us.data_digest,
            stretch=self._stretch if self._stretch > 1 else 0,
        )
        record.progress.owed = self.run_progress.owed
        if stage.kept_round is not None:
            record.kept_round = stage.kept_round
            record.kept_samples = stage.kept_samples
        record.lost_samples = stage.line.lost
        record.lost_at_samples = stage.line.at
        if us.allowance is not None:
            record.allowance.CopyFrom(us.allowance)
        if self.admission is not None and self.admission.mine is not None:
            getattr(record, "pass").CopyFrom(self.admission.mine)
        if stage.blocks is not None:
            record.blocks.CopyFrom(stage.blocks)
        return record

    async def announcing(self) -> None:
        """Publish our record every (stretched) announce period and whenever our state changes, until cancelled."""
        while True:
            self._announce_now.clear()
            await self.announce()
            try:
                async with asyncio.timeout(self._period_s):
                    await self._announce_now.wait()
            except TimeoutError:
                pass

    async def announce(self) -> None:
        """Publish our record of now, once: the one signed a moment ago, if it expires after what was published. Hear
        of another one of our key whose place it takes, if there is one."""
        old_s = asyncio.get_running_loop().time() - JUST_SHARE * self._manifest.limits.announce_period_s
        if self._signed_at < max(old_s, self._published_at + EXPIRY_STEP_S):
            self._signed = None
        if (current := self.record()) is None:
            return
        self._published_at = self._signed_at
        announced = await self._directory.announce(current[1])
        for signed in announced.others:
            with self._faults_logged():
                self._hear_own(signed, check_record(signed, run_id=self._run_id))
        if not announced.stored:
            self._telemetry.event("directory.failed", level="warning", reason="nobody stored our record; tried again")

    async def watching(self, stages: Sequence[int]) -> None:
        """Refresh `stages` every announce period, and all others within OTHERS_PERIODS, until cancelled. Look sooner
        while there is nobody to send work to: nodes that start together see nobody at first. While many members come
        or change their state the looks begin anew at LOOK_MIN_S apart, and twice as far each time (Trickle, RFC 6206):
        a member tells others what it knows, which is little until all know of each other."""
        loop = asyncio.get_running_loop()
        others = [stage for stage in range(self._manifest.pipeline.stages) if stage not in stages]
        turn = itertools.cycle(others)
        others_s = loop.time()  # all were looked up when the stage was chosen
        wait_s = LOOK_MIN_S
        shape = 0
        while True:
            at_once = 0
            if loop.time() >= others_s + self._look_s:
                others_s = loop.time()
                at_once = -(-len(others) // OTHERS_PERIODS)
            await self._adopt([*stages, *itertools.islice(turn, at_once)], self._directory.refresh)
            swarm = self.peer_table.swarm()
            if not all(swarm.serving(stage) for stage in self.sends_to):
                await asyncio.sleep(SOON_SHARE * self._manifest.limits.announce_period_s)
                continue
            changed = self.peer_table.shape - shape
            shape += changed
            known = sum(here for here, _ in self.peer_table.counts())
            wait_s = LOOK_MIN_S if changed > MANY_SHARE * known else 2.0 * wait_s
            await asyncio.sleep(min(wait_s, self._look_s))

    @property
    def _look_s(self) -> float:
        """Seconds between two looks while little changes."""
        return self._period_s * (LOOK_SHARE if self._stretch > 1 else 1.0)

    async def look(self, stages: Iterable[int]) -> None:
        """Read the records of `stages` from the directory once; forget peers whose records expired."""
        await self._adopt(list(stages), self._directory.lookups)

    async def _adopt(self, wanted: Sequence[int], read: Callable[[Sequence[int]], Awaitable[Read]]) -> None:
        values = await read(wanted)
        for stage, records in zip(wanted, values, strict=True):
            for signed in self.peer_table.news(stage, records, self._chance):
                with self._faults_logged():
                    record = check_record(signed, run_id=self._run_id)
                    if record.peer_id == self.me:
                        self._hear_own(signed, record)
                        continue
                    known = shared(signed)
                    if known is not None or not self.peer_table.knows(record):
                        self._take_in(record, known[2] if known is not None else None)
        expired = self.peer_table.expire(self._clock.unix_s())
        for peer in expired:
            self.blocks_heard.pop(peer, None)
            self._telemetry.event("peer.gone", peer=peer, reason="its record expired")
        self._stage().doubt(expired)
        self._view_changed()
        self.run_progress.judge()

    async def claimed(self) -> int:
        return await self._directory.claimed()

    def hear_checkpoint(self, name: PeerId, blocks: record_pb2.Blocks) -> None:
        """Remember the blocks finished in a checkpoint, under `name`."""
        self.blocks_heard[name] = blocks

    @contextlib.contextmanager
    def _faults_logged(self) -> Iterator[None]:
        """Log a RemoteFault in the block: one wrong record among many is no reason to stop."""
        try:
            yield
        except RemoteFault as fault:
            self._refused(fault)

    def _refused(self, fault: RemoteFault) -> None:
        self._telemetry.event("record.refused", level="warning", reason=str(fault))

    def _hear_blocks(self, told: Mapping[PeerId, record_pb2.Blocks]) -> None:
        self.blocks_heard.update(told)
        for fault in self._stage().hear_blocks(told, self.blocks_max):
            self._refused(fault)

    @property
    def blocks_max(self) -> int:
        """Blocks that can be finished at most."""
        return int(self.run_progress.samples_max) // self._manifest.data.block_samples

    def mark_dead(self, peers: Sequence[PeerId]) -> None:
        """Take `peers`, which answer no more, out of the table and the routers until they announce something newer.
        The blocks they finished are remembered: a feeder may have to go on from there."""
        for peer in peers:
            self.peer_table.mark_dead(peer)
            self._telemetry.event("peer.gone", peer=peer, reason="silent, and answers no ping")
        self._view_changed()
        self._stage().doubt(peers)

    def exclude(self, peer: PeerId, reason: str) -> None:
        """Ignore `peer` from now on, because it was found to lie: its machine, at whatever stages that is."""
        machine = machine_of(peer)
        if machine == machine_of(self.me) or machine in self.peer_table.excluded:
            return
        self.peer_table.excluded.add(machine)
        there = [member.peer for member in self.peer_table.swarm().members() if machine_of(member.peer) == machine]
        for one in dict.fromkeys([peer, *there]):
            self.peer_table.forget(one)
            self.run_progress.clock.history.forget(one)
            self.blocks_heard.pop(one, None)
        self._telemetry.event("peer.excluded", level="warning", peer=peer, reason=reason)
        self._view_changed()

    def evict_unauthorized(self) -> None:
        """Forget members that are not permitted any more, after the owner's rules changed."""
        if self.admission is None:
            return
        for part in self.parts:
            part.evict_unauthorized()
        for member in list(self.peer_table.swarm().members()):
            permit, reason = self.admission.judge(member.peer)
            if member.peer != self.me and not permit:
                self.peer_table.forget(member.peer)
                self.blocks_heard.pop(member.peer, None)
                self._telemetry.event("peer.gone", peer=member.peer, reason=reason)
        self._view_changed()

    def learn(self, signed: record_pb2.SignedRecord) -> Member:
        """Take in a record; returns its member as known then. Raises RemoteFault when it is forged, expired or of
        another run."""
        record, member = check_member(signed, run_id=self._run_id)
        if member.peer == self.me:
            self._hear_own(signed, record)
            return member
        known = self.peer_table.member(member.peer)
        if known is not None and known.sequence >= member.sequence:
            return known
        if (peer := self._take_in(record, member)) is None:
            return member
        self._tell_time()
        for stage in self.sends_to:
            router = self.routers[stage]
            if member.stage == stage and member.state == SERVING:
                router.learn(member)
            else:
                router.forget(peer)
        return member

    def _hear_own(self, signed: record_pb2.SignedRecord, record: record_pb2.Record) -> None:
        """Take in a record of our key as others hold it. Of our life before this process, what it promised holds: its
        sequence, samples and blocks. One of a process that runs beside this one makes the later of the two stand
        aside."""
        if self._twins.is_own(signed):
            return
        now_s = self._clock.unix_s()
        check_time(record, now_s, STRETCH_MAX * self._manifest.limits.record_ttl_s)
        if self._sequence <= record.sequence:  # else others would keep that record and take none of ours
            self._sequence = record.sequence
            self._signed = None
        if self._twins.former(record):
            self._go_on_from(record)
            return
        if record.joined_unix_ms == self._twins.began_ms:
            self._twins.begin_again(now_s, self._chance.random)
        elif self._twins.lives(record, now_s):
            self._meet_twin(record)

    def _meet_twin(self, record: record_pb2.Record) -> None:
        """Stand aside for the process that signed `record`, or let it do so."""
        began = record.joined_unix_ms
        yields = self._twins.yields(record)
        if began not in self._twins_met:
            self._twins_met.add(began)
            self._telemetry.event("node.twin", level="warning", joined_unix_ms=began, stays=not yields)
        if yields:
            self.twin = record
            self.twin_seen.set()

    def _go_on_from(self, record: record_pb2.Record) -> None:
        """Take up what our former life told in `record`."""
        if record.progress.samples:
            self.run_progress.hear({self.me: record.progress.samples[0]})
        if record.HasField("blocks") and not record.stage:
            self._hear_blocks({self.me: record.blocks})

    def _take_in(self, record: record_pb2.Record, member: Member | None = None) -> PeerId | None:
        """`learn` of a verified record without the routers, which are told once of many records. Returns the peer if
        the record told something new. `member`: the record's content, if already parsed."""
        check_time(record, self._clock.unix_s(), STRETCH_MAX * self._manifest.limits.record_ttl_s)
        peer = PeerId(record.peer_id) if member is None else member.peer
        if self.admission is not None:
            if reason := too_old(self.admission.rules.access_list.least_version, record.version):
                raise RemoteFault(f"record of {peer}: {reason}")
            permit, reason = self.admission.judge(peer, pass_of(record))
            if not permit:
                raise RemoteFault(f"record of {peer}: {reason}")
        if record.HasField("blocks") and record.stage:
            raise RemoteFault(
                f"record of {peer}: data blocks at {stage_name(record.stage)}; only replicas of the first stage feed"
            )
        if not self.peer_table.learn(record, member):
            return None
        if member is not None and not member.fed:
            return peer
        if record.progress.samples:
            self.run_progress.hear({peer: record.progress.samples[0]})
        if record.HasField("blocks"):
            self._hear_blocks({peer: record.blocks})
        return peer

    def _tell_time(self) -> None:
        """Tell the routers how far Unix time is ahead of loop time: records hold wall clock times."""
        ahead_s = self._clock.unix_s() - asyncio.get_running_loop().time()
        if abs(ahead_s - self._unix_ahead_s) < AHEAD_TOLERANCE_S:
            return
        self._unix_ahead_s = ahead_s
        for router in self.routers:
            router.set_unix_ahead(ahead_s)

    def _view_changed(self) -> None:
        self._tell_time()
        swarm = self.peer_table.swarm()
        for stage in self.peer_table.take_changed():
            if stage in self.sends_to:
                self.routers[stage].update(member for member in swarm.serving(stage) if member.peer != self.me)

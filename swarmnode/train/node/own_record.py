"""This node's own record: what it says, its signature, and other records of the same key."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from swarmnode import __version__
from swarmnode.base.bounds import FIELDS, QUEUE_MAX, SPEED_MAX
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId, seeded
from swarmnode.base.metrics import name
from swarmnode.base.ports import Clock, Directory, Telemetry
from swarmnode.base.wire import record_pb2
from swarmnode.model.split import costs
from swarmnode.net.membership.liveness import LOOK_SHARE
from swarmnode.net.membership.peer_table import PeerTable
from swarmnode.net.membership.record import STRETCH_MAX, check_member, check_time, sign_record
from swarmnode.net.membership.run_progress import RunProgress
from swarmnode.net.membership.state_line import UNBROKEN, StateLine
from swarmnode.net.membership.twin import TwinWatch
from swarmnode.run.admission.admission import Admission
from swarmnode.run.manifest import Manifest
from swarmnode.train.pipeline.believed_rate import allowed_samples_per_s
from swarmnode.train.pipeline.microbatch_size import SampleRates
from swarmnode.train.pipeline.span import share_of

EXPIRY_STEP_S = 0.002  # records tell milliseconds, and of two that expire at the same one a directory keeps the first
JUST_SHARE = 0.1  # guess: a node that changes its state has signed its record just before it publishes it
# Derived: records read, with the digests and the searches for holders, and as much given to others, are .1 Mbit/s; a
# holder has twice that.
READ_BYTES_PER_S = 5000.0
ADDRESSES_MAX = 8


@dataclass(frozen=True, slots=True)
class MemberPorts:
    """The ports of a member of the run `run_id` by which others know it, and it knows them."""

    manifest: Manifest
    run_id: RunId
    directory: Directory
    clock: Clock
    identity: Identity
    telemetry: Telemetry


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


class OwnRecord:
    """The record of this node, signed anew when it is old or something in it changes."""

    def __init__(
        self,
        ports: MemberPorts,
        stage: Callable[[], StageObserver],
        peer_table: PeerTable,
        run_progress: RunProgress,
        admission: Admission | None,
        status: LocalStatus,
        reads: Callable[[], float],
    ) -> None:
        """`stage` returns the work in hand; `reads`: records of others that this node reads in an announce period."""
        self._ports = ports
        self._manifest = ports.manifest
        self._costs = costs(ports.manifest)
        self._stage = stage
        self._peer_table = peer_table
        self._run_progress = run_progress
        self._admission = admission
        self.status = status
        self._reads = reads
        self.me = ports.identity.peer_id
        self.incarnation = int(ports.clock.unix_s() * 1000)  # differs between two processes with the same key
        self.changed = asyncio.Event()  # set when something in it changed
        self._sequence = self.incarnation
        self._signed: record_pb2.SignedRecord | None = None
        self._signed_at = float("-inf")
        self._old_s = float("-inf")  # when the record that was signed last is old
        self._published_at = float("-inf")  # when the last one published was signed
        self._stretch = 1  # of the next one
        self._chance = seeded(ports.manifest.seed, "twin", self.me, self.incarnation)
        self._twins = TwinWatch(self.incarnation, ports.manifest.limits.record_ttl_s)
        self.twin: record_pb2.Record | None = None
        """A record of a process with our key that began before this one and runs; `twin_seen` is set with it."""
        self.twin_seen = asyncio.Event()
        self._twins_met = set[int]()  # by when they began

    # What it says.

    def note(self, **facts: Any) -> None:
        """Note facts about this node, fields of LocalStatus, for its next record."""
        self.status = replace(self.status, **facts)

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

    def set_state(self, state: record_pb2.NodeState, reason: str) -> None:
        """Change the state others see; announced at once."""
        self.note(state=state)
        self._ports.telemetry.gauge(name.STATE, float(state))
        self._ports.telemetry.event("node.state", state=record_pb2.NodeState.Name(state)[11:].lower(), reason=reason)
        self.announce_change()

    def announce_change(self) -> None:
        """Sign the record anew and announce it at once, because something in it changed."""
        self._signed = None
        self.record()
        self.changed.set()

    # Its signature.

    @property
    def period_s(self) -> float:
        """Seconds between two of our records."""
        return self._stretch * self._manifest.limits.announce_period_s

    @property
    def look_s(self) -> float:
        """Seconds between two looks while little changes."""
        return self.period_s * (LOOK_SHARE if self._stretch > 1 else 1.0)

    def _stretched(self, nbytes: int) -> int:
        """Announce periods of the run between two of our records: as many as keep the records that this node reads,
        of `nbytes` each, within READ_BYTES_PER_S."""
        read = nbytes * self._reads()
        return min(STRETCH_MAX, max(1, math.ceil(read / READ_BYTES_PER_S / self._manifest.limits.announce_period_s)))

    def record(self) -> tuple[int, record_pb2.SignedRecord] | None:
        """(sequence, our record), signed anew when the last one is old; None before a stage is chosen."""
        now = asyncio.get_running_loop().time()
        if self.status.stage is None:
            return None
        if self._signed is None or now > self._old_s:
            self._sequence += 1
            record = self._describe(self._ports.clock.unix_s())
            self._signed = sign_record(record, self._ports.identity)
            self._signed_at = now
            self._twins.signs(self._signed.signature)
            self._stretch = self._stretched(self._signed.ByteSize())
            self._old_s = now + self.period_s
            self._peer_table.learn(*check_member(self._signed, run_id=self._ports.run_id))
        return self._sequence, self._signed

    def to_publish(self) -> record_pb2.SignedRecord | None:
        """Our record of now: the one signed a moment ago, if it expires after what was published. None before a stage
        is chosen."""
        old_s = asyncio.get_running_loop().time() - JUST_SHARE * self._manifest.limits.announce_period_s
        if self._signed_at < max(old_s, self._published_at + EXPIRY_STEP_S):
            self._signed = None
        if (current := self.record()) is None:
            return None
        self._published_at = self._signed_at
        return current[1]

    def _describe(self, now_unix_s: float) -> record_pb2.Record:
        us = self.status
        stage = self._stage().status()
        assert us.stage is not None
        own = stage.samples_per_second or us.samples_per_second
        speed = min(SPEED_MAX, allowed_samples_per_s(self._manifest, us.stage, own, us.allowance))
        record = record_pb2.Record(
            run_id=self._ports.run_id,
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
            progress=self._run_progress.entry(),
            moving_to=us.moving_to,
            saved_samples=us.saved_samples if us.state == record_pb2.NODE_STATE_JOINING else 0,
            saves_checkpoints=us.saves_checkpoints,
            span=len(us.span) if len(us.span) > 1 else 0,
            unable=sorted(us.unable)[: FIELDS["Record.unable"].many],
            boundary_digest=us.boundary_digest,
            data_digest=us.data_digest,
            stretch=self._stretch if self._stretch > 1 else 0,
        )
        if stage.kept_round is not None:
            record.kept_round = stage.kept_round
            record.kept_samples = stage.kept_samples
        record.lost_samples = stage.line.lost
        record.lost_at_samples = stage.line.at
        if us.allowance is not None:
            record.allowance.CopyFrom(us.allowance)
        if self._admission is not None and self._admission.mine is not None:
            getattr(record, "pass").CopyFrom(self._admission.mine)
        if stage.blocks is not None:
            record.blocks.CopyFrom(stage.blocks)
        return record

    # Other records of the same key.

    def hear(self, signed: record_pb2.SignedRecord, record: record_pb2.Record) -> bool:
        """Take in a record of our key as others hold it; whether it is of our life before this process, whose promises
        hold. One of a process that runs beside this one makes the later of the two stand aside."""
        if self._twins.is_own(signed):
            return False
        now_s = self._ports.clock.unix_s()
        check_time(record, now_s, STRETCH_MAX * self._manifest.limits.record_ttl_s)
        if self._sequence <= record.sequence:  # else others would keep that record and take none of ours
            self._sequence = record.sequence
            self._signed = None
        if self._twins.former(record):
            return True
        if record.joined_unix_ms == self._twins.began_ms:
            self._twins.begin_again(now_s, self._chance.random)
        elif self._twins.lives(record, now_s):
            self._meet_twin(record)
        return False

    def _meet_twin(self, record: record_pb2.Record) -> None:
        """Stand aside for the process that signed `record`, or let it do so."""
        began = record.joined_unix_ms
        yields = self._twins.yields(record)
        if began not in self._twins_met:
            self._twins_met.add(began)
            self._ports.telemetry.event("node.twin", level="warning", joined_unix_ms=began, stays=not yields)
        if yields:
            self.twin = record
            self.twin_seen.set()

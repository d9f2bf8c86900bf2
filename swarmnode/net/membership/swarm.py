"""Peers as described by their records, and the frozen view of all of them that every decision reads."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Compute, Replica, Telemetry, Transport
from swarmnode.base.wire import record_pb2 as wire
from swarmnode.net.membership.state_line import UNBROKEN, StateLine
from swarmnode.run.manifest import Manifest

SERVING = wire.NODE_STATE_TRAINING
JOINING = wire.NODE_STATE_JOINING
PAUSED = wire.NODE_STATE_PAUSED
DRAINING = wire.NODE_STATE_DRAINING
GIVING = (wire.NODE_STATE_TRAINING, wire.NODE_STATE_DRAINING, wire.NODE_STATE_PAUSED)  # these give their state
GOSSIPING = (wire.NODE_STATE_TRAINING, wire.NODE_STATE_SYNCING)
COMING = (wire.NODE_STATE_TRAINING, wire.NODE_STATE_SYNCING, wire.NODE_STATE_JOINING)

SHARED_MAX = 0  # recognised messages; a process of many nodes raises it (`remember`)


@dataclass(frozen=True, slots=True)
class Member:
    """A peer, as described by its newest record."""

    peer: PeerId
    stage: int
    state: wire.NodeState
    sequence: int
    expires_unix_s: float
    samples_per_second: float
    queue: int
    round_index: int
    addresses: tuple[str, ...] = ()
    joined_unix_s: float = 0.0
    round_stride: int = 1
    kept_round: int | None = None  # round of the next stage's snapshot that it keeps
    kept_samples: int = 0  # samples of the run in that snapshot
    saved_samples: int = 0  # samples of the run when it saved the stage that it joins; 0: it has not
    moving_to: int | None = None  # stage it has decided to move to
    saves: bool = False
    pauses_unix_s: int = 0  # announced time of a pause by its volunteer's limits; 0: none
    resumes_unix_s: int = 0  # of one that is paused: when it expects to come back; 0: not known
    boundary_digest: bytes = b""  # of its frozen subspace, if the run has one
    data_digest: bytes = b""  # of the run's text, as it has it, first 8 bytes; empty: it has none
    fed: bool = False  # its record carries samples or blocks
    feeds: bool = False  # it starts microbatches
    total: int = 0  # samples of the whole run, as it believes
    owed: int = 0  # samples that it counted and is to train again
    unable: frozenset[int] = frozenset()  # stages that its machine cannot serve
    span: int = 1  # stages that its machine serves, this one among them
    stretch: int = 1  # announce periods of the run between two of its records
    line: StateLine = UNBROKEN  # of its state

    @property
    def choosing(self) -> bool:
        """Whether it has reserved its stage and may still take another: others choose at the same time."""
        return self.state == wire.NODE_STATE_JOINING and self.moving_to == self.stage

    def may_move_to(self, stage: int) -> bool:
        """Whether it can leave its stage for `stage`: its machine can serve that one, and serves no others beside its
        own."""
        return self.span == 1 and stage not in self.unable

    @property
    def plain(self) -> bool:
        """Whether it serves, stays, and has announced its speed, so that it needs no special handling."""
        return (
            self.state == SERVING
            and self.moving_to is None
            and self.samples_per_second > 0.0
            and not self.pauses_unix_s
        )

    @staticmethod
    def of(record: wire.Record) -> Member:
        return Member(
            peer=PeerId(sys.intern(record.peer_id)),  # one string object for all its uses
            stage=record.stage,
            state=record.state,
            sequence=record.sequence,
            expires_unix_s=record.expires_unix_ms / 1000.0,
            samples_per_second=record.samples_per_second,
            queue=record.queue,
            round_index=record.round,
            addresses=tuple(sys.intern(one) for one in record.addresses if not one.startswith("/dns")),
            joined_unix_s=record.joined_unix_ms / 1000.0,
            round_stride=max(1, record.round_stride),
            kept_round=record.kept_round if record.HasField("kept_round") else None,
            kept_samples=record.kept_samples,
            saved_samples=record.saved_samples,
            moving_to=record.moving_to if record.HasField("moving_to") else None,
            saves=record.saves_checkpoints,
            pauses_unix_s=record.allowance.pauses_unix_s,
            resumes_unix_s=record.allowance.resumes_unix_s,
            boundary_digest=record.boundary_digest,
            data_digest=record.data_digest,
            fed=bool(record.progress.samples) or record.HasField("blocks"),
            feeds=record.HasField("blocks"),
            total=record.progress.total,
            owed=record.progress.owed,
            unable=frozenset(record.unable),
            span=max(1, record.span),
            stretch=max(1, record.stretch),
            line=StateLine(record.lost_samples, record.lost_at_samples),
        )


Shared = tuple[wire.SignedRecord, wire.Record, Member]
_shared: dict[int, Shared] = {}


def share(signed: wire.SignedRecord, record: wire.Record, member: Member) -> None:
    """Cache that `signed` holds the verified `record` of `member`, for other nodes of this process that get the same
    message object. Only if messages are shared in memory (simulation)."""
    if SHARED_MAX:
        if len(_shared) >= SHARED_MAX:
            del _shared[next(iter(_shared))]  # the oldest
        _shared[id(signed)] = (signed, record, member)


def shared(signed: wire.SignedRecord) -> Shared | None:
    """The cached content of this message object; None if unknown."""
    known = _shared.get(id(signed))
    return known if known is not None and known[0] is signed else None


def forget_shared(count: int) -> None:
    """Cache `count` messages from now on, and drop all others."""
    global SHARED_MAX
    SHARED_MAX = count
    _shared.clear()


Members = tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Swarm:
    """All members by stage, sorted by peer id; of crowded stages, only some. An immutable snapshot. Values derived from
    a stage's members are computed on demand and kept while these stay the same."""

    stages: tuple[Members, ...]
    sizes: tuple[int, ...]  # members of each stage, known or not
    _parts: list[tuple[Members, Members] | None] = field(compare=False, repr=False)  # (serving, unsettled)
    _speeds: list[tuple[float, int] | None] = field(compare=False, repr=False)
    _feeders: list[tuple[PeerId, ...]] = field(compare=False, repr=False, default_factory=list)

    @staticmethod
    def frozen(stages: Iterable[Members], before: Swarm | None = None, sizes: Sequence[int] | None = None) -> Swarm:
        """A view of members sorted by peer id in each stage, which shares equal parts with `before`. `sizes`: larger
        stage sizes, if known."""
        whole = tuple(stages)
        counts = map(len, whole)
        nothing = [None] * len(whole)
        largest = tuple(counts if sizes is None else map(max, counts, sizes))
        swarm = Swarm(whole, largest, [*nothing], [*nothing])
        if before is not None:
            if whole and whole[0] is before.stages[0]:
                swarm._feeders[:] = before._feeders
            for stage, members in enumerate(whole):
                if members is before.stages[stage]:
                    swarm._parts[stage] = before._parts[stage]
                    swarm._speeds[stage] = before._speeds[stage]
        return swarm

    @staticmethod
    def of(members: Iterable[Member], stages: int) -> Swarm:
        """The view of `members` in a run of that many stages."""
        by_stage: list[list[Member]] = [[] for _ in range(stages)]
        for member in members:
            if member.stage < stages:
                by_stage[member.stage].append(member)
        return Swarm.frozen(tuple(sorted(stage, key=lambda m: m.peer)) for stage in by_stage)

    def serving(self, stage: int) -> Members:
        """Replicas that take microbatches."""
        return (self._parts[stage] or self._parted(stage))[0]

    def unsettled(self, stage: int) -> Members:
        """Members that do not serve the stage or have announced a move; usually none."""
        return (self._parts[stage] or self._parted(stage))[1]

    def settled(self, stage: int) -> Sequence[Member]:
        """Members that serve their stage and have announced no move."""
        members = self.serving(stage)
        return [m for m in members if m.moving_to is None] if self.unsettled(stage) else members

    def resting(self, stage: int) -> Members:
        """Members that hold the state of the stage, give it, and take no work: paused, or about to leave."""
        return tuple([m for m in self.unsettled(stage) if m.state in (PAUSED, DRAINING) and m.moving_to is None])

    def holding(self, stage: int) -> Members:
        """The replicas that serve the stage; where none does, those that are paused with it."""
        return self.serving(stage) or tuple([m for m in self.unsettled(stage) if m.state == PAUSED])

    def speeds(self, stage: int) -> tuple[float, int]:
        """Total samples per second of the settled members, and the number without an announced speed."""
        if (speeds := self._speeds[stage]) is None:
            rates = [member.samples_per_second for member in self.settled(stage)]
            speeds = self._speeds[stage] = math.fsum(rates), rates.count(0.0)
        return speeds

    def _parted(self, stage: int) -> tuple[Members, Members]:
        serving = members = self.stages[stage]
        unsettled = tuple([m for m in members if m.state != SERVING or m.moving_to is not None])
        if unsettled:
            serving = tuple([m for m in members if m.state == SERVING])
        parts = self._parts[stage] = serving, unsettled
        return parts

    def coming(self, stage: int) -> Members:
        """Replicas that serve or will serve."""
        return tuple(member for member in self.stages[stage] if member.state in COMING)

    def feeders(self) -> tuple[PeerId, ...]:
        """Replicas of stage 0 that have the text and start microbatches."""
        if not self._feeders:
            self._feeders.append(tuple(member.peer for member in self.serving(0) if member.feeds))
        return self._feeders[0]

    def totals(self) -> list[int]:
        """Samples of the whole run, as believed by all members but joiners."""
        return [member.total for stage in self.stages for member in stage if member.state != JOINING]

    def members(self) -> Iterable[Member]:
        """The members of all stages."""
        for stage in self.stages:
            yield from stage


@dataclass(frozen=True, slots=True)
class StageContext:
    """The surroundings of one `replica` of `stage`, shared by all parts that work on it. `swarm`: as this node knows it
    now; `samples_total`: that the whole run has trained, as far as known here."""

    manifest: Manifest
    run_id: RunId
    stage: int
    replica: Replica
    transport: Transport
    compute: Compute
    identity: Identity
    telemetry: Telemetry
    swarm: Callable[[], Swarm]
    samples_total: Callable[[], int]

    @property
    def me(self) -> PeerId:
        """This node's peer id."""
        return self.identity.peer_id

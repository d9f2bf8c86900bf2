"""Who is here: peers as their records tell them, and the frozen view of all of them that every decision reads."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swarmnode.ids import PeerId
from swarmnode.wire import record_pb2 as wire

SERVING = wire.NODE_STATE_TRAINING
JOINING = wire.NODE_STATE_JOINING
GOSSIPING = (wire.NODE_STATE_TRAINING, wire.NODE_STATE_SYNCING)
COMING = (wire.NODE_STATE_TRAINING, wire.NODE_STATE_SYNCING, wire.NODE_STATE_JOINING)

SHARED_MAX = 0  # messages kept to be known again by themselves; a process of many nodes raises it (`remember`)


@dataclass(frozen=True, slots=True)
class Member:
    """One peer as its newest record tells it."""

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
    kept_round: int | None = None  # of the snapshot of the next stage that it keeps
    kept_steps: int = 0  # its inner steps
    moving_to: int | None = None  # the stage it has decided to move to
    saves: bool = False
    pauses_unix_s: int = 0  # when its volunteer's limits will make it pause, as it announces; 0: not foreseen
    boundary_digest: bytes = b""  # of its frozen subspace, in a run that has one
    fed: bool = False  # its record tells of samples or blocks
    total: int = 0  # samples of the whole run, as it believes
    unable: frozenset[int] = frozenset()  # stages that its machine cannot serve

    @property
    def plain(self) -> bool:
        """Nothing is to be minded of it: it serves, stays, and has told its speed."""
        return (
            self.state == SERVING
            and self.moving_to is None
            and self.samples_per_second > 0.0
            and not self.pauses_unix_s
        )

    @staticmethod
    def of(record: wire.Record) -> Member:
        return Member(
            peer=PeerId(sys.intern(record.peer_id)),  # one string for all that is known of it
            stage=record.stage,
            state=record.state,
            sequence=record.sequence,
            expires_unix_s=record.expires_unix_ms / 1000.0,
            samples_per_second=record.samples_per_second,
            queue=record.queue,
            round_index=record.round,
            addresses=tuple(map(sys.intern, record.addresses)),
            joined_unix_s=record.joined_unix_ms / 1000.0,
            round_stride=max(1, record.round_stride),
            kept_round=record.kept_round if record.HasField("kept_round") else None,
            kept_steps=record.kept_steps,
            moving_to=record.moving_to if record.HasField("moving_to") else None,
            saves=record.saves_checkpoints,
            pauses_unix_s=record.allowance.pauses_unix_s,
            boundary_digest=record.boundary_digest,
            fed=bool(record.progress.samples) or record.HasField("blocks"),
            total=record.progress.total,
            unable=frozenset(record.unable),
        )


Shared = tuple[wire.SignedRecord, wire.Record, Member]
_shared: dict[int, Shared] = {}


def share(signed: wire.SignedRecord, record: wire.Record, member: Member) -> None:
    """`signed` holds `record`, which tells of `member`, and has been verified: nodes of this process that get this very
    message need not look again. Only where messages are shared in memory (simulation)."""
    if SHARED_MAX:
        if len(_shared) >= SHARED_MAX:
            del _shared[next(iter(_shared))]  # the oldest
        _shared[id(signed)] = (signed, record, member)


def shared(signed: wire.SignedRecord) -> Shared | None:
    """What was found out of this very message before."""
    known = _shared.get(id(signed))
    return known if known is not None and known[0] is signed else None


def forget_shared(count: int) -> None:
    """Keep `count` messages from now on, and none of those before."""
    global SHARED_MAX
    SHARED_MAX = count
    _shared.clear()


Members = tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Swarm:
    """All members by stage, each stage sorted by peer id; of crowded stages, some. A snapshot: it never changes. What
    follows from a stage's members is found out once it is asked for, and kept while they stay the same."""

    stages: tuple[Members, ...]
    sizes: tuple[int, ...]  # how many there are of each stage, known to us or not
    _parts: list[tuple[Members, Members] | None] = field(compare=False, repr=False)  # (serving, unsettled)
    _speeds: list[tuple[float, int] | None] = field(compare=False, repr=False)

    @staticmethod
    def frozen(
        stages: Iterable[Members],
        before: Swarm | None = None,
        sizes: Sequence[int] | None = None,
        calm: Iterable[int] = (),
    ) -> Swarm:
        """Of members sorted by peer id in each stage; what is the same as in `before` is shared with it. `sizes` as far
        as there are more of a stage than in `stages`. `calm`: stages where nobody is unsettled, if that is known."""
        whole = tuple(stages)
        counts = map(len, whole)
        swarm = Swarm(
            whole, tuple(counts if sizes is None else map(max, counts, sizes)), [None] * len(whole), [None] * len(whole)
        )
        if before is not None:
            for stage, members in enumerate(whole):
                if members is before.stages[stage]:
                    swarm._parts[stage], swarm._speeds[stage] = before._parts[stage], before._speeds[stage]
        for stage in calm:
            swarm._parts[stage] = whole[stage], ()
        return swarm

    @staticmethod
    def of(members: Iterable[Member], stages: int) -> Swarm:
        by_stage: list[list[Member]] = [[] for _ in range(stages)]
        for member in members:
            if member.stage < stages:
                by_stage[member.stage].append(member)
        return Swarm.frozen(tuple(sorted(stage, key=lambda m: m.peer)) for stage in by_stage)

    def serving(self, stage: int) -> Members:
        """Replicas that take microbatches."""
        return (self._parts[stage] or self._parted(stage))[0]

    def unsettled(self, stage: int) -> Members:
        """Those that do not serve the stage, or have said that they go: most often nobody."""
        return (self._parts[stage] or self._parted(stage))[1]

    def settled(self, stage: int) -> Sequence[Member]:
        """Those that serve their stage and have not said that they go."""
        members = self.serving(stage)
        return [m for m in members if m.moving_to is None] if self.unsettled(stage) else members

    def speeds(self, stage: int) -> tuple[float, int]:
        """Of those settled: samples per second together, and how many have not told theirs."""
        if (found := self._speeds[stage]) is None:
            told = [member.samples_per_second for member in self.settled(stage)]
            found = self._speeds[stage] = math.fsum(told), told.count(0.0)
        return found

    def know_speeds(self, stage: int, found: tuple[float, int] | None) -> None:
        """`speeds` need not be summed up, if they are `found`."""
        self._speeds[stage] = found

    def _parted(self, stage: int) -> tuple[Members, Members]:
        serving = members = self.stages[stage]
        unsettled = tuple([m for m in members if m.state != SERVING or m.moving_to is not None])
        if unsettled:
            serving = tuple([m for m in members if m.state == SERVING])
        found = self._parts[stage] = serving, unsettled
        return found

    def gossiping(self, stage: int) -> tuple[PeerId, ...]:
        """Replicas that take part in the stage's rounds."""
        return tuple([member.peer for member in self.stages[stage] if member.state in GOSSIPING])

    def coming(self, stage: int) -> Members:
        """Replicas that serve or will."""
        return tuple(member for member in self.stages[stage] if member.state in COMING)

    def feeders(self) -> tuple[PeerId, ...]:
        """Replicas of stage 0 that start microbatches."""
        return tuple(member.peer for member in self.serving(0))

    def totals(self) -> list[int]:
        """Samples of the whole run, as all but joiners believe."""
        return [member.total for stage in self.stages for member in stage if member.state != JOINING]

    def members(self) -> Iterable[Member]:
        for stage in self.stages:
            yield from stage

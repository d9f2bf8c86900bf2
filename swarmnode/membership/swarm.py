"""Who is here: the newest record of every peer, and the frozen view of all of them that every decision reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmnode.ids import PeerId
from swarmnode.wire import record_pb2 as wire

SERVING = wire.NODE_STATE_TRAINING
GOSSIPING = (wire.NODE_STATE_TRAINING, wire.NODE_STATE_SYNCING)
COMING = (wire.NODE_STATE_TRAINING, wire.NODE_STATE_SYNCING, wire.NODE_STATE_JOINING)

MADE_MAX = 4096  # guess: members kept to be found again, about 1 KiB each; simulation raises it


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
    moving_to: int | None = None  # the stage it has decided to move to
    saves: bool = False
    pauses_unix_s: int = 0  # when its volunteer's limits will make it pause, as it announces; 0: not foreseen

    @staticmethod
    def of(record: wire.Record) -> Member:
        """Records are shared by those who verified them (`check_record`), and so are their members."""
        made = _made.get(id(record))
        if made is not None and made[0] is record:
            return made[1]
        member = Member._of(record)
        if len(_made) >= MADE_MAX:
            _made.clear()
        _made[id(record)] = (record, member)
        return member

    @staticmethod
    def _of(record: wire.Record) -> Member:
        return Member(
            peer=PeerId(record.peer_id),
            stage=record.stage,
            state=record.state,
            sequence=record.sequence,
            expires_unix_s=record.expires_unix_ms / 1000.0,
            samples_per_second=record.samples_per_second,
            queue=record.queue,
            round_index=record.round,
            addresses=tuple(record.addresses),
            joined_unix_s=record.joined_unix_ms / 1000.0,
            round_stride=max(1, record.round_stride),
            kept_round=record.kept_round if record.HasField("kept_round") else None,
            moving_to=record.moving_to if record.HasField("moving_to") else None,
            saves=record.saves_checkpoints,
            pauses_unix_s=record.allowance.pauses_unix_s,
        )


_made: dict[int, tuple[wire.Record, Member]] = {}


@dataclass(frozen=True, slots=True)
class Swarm:
    """All members by stage, each stage sorted by peer id. A snapshot: it never changes."""

    stages: tuple[tuple[Member, ...], ...]
    _serving: tuple[tuple[Member, ...], ...]

    @staticmethod
    def frozen(stages: Iterable[tuple[Member, ...]], before: Swarm | None = None) -> Swarm:
        """Of members sorted by peer id in each stage; what is the same as in `before` is shared with it."""
        whole = tuple(stages)
        serving = tuple(
            before._serving[i]
            if before is not None and members is before.stages[i]
            else tuple([member for member in members if member.state == SERVING])
            for i, members in enumerate(whole)
        )
        return Swarm(whole, serving)

    @staticmethod
    def of(members: Iterable[Member], stages: int) -> Swarm:
        by_stage: list[list[Member]] = [[] for _ in range(stages)]
        for member in members:
            if member.stage < stages:
                by_stage[member.stage].append(member)
        return Swarm.frozen(tuple(sorted(stage, key=lambda m: m.peer)) for stage in by_stage)

    def serving(self, stage: int) -> tuple[Member, ...]:
        """Replicas that take microbatches."""
        return self._serving[stage]

    def gossiping(self, stage: int) -> tuple[PeerId, ...]:
        """Replicas that take part in the stage's rounds."""
        return tuple(member.peer for member in self.stages[stage] if member.state in GOSSIPING)

    def coming(self, stage: int) -> tuple[Member, ...]:
        """Replicas that serve or will."""
        return tuple(member for member in self.stages[stage] if member.state in COMING)

    def feeders(self) -> tuple[PeerId, ...]:
        """Replicas of stage 0 that start microbatches."""
        return tuple(member.peer for member in self.serving(0))

    def members(self) -> Iterable[Member]:
        for stage in self.stages:
            yield from stage


class Book:
    """The newest record of every peer we heard of, until it expires. Records come verified."""

    def __init__(self, stages: int, members_max: int = 65_536) -> None:
        self._members_max = members_max
        self._members: dict[PeerId, Member] = {}
        self._present: list[dict[PeerId, Member]] = [{} for _ in range(stages)]  # by stage, without those that left
        self._stale = set(range(stages))  # stages whose part of `_frozen` is out of date
        self._changed = set(range(stages))  # stages that changed since `changed` was asked
        self._frozen = Swarm.frozen(() for _ in range(stages))

    def has(self, record: wire.Record) -> bool:
        """Whether this very record is the newest of its peer here: the quick way through a look-up's many."""
        made = _made.get(id(record))
        return made is not None and made[0] is record and self._members.get(made[1].peer) is made[1]

    def learn(self, record: wire.Record) -> bool:
        """Keep `record` if it is newer than what we have. True when it changed what we know."""
        peer = PeerId(record.peer_id)
        known = self._members.get(peer)
        if known is not None and known.sequence >= record.sequence:
            return False
        if known is None and len(self._members) >= self._members_max:
            return False
        member = Member.of(record)
        if known is not None and (known.stage != member.stage or member.state == wire.NODE_STATE_LEFT):
            self._remove(known)
        self._members[peer] = member
        if member.state != wire.NODE_STATE_LEFT and member.stage < len(self._present):
            self._present[member.stage][peer] = member
            self._touch(member.stage)
        return True

    def expire(self, now_unix_s: float) -> list[PeerId]:
        """Forget peers whose record ran out; returns them."""
        gone = [peer for peer, member in self._members.items() if member.expires_unix_s <= now_unix_s]
        for peer in gone:
            self._remove(self._members.pop(peer))
        return gone

    def bury(self, peer: PeerId) -> None:
        """`peer` is gone although its record has not run out: out of the view until it says something newer."""
        known = self._members.get(peer)
        if known is not None:
            self._remove(known)

    def forget(self, peer: PeerId) -> None:
        """Drop what is known of `peer`, until its next record."""
        member = self._members.pop(peer, None)
        if member is not None:
            self._remove(member)

    def changed(self) -> list[int]:
        """Stages where anything changed since this was last asked, in order."""
        changed = sorted(self._changed)
        self._changed.clear()
        return changed

    def member(self, peer: PeerId) -> Member | None:
        return self._members.get(peer)

    def swarm(self) -> Swarm:
        """The view of now, frozen. Stages where nothing changed are shared with the view before."""
        if self._stale:
            stages = list(self._frozen.stages)
            for stage in self._stale:
                present = self._present[stage]
                stages[stage] = tuple([present[peer] for peer in sorted(present)])
            self._frozen = Swarm.frozen(stages, self._frozen)
            self._stale.clear()
        return self._frozen

    def _remove(self, member: Member) -> None:
        if member.stage < len(self._present) and self._present[member.stage].pop(member.peer, None) is not None:
            self._touch(member.stage)

    def _touch(self, stage: int) -> None:
        self._stale.add(stage)
        self._changed.add(stage)

"""Who is here: the newest record of every peer, and the frozen view of all of them that every decision reads."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from swarmnode.ids import PeerId
from swarmnode.wire import record_pb2 as wire

SERVING = wire.NODE_STATE_TRAINING
JOINING = wire.NODE_STATE_JOINING
GOSSIPING = (wire.NODE_STATE_TRAINING, wire.NODE_STATE_SYNCING)
COMING = (wire.NODE_STATE_TRAINING, wire.NODE_STATE_SYNCING, wire.NODE_STATE_JOINING)

CROWD_MAX = 64  # guess: replicas known of a stage not our own; to choose among more balances no better

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

    @staticmethod
    def of(record: wire.Record) -> Member:
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
            kept_steps=record.kept_steps,
            moving_to=record.moving_to if record.HasField("moving_to") else None,
            saves=record.saves_checkpoints,
            pauses_unix_s=record.allowance.pauses_unix_s,
            boundary_digest=record.boundary_digest,
            fed=bool(record.progress.samples) or record.HasField("blocks"),
            total=record.progress.total,
        )


Shared = tuple[wire.SignedRecord, wire.Record, Member]
_shared: dict[int, Shared] = {}


def share(signed: wire.SignedRecord, record: wire.Record, member: Member) -> None:
    """`signed` holds `record`, which tells of `member`, and has been verified: nodes of this process that get this very
    message need not look again. Only where messages are shared in memory (simulation)."""
    if SHARED_MAX:
        if len(_shared) >= SHARED_MAX:
            _shared.clear()
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
    _views.clear()


@dataclass(frozen=True, slots=True)
class View:
    """What one answer of the directory says of a stage, found out once for all nodes of this process that get it."""

    records: Sequence[wire.SignedRecord]
    members: dict[PeerId, Member]  # in the order of `records`
    fed: tuple[PeerId, ...]  # those that tell of samples or blocks
    samples: dict[PeerId, int]
    blocks: dict[PeerId, wire.Blocks]
    expires_unix_s: tuple[float, float]  # nobody before, and nobody after


_Signed = Iterable[wire.SignedRecord]
_views: dict[int, View] = {}
VIEWS_MAX = 64


def view_of(records: Sequence[wire.SignedRecord]) -> View | None:
    """The view that this very list gives, when messages are shared in memory (simulation) and all are verified."""
    known = _views.get(id(records))
    if known is not None and known.records is records:
        return known
    if not SHARED_MAX or not records:
        return None
    return _seen(View(records, {}, (), {}, {}, (math.inf, 0.0)), records)


def view_after(records: Sequence[wire.SignedRecord], before: Sequence[wire.SignedRecord], news: _Signed) -> None:
    """`view_of` of `records` will be asked for: they are `before` but for `news`."""
    if (known := _views.get(id(before))) is not None and known.records is before:
        copy = known.members.copy(), known.fed, known.samples.copy(), known.blocks.copy(), known.expires_unix_s
        _seen(View(records, *copy), news)


def _seen(view: View, news: _Signed) -> View | None:
    """`view`, to which what `news` say is added; None when one of them was not verified in this process."""
    first, last = view.expires_unix_s
    fed = False
    for signed in news:
        if (one := shared(signed)) is None:
            return None
        _, record, member = one
        peer = member.peer
        view.members[peer] = member
        fed = fed or member.fed or peer in view.samples or peer in view.blocks
        if member.fed:
            if record.progress.samples:
                view.samples[peer] = record.progress.samples[0]
            if record.HasField("blocks"):
                view.blocks[peer] = record.blocks
        first, last = min(first, member.expires_unix_s), max(last, member.expires_unix_s)
    tell = tuple([peer for peer, member in view.members.items() if member.fed]) if fed else view.fed
    if len(_views) >= VIEWS_MAX:
        _views.clear()
    done = _views[id(view.records)] = replace(view, fed=tell, expires_unix_s=(first, last))
    return done


@dataclass(frozen=True, slots=True)
class Swarm:
    """All members by stage, each stage sorted by peer id; of crowded stages, some. A snapshot: it never changes."""

    stages: tuple[tuple[Member, ...], ...]
    _serving: tuple[tuple[Member, ...], ...]
    sizes: tuple[int, ...]  # how many there are of each stage, known to us or not

    @staticmethod
    def frozen(
        stages: Iterable[tuple[Member, ...]], before: Swarm | None = None, sizes: Sequence[int] | None = None
    ) -> Swarm:
        """Of members sorted by peer id in each stage; what is the same as in `before` is shared with it. `sizes` as far
        as there are more of a stage than in `stages`."""
        whole = tuple(stages)
        counts = [len(members) for members in whole]
        serving = tuple(
            before._serving[i]
            if before is not None and members is before.stages[i]
            else tuple([member for member in members if member.state == SERVING])
            for i, members in enumerate(whole)
        )
        return Swarm(whole, serving, tuple(counts if sizes is None else map(max, counts, sizes)))

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
    """The newest record of every peer we heard of, until it expires. Records come verified.

    Of stages other than `own`, CROWD_MAX members are enough: whoever is there first stays until its record runs out.
    Those that keep a snapshot or are about to move are always known.
    """

    def __init__(self, stages: int, members_max: int = 65_536, crowd_max: int = CROWD_MAX) -> None:
        self._members_max = members_max
        self._crowd_max = crowd_max
        self.own: int | None = None
        self._sizes = [0] * stages  # what the last look-up of each stage gave, where that was a crowd
        self._members: dict[PeerId, Member] = {}
        self._present: list[dict[PeerId, Member]] = [{} for _ in range(stages)]  # by stage, without those that left
        self._unsorted = set[int]()  # stages to which somebody came since they were put in order
        self._expires_unix_s = 0.0  # nobody's record runs out before
        self._stale = set(range(stages))  # stages whose part of `_frozen` is out of date
        self._changed = set(range(stages))  # stages that changed since `changed` was asked
        self._frozen = Swarm.frozen(() for _ in range(stages))

    def news(self, stage: int, records: Sequence[wire.SignedRecord], rng: random.Random) -> Sequence[wire.SignedRecord]:
        """What is worth a look of what the directory has of `stage`: the quick way through many. Of a crowd, strangers
        in an order by `rng`: each node knows others."""
        crowd = len(records) > self._crowd_max and stage != self.own
        self._sized(stage, len(records) if crowd else 0)
        seen, here = _shared.get, self._members.get
        found: list[wire.SignedRecord] = []
        strangers: list[wire.SignedRecord] = []
        for signed in records:
            known = seen(id(signed))
            if known is None or known[0] is not signed:
                found.append(signed)
                continue
            member = known[2]
            before = here(member.peer)
            if before is None and crowd:
                strangers.append(signed)
            elif before is not member:
                found.append(signed)
        if crowd:
            rng.shuffle(found)
            room = self._crowd_max - len(self._present[stage])
            found += rng.sample(strangers, min(max(0, room), len(strangers)))
        return found

    def knows(self, record: wire.Record) -> bool:
        """Whether `record` is no news."""
        known = self._members.get(PeerId(record.peer_id))
        return known is not None and known.sequence >= record.sequence

    def learn(self, record: wire.Record, member: Member | None = None) -> bool:
        """Keep `record` if it is newer than what we have. True when it changed what we know. `member`: as it tells, if
        that was found out before."""
        peer = PeerId(record.peer_id) if member is None else member.peer
        known = self._members.get(peer)
        if known is not None and known.sequence >= (record if member is None else member).sequence:
            return False
        return self._take(known, Member.of(record) if member is None else member)

    def renew(self, stage: int, view: View, me: PeerId, rng: random.Random) -> list[PeerId]:
        """Learn all that is news in `view` of `stage`; returns whose samples or blocks are to be looked at. As `news`
        and `learn` one by one, quicker."""
        crowd = len(view.members) > self._crowd_max and stage != self.own
        self._sized(stage, len(view.members) if crowd else 0)
        here, present, told = self._members.get, self._present[stage], view.members.get
        newer: dict[PeerId, Member] = {}  # of those that are here
        others: list[Member] = []
        for peer, known in present.items():
            if (new := told(peer)) is None or new is known or known.sequence >= new.sequence:
                continue
            if new.stage == stage and new.state != wire.NODE_STATE_LEFT:
                newer[peer] = new
            else:
                others.append(new)
        newer.pop(me, None)
        if newer:
            self._members.update(newer)
            present.update(newer)
            self._expires_unix_s = min(self._expires_unix_s, view.expires_unix_s[0])
            self._touch(stage)
        strangers: list[Member] = []
        for peer, new in view.members.items():
            if peer not in present:
                if (absent := here(peer)) is None:
                    strangers.append(new)
                elif absent.sequence < new.sequence:  # buried, or come from another stage
                    others.append(new)
        if crowd:
            room = self._crowd_max - len(present)
            strangers = rng.sample(strangers, min(max(0, room), len(strangers)))
        others += strangers
        kept = {new.peer for new in others if new.peer != me and self._take(here(new.peer), new)}
        return [peer for peer in view.fed if peer in newer or peer in kept]

    def _take(self, known: Member | None, member: Member) -> bool:
        """`_keep`, if there is room."""
        return (known is not None or len(self._members) < self._members_max) and self._keep(known, member)

    def _keep(self, known: Member | None, member: Member) -> bool:
        peer = member.peer
        if known is None and self._crowded(member):
            return False
        if known is not None and (known.stage != member.stage or member.state == wire.NODE_STATE_LEFT):
            self._remove(known)
        self._members[peer] = member
        self._expires_unix_s = min(self._expires_unix_s, member.expires_unix_s)
        if member.state != wire.NODE_STATE_LEFT and member.stage < len(self._present):
            present = self._present[member.stage]
            if peer not in present:
                self._unsorted.add(member.stage)
            present[peer] = member
            self._touch(member.stage)
        return True

    def expire(self, now_unix_s: float) -> list[PeerId]:
        """Forget peers whose record ran out; returns them."""
        if now_unix_s < self._expires_unix_s:
            return []
        expires = [member.expires_unix_s for member in self._members.values()]
        gone: list[PeerId] = []
        if min(expires, default=math.inf) <= now_unix_s:
            gone = [peer for peer, end in zip(self._members, expires, strict=True) if end <= now_unix_s]
            expires = [end for end in expires if end > now_unix_s]
            for peer in gone:
                self._remove(self._members.pop(peer))
        self._expires_unix_s = min(expires, default=math.inf)
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
                if stage in self._unsorted:
                    self._present[stage] = present = {peer: present[peer] for peer in sorted(present)}
                stages[stage] = tuple(present.values())
            self._frozen = Swarm.frozen(stages, self._frozen, self._sizes)
            self._stale.clear()
            self._unsorted.clear()
        return self._frozen

    def _sized(self, stage: int, size: int) -> None:
        if size != self._sizes[stage]:
            self._sizes[stage] = size
            self._stale.add(stage)

    def _crowded(self, member: Member) -> bool:
        if member.stage == self.own or member.kept_round is not None or member.moving_to is not None:
            return False
        return member.stage < len(self._present) and len(self._present[member.stage]) >= self._crowd_max

    def _remove(self, member: Member) -> None:
        if member.stage < len(self._present) and self._present[member.stage].pop(member.peer, None) is not None:
            self._touch(member.stage)

    def _touch(self, stage: int) -> None:
        self._stale.add(stage)
        self._changed.add(stage)

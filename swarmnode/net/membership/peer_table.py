"""The newest record of every known peer. (swarm.py has the frozen view that decisions read.)"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Container, Iterator, Sequence

from swarmnode.base.ids import PeerId, machine_of, rank
from swarmnode.base.wire import record_pb2 as wire
from swarmnode.net.membership.swarm import SERVING, Member, Swarm, shared

ABSENT = -1
CROWD_MAX = 64  # guess: known replicas of a stage not our own; a choice among more does not balance better
SPECIAL_MAX = 4  # guess


class PeerTable:
    """The newest record of every known peer, until it expires. Records come verified.

    Of stages that this node does not attend, at most CROWD_MAX members are kept: those of the least `rank`, a random
    order of this node. If the first to arrive were kept, all nodes would know the same ones, and some of a hundred
    replicas got nine times the work of others (simulated: thousand-8b). Of machines that this node has seen at work, up
    to half of CROWD_MAX stay whoever else comes: keys cost nothing, and a flood of them would else replace all with
    which it works. Members that keep a snapshot or are about to move are kept, too, SPECIAL_MAX times as many.
    """

    def __init__(self, stages: int, members_max: int = 65_536, crowd_max: int = CROWD_MAX) -> None:
        self._members_max = members_max
        self._crowd_max = crowd_max
        self._own: int | None = None
        self._seen_at_work: Container[PeerId] = ()
        self.excluded = set[PeerId]()  # machines found to lie: dropped, and never added again
        self._salt = 0  # of this node's random order; 0: not drawn yet
        self._sizes = [0] * stages  # members in the last look-up of each stage, if it was crowded
        self._places: dict[PeerId, int] = {}  # the stage of each peer; ABSENT for those in `_absent`
        self._present: list[dict[PeerId, Member]] = [{} for _ in range(stages)]  # by stage, without those that left
        self._unsorted = set[int]()  # stages with members added since they were last sorted
        self._absent: dict[PeerId, Member] = {}  # peers that left or were marked dead
        self._due_unix_s = [math.inf] * (stages + 1)  # by stage, the absent last: earliest expiry of a record
        self.shape = 0
        """Grows when a peer comes, goes, changes its state or goal, or first announces its speed."""
        self._counted: tuple[int, Sequence[tuple[int, int]]] = -1, ()  # (`shape`, `counts` at that shape)
        self._stale = set(range(stages))  # stages whose part of `_frozen` is out of date
        self._changed = set(range(stages))  # stages that changed since `changed` was last called
        self._frozen = Swarm.frozen(() for _ in range(stages))

    def prefer(self, seen_at_work: Container[PeerId]) -> None:
        """Keep peers `seen_at_work` here, now and later, in crowded stages."""
        self._seen_at_work = seen_at_work

    def attend(self, stage: int) -> None:
        """Know all members of `stage` from now on: it is served here."""
        self._own = stage

    def news(self, stage: int, records: Sequence[wire.SignedRecord], rng: random.Random) -> Sequence[wire.SignedRecord]:
        """The records of `stage` from the directory that may be new, found quickly. Of a crowd, unknown peers are
        chosen at random."""
        crowd = len(records) > self._crowd_max and stage != self._own
        self._sized(stage, len(records) if crowd else 0, rng)
        here = self.member
        unsent: list[wire.SignedRecord] = []
        strangers: dict[PeerId, wire.SignedRecord] = {}
        for signed in records:
            known = shared(signed)
            if known is None:
                unsent.append(signed)
                continue
            member = known[2]
            before = here(member.peer)
            if before is None and crowd:
                strangers[member.peer] = signed
            elif before is not member:
                unsent.append(signed)
        if crowd:
            rng.shuffle(unsent)
            unsent += [strangers[peer] for peer in self._drawn(stage, strangers)]
        return unsent

    def _drawn(self, stage: int, strangers: Collection[PeerId]) -> list[PeerId]:
        """Which of the unknown `strangers` to keep for the crowded `stage`. Members that they replace are dropped."""
        salt = self._salt
        present = self._present[stage]
        room = self._crowd_max - len(self._present[stage])
        newer = sorted([(rank(peer, salt), peer) for peer in strangers])
        drawn = [peer for _, peer in newer[: max(0, room)]]
        if len(drawn) < len(newer):
            plain = sorted([(rank(peer, salt), peer) for peer, member in present.items() if member.plain])
            stay = {*[one for one in plain if one[1] in self._seen_at_work][: self._crowd_max // 2]}
            others = [one for one in reversed(plain) if one not in stay]
            for new, known in zip(newer[len(drawn) :], others, strict=False):
                if new >= known:
                    break
                self.forget(known[1])
                drawn.append(new[1])
        return drawn

    def knows(self, record: wire.Record) -> bool:
        """Whether `record` is no newer than the known one."""
        known = self.member(PeerId(record.peer_id))
        return known is not None and known.sequence >= record.sequence

    def learn(self, record: wire.Record, member: Member | None = None) -> bool:
        """Keep `record` if it is newer; return whether anything changed. `member`: its content, if already parsed."""
        peer = PeerId(record.peer_id) if member is None else member.peer
        known = self.member(peer)
        member_new = Member.of(record) if member is None else member
        if known is not None and known.sequence >= member_new.sequence:
            return False
        if known is None and member is None and self._salt and self._crowded(member_new):
            self._drawn(member_new.stage, [peer])  # makes room if its rank is better
        return self._take(known, member_new)

    def _take(self, known: Member | None, member: Member) -> bool:
        """`_keep`, if there is room and the peer is not excluded."""
        full = known is None and len(self._places) >= self._members_max
        return not full and machine_of(member.peer) not in self.excluded and self._keep(known, member)

    def _keep(self, known: Member | None, member: Member) -> bool:
        peer = member.peer
        stage = member.stage
        if known is None and self._crowded(member):
            return False
        here = member.state != wire.NODE_STATE_LEFT and stage < len(self._present)
        if known is not None and (known.stage != stage or not here):
            self._remove(known)
        if here:
            present = self._present[stage]
            if (before := present.get(peer)) is None:
                self._unsorted.add(stage)
                self._absent.pop(peer, None)
            if before is None or _shape(before) != _shape(member):
                self.shape += 1
            present[peer] = member
            self._places[peer] = stage
            self._due_unix_s[stage] = min(self._due_unix_s[stage], member.expires_unix_s)
            self._touch(stage)
        else:
            self._leave(member)
        return True

    def expire(self, now_unix_s: float) -> list[PeerId]:
        """Drop and return the peers whose records have expired."""
        gone: list[PeerId] = []
        for place, members in enumerate([*self._present, self._absent]):
            if now_unix_s >= self._due_unix_s[place]:
                gone += [peer for peer, member in members.items() if member.expires_unix_s <= now_unix_s]
                ends = [member.expires_unix_s for member in members.values() if member.expires_unix_s > now_unix_s]
                self._due_unix_s[place] = min(ends, default=math.inf)
        for peer in gone:
            self.forget(peer)
        return gone

    def mark_dead(self, peer: PeerId) -> None:
        """Remove `peer` from the view, although its record has not expired, until it publishes a newer one."""
        if (known := self.member(peer)) is not None:
            self._remove(known)
            self._leave(known)

    def forget(self, peer: PeerId) -> None:
        """Drop all knowledge of `peer`, until its next record."""
        if (member := self.member(peer)) is not None:
            self._remove(member)
            self._absent.pop(peer, None)
            del self._places[peer]

    def take_changed(self) -> list[int]:
        """The stages that changed since the last call, in order."""
        changed = sorted(self._changed)
        self._changed.clear()
        return changed

    def member(self, peer: PeerId) -> Member | None:
        if (place := self._places.get(peer)) is None:
            return None
        return self._absent[peer] if place == ABSENT else self._present[place][peer]

    def present(self, stage: int) -> Collection[Member]:
        """The present members of `stage`, unsorted (`swarm` sorts them)."""
        return self._present[stage].values()

    def known(self, stage: int) -> Iterator[Member]:
        """The members of `stage`, those that left or were marked dead as well."""
        yield from self._present[stage].values()
        yield from (member for member in self._absent.values() if member.stage == stage)

    @property
    def size(self) -> int:
        """Members of all stages, known or not: the sum of `sizes` in `swarm`."""
        return sum(map(max, map(len, self._present), self._sizes))

    def counts(self) -> Sequence[tuple[int, int]]:
        """(members, serving members) of each stage. Cached, as it only changes with `shape`."""
        if self._counted[0] != self.shape:
            counts = [(len(here), sum(m.state == SERVING for m in here.values())) for here in self._present]
            self._counted = self.shape, counts
        return self._counted[1]

    def serving(self) -> tuple[int, ...]:
        """Number of members serving each stage; for crowds, the directory's count."""
        return tuple(
            [size if size > here else serve for size, (here, serve) in zip(self._sizes, self.counts(), strict=False)]
        )

    def swarm(self) -> Swarm:
        """The current frozen view. Unchanged stages are shared with the previous view."""
        if self._stale:
            stages = [*self._frozen.stages]
            for stage in self._stale:
                present = self._present[stage]
                if stage in self._unsorted:
                    self._present[stage] = present = {peer: present[peer] for peer in sorted(present)}
                stages[stage] = tuple(present.values())
            self._frozen = Swarm.frozen(stages, self._frozen, self._sizes)
            self._stale.clear()
            self._unsorted.clear()
        return self._frozen

    def _sized(self, stage: int, size: int, rng: random.Random) -> None:
        self._salt = self._salt or (rng.getrandbits(64) if size else 0)
        if size != self._sizes[stage]:
            self._sizes[stage] = size
            self.shape += 1
            self._stale.add(stage)

    def _crowded(self, member: Member) -> bool:
        if member.stage == self._own or member.stage >= len(self._present):
            return False
        special = member.kept_round is not None or member.moving_to is not None
        return len(self._present[member.stage]) >= self._crowd_max * (SPECIAL_MAX if special else 1)

    def _remove(self, member: Member) -> None:
        if member.stage < len(self._present) and self._present[member.stage].pop(member.peer, None) is not None:
            self.shape += 1
            self._touch(member.stage)

    def _leave(self, member: Member) -> None:
        self._absent[member.peer] = member
        self._places[member.peer] = ABSENT
        self._due_unix_s[-1] = min(self._due_unix_s[-1], member.expires_unix_s)

    def _touch(self, stage: int) -> None:
        self._stale.add(stage)
        self._changed.add(stage)


def _shape(member: Member) -> tuple[wire.NodeState, int | None, bool]:
    return member.state, member.moving_to, member.samples_per_second > 0.0

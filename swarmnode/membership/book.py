"""The newest record of every peer we heard of (swarm.py has the view that decisions read)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from swarmnode.ids import PeerId
from swarmnode.membership.swarm import Member, Swarm, View, shared
from swarmnode.wire import record_pb2 as wire

CROWD_MAX = 64  # guess: replicas known of a stage not our own; to choose among more balances no better


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
        self._absent: dict[PeerId, Member] = {}  # those that left, or are buried
        self._due_unix_s = [math.inf] * (stages + 1)  # by stage, the absent last: nobody's record runs out before
        self.most = 0  # samples of the whole run: nobody known tells of more
        self._stale = set(range(stages))  # stages whose part of `_frozen` is out of date
        self._changed = set(range(stages))  # stages that changed since `changed` was asked
        self._frozen = Swarm.frozen(() for _ in range(stages))

    def news(self, stage: int, records: Sequence[wire.SignedRecord], rng: random.Random) -> Sequence[wire.SignedRecord]:
        """What is worth a look of what the directory has of `stage`: the quick way through many. Of a crowd, strangers
        in an order by `rng`: each node knows others."""
        crowd = len(records) > self._crowd_max and stage != self.own
        self._sized(stage, len(records) if crowd else 0)
        here = self._members.get
        found: list[wire.SignedRecord] = []
        strangers: list[wire.SignedRecord] = []
        for signed in records:
            known = shared(signed)
            if known is None:
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
        self.most = max(self.most, view.most)
        present, told = self._present[stage], view.members.get
        changed = [
            new
            for peer, known in present.items()
            if (new := told(peer)) is not None and new is not known and new.sequence > known.sequence
        ]
        newer = {new.peer: new for new in changed if new.stage == stage and new.state != wire.NODE_STATE_LEFT}
        others = [new for new in changed if new.peer not in newer] if len(newer) < len(changed) else []
        newer.pop(me, None)
        if newer:
            self._members.update(newer)
            present.update(newer)
            self._touch(stage)
        here = self._members
        unseen = [peer for peer in view.members if peer not in present]
        if not crowd or (room := self._crowd_max - len(present)) > 0:
            strangers = [view.members[peer] for peer in unseen if peer not in here]
            if crowd:
                strangers = rng.sample(strangers, min(room, len(strangers)))
        else:
            strangers = []
        # Buried, or come from another stage.
        back = [view.members[peer] for peer in unseen if peer in here]
        others += [new for new in back if here[new.peer].sequence < new.sequence]
        kept = self._settle(stage, strangers, me)
        kept |= {new.peer for new in others if new.peer != me and self._take(here.get(new.peer), new)}
        return [peer for peer in view.fed if peer in newer or peer in kept]

    def _settle(self, stage: int, strangers: Sequence[Member], me: PeerId) -> set[PeerId]:
        """`_take` all `strangers`, whom a look-up of `stage` has found; who was taken."""
        here = {new.peer: new for new in strangers if new.stage == stage and new.state != wire.NODE_STATE_LEFT}
        here.pop(me, None)
        present = self._present[stage]
        if (stage != self.own and len(present) + len(here) > self._crowd_max) or len(here) < len(strangers) or not here:
            return {new.peer for new in strangers if new.peer != me and self._take(None, new)}
        if len(self._members) + len(here) > self._members_max:
            return set()
        self._members.update(here)
        present.update(here)
        self._unsorted.add(stage)
        self._due_unix_s[stage] = min(self._due_unix_s[stage], *[new.expires_unix_s for new in here.values()])
        self._touch(stage)
        return set(here)

    def _take(self, known: Member | None, member: Member) -> bool:
        """`_keep`, if there is room."""
        return (known is not None or len(self._members) < self._members_max) and self._keep(known, member)

    def _keep(self, known: Member | None, member: Member) -> bool:
        peer, stage = member.peer, member.stage
        if known is None and self._crowded(member):
            return False
        here = member.state != wire.NODE_STATE_LEFT and stage < len(self._present)
        if known is not None and (known.stage != stage or not here):
            self._remove(known)
        self._members[peer] = member
        self.most = max(self.most, member.total)
        if here:
            present = self._present[stage]
            if peer not in present:
                self._unsorted.add(stage)
                self._absent.pop(peer, None)
            present[peer] = member
            self._due_unix_s[stage] = min(self._due_unix_s[stage], member.expires_unix_s)
            self._touch(stage)
        else:
            self._leave(member)
        return True

    def expire(self, now_unix_s: float) -> list[PeerId]:
        """Forget peers whose record ran out; returns them."""
        gone: list[PeerId] = []
        for stage, due_unix_s in enumerate(self._due_unix_s):
            if now_unix_s < due_unix_s:
                continue
            members = self._present[stage] if stage < len(self._present) else self._absent
            ends = [member.expires_unix_s for member in members.values()]
            if min(ends, default=math.inf) <= now_unix_s:
                gone += [peer for peer, end in zip(members, ends, strict=True) if end <= now_unix_s]
                ends = [end for end in ends if end > now_unix_s]
            self._due_unix_s[stage] = min(ends, default=math.inf)
        for peer in gone:
            self.forget(peer)
        return gone

    def bury(self, peer: PeerId) -> None:
        """`peer` is gone although its record has not run out: out of the view until it says something newer."""
        known = self._members.get(peer)
        if known is not None:
            self._remove(known)
            self._leave(known)

    def forget(self, peer: PeerId) -> None:
        """Drop what is known of `peer`, until its next record."""
        member = self._members.pop(peer, None)
        if member is not None:
            self._absent.pop(peer, None)
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

    def _leave(self, member: Member) -> None:
        self._absent[member.peer] = member
        self._due_unix_s[-1] = min(self._due_unix_s[-1], member.expires_unix_s)

    def _touch(self, stage: int) -> None:
        self._stale.add(stage)
        self._changed.add(stage)

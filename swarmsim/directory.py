"""The simulated record directory: late, stale, lossy, and divided by partitions.

Bytes move as those of net/transport/directory.py do: of each place a node has a picture that is complete up to some
time. A look asks a holder for a few records, then a member, then another holder; a refresh asks one member or, seldom,
a holder. The answer carries the records announced between the two pictures' times. (Bytes of a node's own newer
records, which come along, are not taken off.)
"""

from __future__ import annotations

import asyncio
import bisect
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId, RunId, digest64
from swarmnode.base.ports import Announced, Clock
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.record import check_record
from swarmnode.net.transport.contact import Contacts, whom_to_try
from swarmnode.net.transport.record_book import (
    FIRST_MAX,
    HOLDERS,
    HOLDERS_ASKED,
    NEAR_S,
    PLACE_MAX,
    RPC_TIMEOUT_S,
)
from swarmsim.network import Network, NetworkPort

TTL_MAX_S = 3600.0  # guess: no run of ours wants records to live longer
MEETING_POINT = PeerId("meeting point")  # the run's bootstrap, which every node knows
ANNOUNCE_RTT = 3  # measured: a store takes two round trips to the furthest replica, and one asks for other records
ASK_NBYTES = 100  # of a RecordsRequest
MARK_NBYTES = 12  # of each record in it that is known
STORE_NBYTES = 150  # of a store beside the record, with its answer
FINDS = 20  # calls of a search for holders (measured)
FIND_NBYTES = 1300  # of an answer: 20 neighbours (measured)
PICTURE_S = 1.0  # pictures of a place that differ by less are one
PICTURES = 256


@dataclass(frozen=True, slots=True)
class DirectoryFaults:
    """Imperfections of the simulated directory."""

    round_trip_s: float = 0.1  # of a look-up; an announcement takes ANNOUNCE_RTT of them
    late_s: float = 0.0  # mean of the exponential delay until an announced record can be found
    stale: float = 0.0  # share of entries for which a look-up returns the previous version
    missing: float = 0.0  # share of entries that a look-up leaves out
    loses: float = 0.0  # share of announcements that are not stored
    fails: float = 0.0  # share of look-ups that find nothing at all


@dataclass(slots=True)
class _Entry:
    """Stored records of one peer, newest last: (visible from, expires at, record)."""

    plug: NetworkPort
    versions: list[tuple[float, float, record_pb2.SignedRecord]] = field(default_factory=list)


@dataclass(slots=True)
class _Found:
    """Cached result of looking up a stage, valid until some wall and loop time, except for records announced since."""

    until: float = math.inf
    then: float = math.inf
    records: list[record_pb2.SignedRecord] = field(default_factory=list)
    places: dict[PeerId, int] = field(default_factory=dict)
    announced: dict[PeerId, record_pb2.SignedRecord] = field(default_factory=dict)


@dataclass(slots=True)
class _Place:
    """The past of a place: loop times of announcements and all bytes until each, and pictures taken."""

    times: list[float] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    taken_at: list[float] = field(default_factory=list)
    pictures: list[list[record_pb2.SignedRecord]] = field(default_factory=list)
    holders: tuple[float, int, list[NetworkPort]] = (-math.inf, 0, [])  # until, of how many nodes

    def news_nbytes(self, since: float, until: float, records: int) -> int:
        """Bytes of the records announced between two times: at most those of as many `records`."""
        if not self.times:
            return 0
        first = bisect.bisect_right(self.times, since)
        last = bisect.bisect_right(self.times, until)
        told = self.nbytes[last - 1] - (self.nbytes[first - 1] if first else 0) if last else 0
        return max(0, min(told, records * self.nbytes[-1] // len(self.times)))  # who knows more gets nothing


class SimDht:
    """All stored records, by stage. One instance for the whole world."""

    def __init__(
        self, network: Network, clock: Clock, run_id: RunId, rng: random.Random, faults: DirectoryFaults
    ) -> None:
        self.network = network
        self.clock = clock
        self.run_id = run_id
        self.rng = rng
        self.faults = faults
        self.down = False
        """Whether the bootstraps are gone, so that nothing can be stored or found."""
        self.back_s = -math.inf  # when they last came back
        self.away = False
        """Whether the bootstrap is gone: who knows nobody waits for it, the others go on."""
        self.islands: dict[str, int] = {}
        """Island of each node that has met the bootstrap, by label. Nobody finds records of another island."""
        self.meeting = 0  # the bootstrap's
        self.remembered: dict[str, int] = {}
        """Samples of the run that each home remembers, by label; the bootstrap's too. No death takes them."""
        self._islands_ever = 0
        self.happened: Counter[str] = Counter()
        self.stages: dict[int, dict[PeerId, _Entry]] = {}
        self._found: dict[int, _Found] = {}
        self.places: dict[int, _Place] = {}
        self.directories: dict[NetworkPort, SimDirectory] = {}
        self.moved: Counter[tuple[str, str]] = Counter()
        """Bytes of the directory that each node has sent and received, by label and kind of message."""

    def past(self, stage: int) -> _Place:
        return self.places.setdefault(stage, _Place())

    def holders(self, stage: int, loop_now: float) -> list[NetworkPort]:
        """The living nodes nearest to the key of `stage`, as of NEAR_S ago at most."""
        until, nodes, found = self.past(stage).holders
        if loop_now >= until or len(self.network.plugs) > 1.1 * nodes or not all(plug.alive for plug in found):
            living = [plug for plug in self.network.plugs.values() if plug.alive]
            found = sorted(living, key=lambda plug: digest64("holder", stage, plug.peer))[:HOLDERS]
            self.past(stage).holders = loop_now + NEAR_S, len(self.network.plugs), found
        return found

    def charge(self, sender: NetworkPort, receiver: NetworkPort, nbytes: int, kind: str) -> None:
        """Count bytes of a small message on the lines of both."""
        sender.up.carried += nbytes
        receiver.down.carried += nbytes
        self.count(sender, receiver, nbytes, kind)

    def count(self, sender: NetworkPort, receiver: NetworkPort, nbytes: int, kind: str) -> None:
        self.moved[sender.label, f"{kind} sent"] += nbytes
        self.moved[receiver.label, f"{kind} received"] += nbytes
        self.network.sent["records"] += nbytes

    def moved_by_node(self) -> dict[str, int]:
        """The bytes of all kinds that each node moved, by label."""
        moved = Counter[str]()
        for (label, _), nbytes in self.moved.items():
            moved[label] += nbytes
        return dict(sorted(moved.items()))

    def picture(self, stage: int, until: float, now: float, loop_now: float) -> list[record_pb2.SignedRecord]:
        """The unexpired records of `stage` as of loop time `until`."""
        past = self.past(stage)
        at = bisect.bisect_right(past.taken_at, until + PICTURE_S) - 1
        if until >= loop_now - PICTURE_S or at < 0:
            records = self.found(stage, now, loop_now)
            if not past.taken_at or loop_now - past.taken_at[-1] >= PICTURE_S:
                past.taken_at = [*past.taken_at[-PICTURES:], loop_now]
                past.pictures = [*past.pictures[-PICTURES:], records]
            return records
        before = past.pictures[at]
        told = [check_record(signed, run_id=self.run_id) for signed in before]
        kept = [signed for signed, record in zip(before, told, strict=True) if record.expires_unix_ms > now * 1000.0]
        past.pictures[at] = kept
        return kept

    def invalidate(self, stage: int) -> None:
        """Invalidate the cached look-up of `stage`."""
        self._found.pop(stage, None)

    def announced(self, stage: int, peer: PeerId, expires: float, record: record_pb2.SignedRecord) -> None:
        """Update the cached look-up of `stage` with `record`, which is visible at once."""
        if (found := self._found.get(stage)) is not None:
            found.announced[peer] = record
            found.until = min(found.until, expires)

    def lose_meeting_point(self) -> None:
        """The bootstrap dies. It comes back on an island of its own, as its memory is empty."""
        self.away = True
        self._islands_ever += 1
        self.meeting = self._islands_ever

    def meet(self, label: str) -> None:
        """Make one island of that of `label`, which has reached the bootstrap, and the bootstrap's."""
        before = self.islands.setdefault(label, self.meeting)
        if before != self.meeting:
            self.islands = {who: self.meeting if at == before else at for who, at in self.islands.items()}

    def clear(self) -> None:
        """Drop all stored records."""
        self.stages.clear()
        self._found.clear()

    def found(self, stage: int, now: float, loop_now: float) -> list[record_pb2.SignedRecord]:
        """All records of `stage`, if none is hidden or forgotten. Cached while valid."""
        known = self._found.get(stage)
        if known is None or now >= known.until or loop_now >= known.then:
            known = self._found[stage] = self._all_found(stage, now, loop_now)
        elif known.announced:  # in a large stage, one of hundreds every second
            records = known.records.copy()
            for peer, record in known.announced.items():
                at = known.places.setdefault(peer, len(records))
                records[at : at + 1] = [record]
            known.records = records
            known.announced = {}
        return known.records

    def _all_found(self, stage: int, now: float, loop_now: float) -> _Found:
        entries = self.stages.get(stage, {})
        here = _Found()
        gone = []
        for peer, entry in entries.items():
            if entry.versions[-1][1] <= now:
                gone.append(peer)
                continue
            for visible_at, expires, record in reversed(entry.versions):
                if visible_at > loop_now:
                    here.then = min(here.then, visible_at)
                elif expires > now:
                    here.until = min(here.until, expires)
                    here.places[peer] = len(here.records)
                    here.records.append(record)
                    break
        for peer in gone:
            del entries[peer]
        return here

    def happens(self, kind: str, rate: float) -> bool:
        if rate > 0.0 and self.rng.random() < rate:
            self.happened[kind] += 1
            return True
        return False

    def forget(self, stage: int, share: float) -> int:
        """Drop a random `share` of the records of `stage`; return the number."""
        entries = self.stages.get(stage, {})
        gone = [peer for peer in sorted(entries) if self.rng.random() < share]
        for peer in gone:
            del entries[peer]
        self.invalidate(stage)
        return len(gone)


class SimDirectory:
    """ports.Directory of one node."""

    def __init__(self, dht: SimDht, plug: NetworkPort) -> None:
        self._dht = dht
        self._plug = plug
        self._contacts = Contacts()
        self._contacts.tell(MEETING_POINT, ["/ip4/10.0.0.1"])
        self._complete: dict[int, float] = {}  # place -> loop time up to which it is known here
        self._searched: dict[int, float] = {}  # place -> until when its holders are known
        dht.directories[plug] = self

    async def join(self) -> None:
        """Wait for the bootstrap, unless members are known from an earlier life (in its home's contacts)."""
        while self._plug.label not in self._dht.islands:
            if not self._dht.away:
                self._dht.meet(self._plug.label)
                break
            await asyncio.sleep(1.0)

    def _look_for_bootstrap(self) -> None:
        """Try a lost bootstrap when the node's own rule for lost contacts says so."""
        dht = self._dht
        me = self._plug.label
        now = self._dht.clock.unix_s()
        if not dht.away and dht.islands.get(me, 0) == dht.meeting:
            self._contacts.hear(MEETING_POINT, (), now)
        elif whom_to_try(self._contacts.known, (), now):
            self._contacts.record_try(MEETING_POINT, not dht.away, now)
            if not dht.away:
                dht.meet(me)

    async def announce(self, record: record_pb2.SignedRecord) -> Announced:
        dht = self._dht
        faults = self._dht.faults
        own = check_record(record, run_id=dht.run_id)
        await asyncio.sleep(ANNOUNCE_RTT * faults.round_trip_s)
        self._look_for_bootstrap()
        now = dht.clock.unix_s()
        loop_now = asyncio.get_running_loop().time()
        expires = own.expires_unix_ms / 1000.0
        if not self._plug.alive or dht.down or expires > now + TTL_MAX_S or expires <= now:
            return Announced(False)
        for home in (self._plug.label, *(() if dht.away else (MEETING_POINT,))):
            dht.remembered[home] = max(dht.remembered.get(home, 0), own.progress.total)
        if dht.happens("record lost", faults.loses):
            return Announced(False)
        peer = PeerId(own.peer_id)
        # A record under another stage's key stays there until it expires, as in the DHT.
        entry = dht.stages.setdefault(own.stage, {}).setdefault(peer, _Entry(self._plug))
        entry.plug = self._plug
        others = [signed for _, until, signed in entry.versions[-1:] if until > now]
        if entry.versions and entry.versions[-1][1] >= expires:
            return Announced(False, others)
        past = dht.past(own.stage)
        nbytes = record.ByteSize()
        past.times.append(loop_now)
        past.nbytes.append((past.nbytes[-1] if past.nbytes else 0) + nbytes)
        for holder in self._search(own.stage, loop_now):
            dht.charge(self._plug, holder, nbytes + STORE_NBYTES, "store")
        for holder in self._asked(own.stage):
            dht.charge(self._plug, holder, nbytes + ASK_NBYTES + MARK_NBYTES, "store")
            dht.charge(holder, self._plug, ASK_NBYTES, "store")
        late_s = dht.rng.expovariate(1.0 / faults.late_s) if faults.late_s else 0.0
        if late_s:
            dht.invalidate(own.stage)
        else:
            dht.announced(own.stage, peer, expires, record)
        entry.versions = [*entry.versions[-1:], (loop_now + late_s, expires, record)]
        return Announced(True, others)

    async def lookup(self, stage: int) -> list[record_pb2.SignedRecord]:
        return (await self.lookups([stage]))[0]

    async def lookups(self, stages: Sequence[int]) -> list[list[record_pb2.SignedRecord]]:
        await asyncio.sleep(self._dht.faults.round_trip_s)
        holders = [self._asked(stage) for stage in stages]
        await self._move([asked[:-1] for asked in holders], stages, FIRST_MAX)
        members = [self._members(stage) for stage in stages]
        await self._move([self._dht.rng.sample(there, min(1, len(there))) for there in members], stages)
        await self._move([asked[-1:] for asked in holders], stages)
        return [self._found(stage) for stage in stages]

    async def refresh(self, stages: Sequence[int]) -> list[list[record_pb2.SignedRecord]]:
        rng = self._dht.rng
        asked = []
        for stage in stages:
            members = self._members(stage)
            if rng.random() * len(members) < HOLDERS:
                asked.append(self._asked(stage, 1))
            else:
                asked.append([rng.choice(members)])
        await self._move(asked, stages)
        return [self._found(stage) for stage in stages]

    def _members(self, stage: int) -> list[NetworkPort]:
        return [
            entry.plug
            for entry in self._dht.stages.get(stage, {}).values()
            if entry.plug.alive and entry.plug is not self._plug
        ]

    def _search(self, stage: int, loop_now: float) -> list[NetworkPort]:
        """The holders of `stage`: searched anew every NEAR_S."""
        holders = self._dht.holders(stage, loop_now)
        if loop_now >= self._searched.get(stage, 0.0):
            self._searched[stage] = loop_now + NEAR_S
            others = [*self._dht.network.plugs.values()]
            for plug in self._dht.rng.sample(others, min(FINDS, len(others))):
                self._dht.charge(plug, self._plug, FIND_NBYTES, "search")
        return holders

    def _asked(self, stage: int, count: int = HOLDERS_ASKED) -> list[NetworkPort]:
        holders = self._search(stage, asyncio.get_running_loop().time())
        return self._dht.rng.sample(holders, min(count, len(holders)))

    async def _move(self, asked: Sequence[Sequence[NetworkPort]], stages: Sequence[int], most: int = PLACE_MAX) -> None:
        """Ask the nodes `asked` for `most` records of each of `stages` at once, over the lines of both sides. A part of
        the records makes no picture."""
        dht = self._dht
        loop = asyncio.get_running_loop()
        begun = loop.time()
        answers = list[tuple[int, float, asyncio.Future[None]]]()
        for stage, plugs in zip(stages, asked, strict=True):
            known = self._complete.get(stage, -math.inf)
            size = len(dht.stages.get(stage, ()))
            for plug in plugs:
                holds = plug in dht.holders(stage, begun)
                if plug is self._plug and holds:
                    self._complete[stage] = begun
                if not plug.alive or plug is self._plug:
                    continue
                until = begun if holds else dht.directories[plug]._complete.get(stage, -math.inf)
                there = ASK_NBYTES + (MARK_NBYTES * size if known > -math.inf else 0)
                back = ASK_NBYTES + dht.past(stage).news_nbytes(known, until, min(size, most))
                answers.append((stage, until if size <= most else known, self._exchange(plug, there, back)))
        if not answers:
            return
        await asyncio.wait([future for _, _, future in answers], timeout=RPC_TIMEOUT_S)
        for stage, until, future in answers:
            if future.done():
                self._complete[stage] = max(until, self._complete.get(stage, -math.inf))

    def _exchange(self, plug: NetworkPort, there: int, back: int) -> asyncio.Future[None]:
        dht = self._dht
        me = self._plug
        done = asyncio.get_running_loop().create_future()

        def arrived() -> None:
            if not done.done():
                done.set_result(None)

        def answer() -> None:
            if plug.alive and me.alive:
                dht.network.carry(plug, me, back, arrived)
                dht.count(plug, me, back, "answer")

        dht.network.carry(me, plug, there, answer)
        dht.count(me, plug, there, "question")
        return done

    async def claimed(self) -> int:
        """The samples that this home has heard of the run in all its lives, and the bootstrap's home likewise."""
        told = self._dht.remembered
        away = self._dht.away
        own = told.get(self._plug.label, 0)
        if away and not own:
            raise Unavailable("the meeting point does not answer")
        return max(own, 0 if away else told.get(MEETING_POINT, 0))

    def _found(self, stage: int) -> list[record_pb2.SignedRecord]:
        dht = self._dht
        faults = self._dht.faults
        if not self._plug.alive or dht.down or dht.happens("look-up failed", faults.fails):
            return []
        now = dht.clock.unix_s()
        loop_now = asyncio.get_running_loop().time()
        apart = len(set(dht.islands.values())) > 1
        if not (apart or dht.network.reach.cuts or faults.missing or faults.stale):
            return dht.picture(stage, self._complete.get(stage, loop_now), now, loop_now)
        blocked = dht.network.reach.blocked if dht.network.reach.cuts else None
        found = []
        expired = []
        entries = dht.stages.get(stage, {})
        for peer, entry in entries.items():
            if blocked is not None and blocked(entry.plug.label, self._plug.label):
                continue
            if apart and dht.islands.get(entry.plug.label) != dht.islands.get(self._plug.label):
                continue
            if faults.missing and dht.happens("record left out", faults.missing):
                continue
            versions = entry.versions
            if versions[-1][1] <= now:
                expired.append(peer)
                continue
            stale = faults.stale and len(versions) > 1 and dht.happens("record stale", faults.stale)
            for visible_at, expires, record in versions if stale else reversed(versions):
                if visible_at <= loop_now and expires > now:
                    found.append(record)
                    break
        for peer in expired:
            del entries[peer]
        return found

"""The simulated record directory: late, stale, lossy, and divided by partitions."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from swarmnode.ids import PeerId, RunId
from swarmnode.membership.record import check_record
from swarmnode.membership.stage_view import view_after
from swarmnode.ports import Clock
from swarmnode.transport.contact import Contacts, whom_to_try
from swarmnode.wire import record_pb2
from swarmsim.network import Network, NetworkPort

TTL_MAX_S = 3600.0  # guess: no run of ours wants records to live longer
MEETING_POINT = PeerId("meeting point")  # the run's bootstrap, which every node knows
ANNOUNCE_RTT = 2  # measured: a store takes two round trips to the furthest replica


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

    def changed(self, stage: int) -> None:
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

    def parts(self, labels: Collection[str]) -> list[list[str]]:
        """The nodes of `labels` that have met the bootstrap, by island."""
        parts: dict[int, list[str]] = {}
        for label, island in self.islands.items():
            if label in labels:
                parts.setdefault(island, []).append(label)
        return list(parts.values())

    def clear(self) -> None:
        """Drop all stored records."""
        self.stages.clear()
        self._found.clear()

    def found(self, stage: int, now: float, loop_now: float) -> list[record_pb2.SignedRecord]:
        """All records of `stage`, if none is hidden or forgotten. Cached while valid."""
        known = self._found.get(stage)
        if known is None or now >= known.until or loop_now >= known.then:
            before, known = known, self._all_found(stage, now, loop_now)
            self._found[stage] = known
            if before is not None:
                old = dict(zip(before.places, before.records, strict=True))
                new = dict(zip(known.places, known.records, strict=True))
                news = [record for peer, record in new.items() if old.get(peer) is not record]
                view_after(known.records, before.records, news, [peer for peer in old if peer not in new])
        elif known.announced:  # in a large stage, one of hundreds every second
            records = known.records.copy()
            for peer, record in known.announced.items():
                at = known.places.setdefault(peer, len(records))
                records[at : at + 1] = [record]
            view_after(records, known.records, known.announced.values())
            known.records, known.announced = records, {}
        return known.records

    def _all_found(self, stage: int, now: float, loop_now: float) -> _Found:
        entries, here = self.stages.get(stage, {}), _Found()
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
        self.changed(stage)
        return len(gone)


class SimDirectory:
    """ports.Directory of one node."""

    def __init__(self, dht: SimDht, plug: NetworkPort) -> None:
        self._dht = dht
        self._plug = plug
        self._contacts = Contacts()
        self._contacts.tell(MEETING_POINT, ["/ip4/10.0.0.1"])

    async def join(self) -> None:
        """Wait for the bootstrap, unless members are known from an earlier life (in its home's contacts)."""
        while self._plug.label not in self._dht.islands:
            if not self._dht.away:
                self._dht.meet(self._plug.label)
                break
            await asyncio.sleep(1.0)

    def _look_for_bootstrap(self) -> None:
        """Try a lost bootstrap when the node's own rule for lost contacts says so."""
        dht, me, now = self._dht, self._plug.label, self._dht.clock.unix_s()
        if not dht.away and dht.islands.get(me, 0) == dht.meeting:
            self._contacts.hear(MEETING_POINT, (), now)
        elif whom_to_try(self._contacts.known, (), now):
            self._contacts.tried(MEETING_POINT, not dht.away, now)
            if not dht.away:
                dht.meet(me)

    async def announce(self, record: record_pb2.SignedRecord) -> bool:
        dht, faults = self._dht, self._dht.faults
        own = check_record(record, run_id=dht.run_id)
        await asyncio.sleep(ANNOUNCE_RTT * faults.round_trip_s)
        self._look_for_bootstrap()
        now, loop_now = dht.clock.unix_s(), asyncio.get_running_loop().time()
        expires = own.expires_unix_ms / 1000.0
        if not self._plug.alive or dht.down or expires > now + TTL_MAX_S or expires <= now:
            return False
        for home in (self._plug.label, *(() if dht.away else (MEETING_POINT,))):
            dht.remembered[home] = max(dht.remembered.get(home, 0), own.progress.total)
        if dht.happens("record lost", faults.loses):
            return False
        peer = PeerId(own.peer_id)
        # A record under another stage's key stays there until it expires, as in the DHT.
        entry = dht.stages.setdefault(own.stage, {}).setdefault(peer, _Entry(self._plug))
        entry.plug = self._plug
        if entry.versions and entry.versions[-1][1] >= expires:
            return False
        late_s = dht.rng.expovariate(1.0 / faults.late_s) if faults.late_s else 0.0
        if late_s:
            dht.changed(own.stage)
        else:
            dht.announced(own.stage, peer, expires, record)
        entry.versions = [*entry.versions[-1:], (loop_now + late_s, expires, record)]
        return True

    async def lookup(self, stage: int) -> list[record_pb2.SignedRecord]:
        return (await self.lookups([stage]))[0]

    async def lookups(self, stages: Sequence[int]) -> list[list[record_pb2.SignedRecord]]:
        await asyncio.sleep(self._dht.faults.round_trip_s)
        return [self._found(stage) for stage in stages]

    async def claimed(self) -> int:
        """The samples that this home has heard of the run in all its lives, and the bootstrap's home likewise."""
        told, away = self._dht.remembered, self._dht.away
        return max(told.get(self._plug.label, 0), 0 if away else told.get(MEETING_POINT, 0))

    def _found(self, stage: int) -> list[record_pb2.SignedRecord]:
        dht, faults = self._dht, self._dht.faults
        if not self._plug.alive or dht.down or dht.happens("look-up failed", faults.fails):
            return []
        now, loop_now = dht.clock.unix_s(), asyncio.get_running_loop().time()
        apart = len(set(dht.islands.values())) > 1
        if not (apart or dht.network.reach.cuts or faults.missing or faults.stale):
            return dht.found(stage, now, loop_now)
        blocked = dht.network.reach.blocked if dht.network.reach.cuts else None
        found, expired = [], []
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

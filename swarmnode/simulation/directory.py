"""The directory of records as it behaves in the world: late, stale, forgetful, and cut in parts by partitions."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnode.ids import PeerId, RunId
from swarmnode.membership.record import check_record
from swarmnode.membership.view import view_after
from swarmnode.ports import Clock
from swarmnode.simulation.network import Network, Plug
from swarmnode.wire import record_pb2

TTL_MAX_S = 3600.0  # guess: no run of ours wants records to live longer
ANNOUNCE_RTT = 2  # measured: a store takes two round trips to the furthest replica (test-lab section 2)


@dataclass(frozen=True, slots=True)
class Habits:
    """How far from perfect it is."""

    round_trip_s: float = 0.1  # of a look-up; announcing takes ANNOUNCE_RTT of them
    late_s: float = 0.0  # mean of the exponential time until an announced record can be found
    stale: float = 0.0  # share of entries of which a look-up gives the version before
    missing: float = 0.0  # share of entries a look-up leaves out
    loses: float = 0.0  # share of announcements that nobody stores
    fails: float = 0.0  # share of look-ups that find nothing at all


@dataclass(slots=True)
class _Entry:
    """What is stored of one peer, newest last: (visible from, expires at, record)."""

    plug: Plug
    versions: list[tuple[float, float, record_pb2.SignedRecord]] = field(default_factory=list)


@dataclass(slots=True)
class _Found:
    """What a look-up of a stage gives until some wall and loop time, but for what was announced since."""

    until: float = math.inf
    then: float = math.inf
    records: list[record_pb2.SignedRecord] = field(default_factory=list)
    places: dict[PeerId, int] = field(default_factory=dict)
    announced: dict[PeerId, record_pb2.SignedRecord] = field(default_factory=dict)


class Shelf:
    """All that is stored, by stage. One for the whole world."""

    def __init__(self, network: Network, clock: Clock, run_id: RunId, rng: random.Random, habits: Habits) -> None:
        self.network = network
        self.clock = clock
        self.run_id = run_id
        self.rng = rng
        self.habits = habits
        self.down = False
        """The bootstraps are gone: nothing can be stored or found."""
        self.happened: Counter[str] = Counter()
        self.stages: dict[int, dict[PeerId, _Entry]] = {}
        self._found: dict[int, _Found] = {}

    def changed(self, stage: int) -> None:
        """What a look-up of `stage` finds is no longer what the last one found."""
        self._found.pop(stage, None)

    def announced(self, stage: int, peer: PeerId, expires: float, record: record_pb2.SignedRecord) -> None:
        """What a look-up of `stage` finds has changed by `record`, which can be found at once."""
        if (found := self._found.get(stage)) is not None:
            found.announced[peer] = record
            found.until = min(found.until, expires)

    def clear(self) -> None:
        """Nothing is stored any more."""
        self.stages.clear()
        self._found.clear()

    def found(self, stage: int, now: float, loop_now: float) -> list[record_pb2.SignedRecord]:
        """All that is there of `stage`, when nothing is hidden or forgotten; kept as long as it stays true."""
        known = self._found.get(stage)
        if known is None or now >= known.until or loop_now >= known.then:
            before, known = known, self._all_found(stage, now, loop_now)
            self._found[stage] = known
            if before is not None:
                old = dict(zip(before.places, before.records, strict=True))
                new = dict(zip(known.places, known.records, strict=True))
                news = [record for peer, record in new.items() if old.get(peer) is not record]
                view_after(known.records, before.records, news, [peer for peer in old if peer not in new])
        elif known.announced:  # of a large stage one of hundreds every second
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
        """Lose `share` of what is stored of `stage`; returns how many."""
        entries = self.stages.get(stage, {})
        gone = [peer for peer in sorted(entries) if self.rng.random() < share]
        for peer in gone:
            del entries[peer]
        self.changed(stage)
        return len(gone)


class SimDirectory:
    """ports.Directory of one node."""

    def __init__(self, shelf: Shelf, plug: Plug) -> None:
        self._shelf = shelf
        self._plug = plug

    async def announce(self, record: record_pb2.SignedRecord) -> bool:
        shelf, habits = self._shelf, self._shelf.habits
        own = check_record(record, run_id=shelf.run_id)
        await asyncio.sleep(ANNOUNCE_RTT * habits.round_trip_s)
        now, loop_now = shelf.clock.unix_s(), asyncio.get_running_loop().time()
        expires = own.expires_unix_ms / 1000.0
        if not self._plug.alive or shelf.down or expires > now + TTL_MAX_S or expires <= now:
            return False
        if shelf.happens("record lost", habits.loses):
            return False
        peer = PeerId(own.peer_id)
        # What it said under another stage's key stays there until it expires, as in the DHT.
        entry = shelf.stages.setdefault(own.stage, {}).setdefault(peer, _Entry(self._plug))
        entry.plug = self._plug
        if entry.versions and entry.versions[-1][1] >= expires:
            return False
        late_s = shelf.rng.expovariate(1.0 / habits.late_s) if habits.late_s else 0.0
        if late_s:
            shelf.changed(own.stage)
        else:
            shelf.announced(own.stage, peer, expires, record)
        entry.versions = [*entry.versions[-1:], (loop_now + late_s, expires, record)]
        return True

    async def lookup(self, stage: int) -> list[record_pb2.SignedRecord]:
        return (await self.lookups([stage]))[0]

    async def lookups(self, stages: Sequence[int]) -> list[list[record_pb2.SignedRecord]]:
        await asyncio.sleep(self._shelf.habits.round_trip_s)
        return [self._found(stage) for stage in stages]

    def _found(self, stage: int) -> list[record_pb2.SignedRecord]:
        shelf, habits = self._shelf, self._shelf.habits
        if not self._plug.alive or shelf.down or shelf.happens("look-up failed", habits.fails):
            return []
        now, loop_now = shelf.clock.unix_s(), asyncio.get_running_loop().time()
        if not (shelf.network.reach.cuts or habits.missing or habits.stale):
            return shelf.found(stage, now, loop_now)
        blocked = shelf.network.reach.blocked if shelf.network.reach.cuts else None
        found, expired = [], []
        entries = shelf.stages.get(stage, {})
        for peer, entry in entries.items():
            if blocked is not None and blocked(entry.plug.label, self._plug.label):
                continue
            if habits.missing and shelf.happens("record left out", habits.missing):
                continue
            versions = entry.versions
            if versions[-1][1] <= now:
                expired.append(peer)
                continue
            stale = habits.stale and len(versions) > 1 and shelf.happens("record stale", habits.stale)
            for visible_at, expires, record in versions if stale else reversed(versions):
                if visible_at <= loop_now and expires > now:
                    found.append(record)
                    break
        for peer in expired:
            del entries[peer]
        return found

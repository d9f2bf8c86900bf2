"""Records by calls alone: meeting points and members are asked, and no DHT is needed.

A node's record goes to the holders of its place: the meeting points, and the members whose digest comes first, which
all who know the same members choose alike (rendezvous hashing, Thaler and Ravishankar 1996). A look asks a holder, a
member and another holder for the records that are new here (RecordsRequest); a refresh asks one member, now and then a
holder instead: news spread among members as rumours do (Demers et al. 1987, "Epidemic algorithms"). All values are
verified SignedRecords. Crashed nodes delay nothing, frozen ones seconds. So every wait is bounded, and a timeout
returns less than was asked for instead of failing. net/transport/directory.py adds a DHT, which chooses the holders
instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from statistics import median_low
from typing import Any, Self

from swarmnode.base.errors import LocalFault, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId, digest64, machine_of, seeded, short
from swarmnode.base.ports import Announced, Answer, Call, Telemetry
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import call_pb2
from swarmnode.base.wire import record_pb2 as wire
from swarmnode.net.membership.liveness import AGAIN_S, SMALL_CALL_S
from swarmnode.net.membership.record import CLOCK_SKEW_MAX_S, check_record
from swarmnode.net.transport.address import dialable_of
from swarmnode.net.transport.contact import STALE_S, Contacts
from swarmnode.net.transport.contact_keeper import ContactKeeper
from swarmnode.net.transport.record_book import (
    FIRST_MAX,
    HOLDERS,
    HOLDERS_ASKED,
    NEWS_MAX,
    PLACE_MAX,
    RPC_TIMEOUT_S,
    RecordBook,
    mark_of,
)
from swarmnode.net.transport.stream_transport import StreamTransport
from swarmnode.run.admission.admission import Admission

TTL_MAX_S = 300.0  # DHT records cannot be deleted, so they must expire soon
JOIN_TIMEOUT_S = 30.0  # guess: covers a bootstrap started at the same time on a busy machine
TELLING = (wire.NODE_STATE_TRAINING, wire.NODE_STATE_DRAINING, wire.NODE_STATE_LEFT)
CLOCKS_MAX = 5  # neighbours compared at a time; derived: two wrong clocks do not move the median


def surely_ahead_s(theirs_s: float, asked_s: float, heard_s: float) -> float:
    """Seconds that a clock is at least ahead of ours (negative: behind) which showed `theirs_s` at a time between
    `asked_s` and `heard_s` of ours. 0: it may be right, as on a busy machine that took seconds to hear the answer."""
    return max(0.0, theirs_s - heard_s) + min(0.0, theirs_s - asked_s)


class RecordCalls:
    """Asks peers for records of one run, and knows which of them answer."""

    def __init__(self, transport: StreamTransport, run_id: RunId) -> None:
        self._transport = transport
        self._run_id = run_id
        self.own: wire.SignedRecord | None = None
        """This machine's last record, which goes with each call."""
        self._mute = Remembered[PeerId, float]()  # peers that do not answer RecordsRequest, until when
        self._reached = Remembered[PeerId, float]()  # peers that answered or asked us, and when

    def speaking(self, peers: Sequence[PeerId]) -> list[PeerId]:
        """The ones of `peers` that may answer a RecordsRequest, without this node."""
        now_s = asyncio.get_running_loop().time()
        mute = self._mute
        return [peer for peer in peers if peer != self._transport.peer_id and mute.get(peer, 0.0) <= now_s]

    async def ask(
        self, peer: PeerId, request: call_pb2.RecordsRequest, record: wire.SignedRecord | None = None
    ) -> call_pb2.Records | None:
        """The answer of `peer`, which gets our `record` (None: `own`); None if there is none."""
        call = Call(call_pb2.Request(run_id=self._run_id, record=record or self.own, records=request))
        try:
            answer = await self._transport.call(peer, call, timeout_s=RPC_TIMEOUT_S, reply_bytes_max=0)
        except (RemoteFault, Unavailable):
            # It may speak an older version.
            self._mute[peer] = asyncio.get_running_loop().time() + AGAIN_S
            self._reached.pop(peer, None)
            return None
        self.heard(peer)
        return answer.header.records

    async def store(self, peer: PeerId, stage: int, record: wire.SignedRecord) -> bool | None:
        """Whether `peer` keeps our `record` of `stage`; None if it did not answer."""
        if peer == self._transport.peer_id:
            return True
        answer = await self.ask(peer, call_pb2.RecordsRequest(place=stage, announces=True), record)
        return None if answer is None else answer.kept

    async def rivals(
        self, peers: Sequence[PeerId], own: wire.Record, record: wire.SignedRecord, had_ms: int
    ) -> list[wire.SignedRecord]:
        """Give our `record` to `peers`; the other records of its key that they had instead, but that which expires at
        `had_ms`."""
        marks = [mark_of(PeerId(own.peer_id))]
        request = call_pb2.RecordsRequest(place=own.stage, announces=True, peers=marks, expires_unix_ms=[had_ms])
        found = dict[bytes, wire.SignedRecord]()
        for answer in await asyncio.gather(*(self.ask(peer, request, record) for peer in peers)):
            for signed in [] if answer is None else answer.records[:1]:
                with contextlib.suppress(RemoteFault):
                    if check_record(signed, run_id=self._run_id).peer_id == own.peer_id:
                        found[signed.signature] = signed
        return [*found.values()]

    async def clock_ahead(self, peer: PeerId, unix_s: Callable[[], float]) -> float | None:
        """Seconds that the clock of `peer` is ahead of ours, `unix_s`; None if it does not answer."""
        begun = unix_s()
        answer = await self.ask(peer, call_pb2.RecordsRequest(announces=True))
        if answer is None or not answer.unix_ms:
            return None
        return surely_ahead_s(answer.unix_ms / 1000.0, begun, unix_s())

    def heard(self, peer: PeerId) -> None:
        """`peer` answered, or asked this node."""
        self._reached[peer] = asyncio.get_running_loop().time()

    def here(self) -> set[PeerId]:
        """Peers that are in touch."""
        oldest = asyncio.get_running_loop().time() - STALE_S
        return {peer for peer, at in self._reached.items() if at > oldest}

    def latest(self, count: int) -> list[PeerId]:
        """The peers reached last."""
        return list(reversed(self._reached))[:count]

    def forget_silence(self, peer: PeerId | None = None) -> None:
        """Ask `peer`, or all, like others again."""
        if peer is None:
            self._mute.clear()
        else:
            self._mute.pop(peer, None)


class CallDirectory:
    """Implements ports.Directory. `create` joins the others, `close` leaves them. The transport stays open."""

    faults: tuple[type[Exception], ...] = (OSError, Unavailable, RemoteFault)  # of asking; a timeout is an OSError

    def __init__(
        self,
        transport: StreamTransport,
        bootstrap: Sequence[tuple[PeerId, Sequence[str]]],
        run_id: RunId,
        stages: int,
        ttl_max_s: float,
        admission: Admission | None,
        telemetry: Telemetry | None,
        contacts: Contacts,
        unix_s: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._bootstrap = [(peer, addresses) for peer, addresses in bootstrap if peer != transport.peer_id]
        self.contacts = contacts
        self._run_id = run_id
        self._book = RecordBook(run_id, stages, ttl_max_s, admission, self._record_taken)
        self._unix_s = unix_s
        self.prefer(lambda peer: False, lambda: False)
        self._totals = Remembered[PeerId, int]()  # samples of the run by each peer's record
        self._calls = RecordCalls(transport, run_id)
        self._telemetry = telemetry
        self.keeper = ContactKeeper(transport, self._bootstrap, contacts, self, unix_s, self._event)
        self._keeping: asyncio.Task[None] | None = None
        self._chance = seeded(run_id, "clocks", transport.peer_id)

    @classmethod
    async def create(
        cls,
        transport: StreamTransport,
        bootstrap: Sequence[tuple[PeerId, Sequence[str]]],
        run_id: RunId,
        stages: int,
        *,
        unix_s: Callable[[], float],
        ttl_max_s: float = TTL_MAX_S,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        admission: Admission | None = None,
        telemetry: Telemetry | None = None,
        contacts: Contacts | None = None,
    ) -> Self:
        """A directory that joined through one of `bootstrap`, or waits for others if that is empty.

        `contacts` are peers from earlier runs. They are asked beside the bootstraps, and again whenever they are lost.

        Starts the transport: from now on others may learn this node's address. Raises Unreachable if no bootstrap
        answers within `join_timeout_s`, LocalFault if this machine's clock is wrong.
        """
        contacts = Contacts() if contacts is None else contacts
        directory = cls(transport, bootstrap, run_id, stages, ttl_max_s, admission, telemetry, contacts, unix_s)
        await directory._prepare()
        transport.start()
        transport.serve("records", directory._answer, tensor_bytes_max=0)
        try:
            await directory.keeper.join(join_timeout_s)
        except BaseException:
            transport.withdraw("records")
            await directory.close()
            raise
        directory._keeping = transport.spawn(directory.keeper.keep_joined())
        transport.after_restart.append(directory.keeper.rejoin)
        return directory

    async def _prepare(self) -> None:
        """Work before the start of the transport: none here."""

    def _record_taken(self, record: wire.Record) -> None:
        """A record came into the book: its peer is reachable, a contact, and a witness of the run's progress."""
        peer = PeerId(record.peer_id)
        if (machine := machine_of(peer)) == self._transport.peer_id:
            return
        usable = dialable_of(record.addresses)
        self._transport.remember(machine, usable)
        self.contacts.hear(machine, usable, self._unix_s())
        if record.state in TELLING:
            self._totals[peer] = record.progress.total
            self.contacts.trained(self._run_id, median_low(self._totals.values()))

    def prefer(self, works: Callable[[PeerId], bool], doubtful: Callable[[], bool]) -> None:
        """Know records of peers for which `works` is true beside a flood of others; show few of these while strangers
        are `doubtful`."""
        me = self._transport.peer_id
        self._book.prefer(lambda peer: machine_of(peer) == me or works(peer), doubtful)

    async def close(self) -> None:
        """Look for nobody any more."""
        if self._keeping is not None:
            self._keeping.cancel()
            self._transport.after_restart.remove(self.keeper.rejoin)
            self._keeping = None

    # The port.

    async def announce(self, record: wire.SignedRecord) -> Announced:
        """Publish our record, or one of a part of this machine, until its expiry, which must be later than the previous
        one's. Not stored if no peer did so within SMALL_CALL_S."""
        own = check_record(record, run_id=self._run_id)
        if own.peer_id == self._transport.peer_id:
            self._calls.own = record
        stored = list[bool | None]()
        before = self._book.standing(record)
        others = [] if before is None or before.signed == record else [before.signed]
        if not self._book.take(own.stage, record, self._unix_s()):
            return Announced(False, others)
        try:
            async with asyncio.timeout(SMALL_CALL_S):
                holders = await self._holders(own.stage)
                speaking = self._calls.speaking(holders)
                asked = self._chance.sample(speaking, min(HOLDERS_ASKED, len(speaking)))
                had_ms = 0 if before is None else before.expires_unix_ms
                others += await self._calls.rivals(asked, own, record, had_ms)
                stored = await asyncio.gather(*(self._store_at(peer, own, record) for peer in holders))
        except self.faults:
            pass
        if None in stored or not stored:
            self._forget(own.stage)
        if not any(stored):
            self._event("directory.failed", "warning", reason="nobody stored our record", stage=own.stage)
        return Announced(any(stored), others)

    async def _store_at(self, peer: PeerId, own: wire.Record, record: wire.SignedRecord) -> bool | None:
        """Whether `peer` keeps our `record`, which says `own`; None if it did not answer."""
        return await self._calls.store(peer, own.stage, record)

    async def lookup(self, stage: int) -> list[wire.SignedRecord]:
        """Verified, unexpired records of `stage`, sorted by peer: those found within SMALL_CALL_S, perhaps none."""
        return await self._read(stage, self._look)

    async def lookups(self, stages: Sequence[int]) -> list[list[wire.SignedRecord]]:
        return await asyncio.gather(*map(self.lookup, stages))

    async def refresh(self, stages: Sequence[int]) -> list[list[wire.SignedRecord]]:
        return await asyncio.gather(*(self._read(stage, self._ask_one) for stage in stages))

    async def _read(self, place: int, ask: Callable[[int], Coroutine[Any, Any, None]]) -> list[wire.SignedRecord]:
        try:
            async with asyncio.timeout(SMALL_CALL_S):
                await ask(place)
        except self.faults:
            self._event("directory.failed", "warning", reason="nobody answers a look-up", stage=place)
        known = self._book.known(place, self._unix_s())
        return [known[peer].signed for peer in sorted(known)]

    async def _look(self, place: int) -> None:
        """Learn what a member and HOLDERS_ASKED holders know. Holders have all newcomers, so the first of them tells a
        few members, one of these most of what it knows, and the last holder what that one lacks."""
        holders = self._calls.speaking(await self._holders(place))
        chosen = self._chance.sample(holders, min(HOLDERS_ASKED, len(holders)))
        heard = [await self._learn(peer, place, FIRST_MAX) for peer in chosen[:-1]]
        members = [peer for peer in self._members(place) if peer not in chosen]
        for peer in (*self._chance.sample(members, min(1, len(members))), *chosen[-1:]):
            heard.append(await self._learn(peer, place))
        if not any(heard):
            self._forget(place)
            await self._search(place)

    async def _ask_one(self, place: int) -> None:
        """Learn what one member knows, or with the chance of one of HOLDERS among the members a holder."""
        members = self._members(place)
        if self._chance.random() * len(members) < HOLDERS:
            members = self._calls.speaking(await self._holders(place))
        if not members or not await self._learn(self._chance.choice(members), place):
            await self._look(place)

    def _members(self, place: int) -> list[PeerId]:
        """The machines that are known at `place`."""
        return self._calls.speaking(sorted({machine_of(peer) for peer in self._book.known(place, self._unix_s())}))

    async def _learn(self, peer: PeerId, place: int, most: int = PLACE_MAX) -> bool:
        """Take at most `most` records of `place` that `peer` has and this node lacks; whether it answered."""
        for _ in range(-(-most // NEWS_MAX)):
            request = self._book.request(place, min(most, NEWS_MAX), self._unix_s())
            if (answer := await self._calls.ask(peer, request)) is None:
                return False
            news = answer.records
            taken = self._book.take_all(place, news, self._unix_s())
            if len(news) < NEWS_MAX or not taken:
                break
        return True

    async def _answer(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "records"."""
        records = self._book.answer(peer, call.header.record, call.header.records, self._unix_s(), self._chance)
        self._calls.heard(peer)
        return Answer(call_pb2.Reply(records=records))

    async def _holders(self, place: int) -> list[PeerId]:
        """The meeting points and members that keep the records of `place`; this node, if it knows nobody."""
        points = [peer for peer, _ in self._bootstrap]
        members = sorted(self._members(place), key=lambda peer: digest64("holder", place, peer))
        return list(dict.fromkeys([*self._calls.speaking(points), *members]))[:HOLDERS] or [self._transport.peer_id]

    def _forget(self, place: int) -> None:
        """Nobody of the holders of `place` answered."""

    async def _search(self, place: int) -> None:
        """Ask whoever else may have the records of `place`."""
        near = self._calls.speaking([peer for peer in self.here() if peer not in self._members(place)])
        for peer in self._chance.sample(near, min(1, len(near))):
            await self._learn(peer, place)

    async def claimed(self) -> int:
        return await self.keeper.claimed(self._run_id)

    async def clocks_ahead(self) -> list[float]:
        """Seconds that some neighbours' clocks are ahead of ours, of those that answer."""
        near = sorted(self.here())
        chosen = self._chance.sample(near, min(CLOCKS_MAX, len(near)))
        answers = await asyncio.gather(*map(self._clock_ahead, chosen))
        return [ahead_s for ahead_s in answers if ahead_s is not None]

    async def _clock_ahead(self, peer: PeerId) -> float | None:
        """Seconds that the clock of `peer` is ahead of ours; None if it does not answer."""
        return await self._calls.clock_ahead(peer, self._unix_s)

    # Neighbours, for the keeper of contacts.

    @property
    def records(self) -> int:
        return len(self._book)

    def here(self) -> set[PeerId]:
        return self._calls.here()

    async def greet(self, peer: PeerId) -> bool:
        ahead_s = await self._clock_ahead(peer)
        if ahead_s is not None and abs(ahead_s) > CLOCK_SKEW_MAX_S:
            raise LocalFault(
                f"this machine's clock or {short(peer)}'s is off: they differ by {ahead_s:.1f} s; set it by NTP"
            )
        return ahead_s is not None

    def answered(self, peer: PeerId) -> None:
        self._calls.forget_silence(peer)

    def forget_silence(self) -> None:
        self._calls.forget_silence()

    async def look_around(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SMALL_CALL_S):
                for peer in self._calls.latest(HOLDERS_ASKED):
                    for place in range(self._book.places):
                        await self._learn(peer, place)

    def _event(self, event: str, level: str, **fields: object) -> None:
        if self._telemetry is not None:
            self._telemetry.event(event, level=level, **fields)

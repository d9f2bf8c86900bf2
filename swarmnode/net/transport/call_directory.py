"""Records by calls alone: meeting points and members are asked, and no DHT is needed.

A node's record goes to the holders of its place: the meeting points, and the members whose digest comes first, which
all who know the same members choose alike (rendezvous hashing, Thaler and Ravishankar 1996). A look asks two holders
and a member for the records that are new here (RecordsRequest); a refresh asks one member, now and then a holder
instead: news spread among members as rumours do (Demers et al. 1987, "Epidemic algorithms"). All values are verified
SignedRecords. Crashed nodes delay nothing, frozen ones seconds. So every wait is bounded, and a timeout returns less
than was asked for instead of failing. net/transport/directory.py adds a DHT, which chooses the holders instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Sequence
from statistics import median_low
from typing import Any, Self

from swarmnode.base.errors import LocalFault, RemoteFault, Unavailable, Unreachable
from swarmnode.base.ids import PeerId, RunId, digest64, machine_of, seeded, short
from swarmnode.base.ports import Announced, Answer, Call, Telemetry
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import call_pb2
from swarmnode.base.wire import record_pb2 as wire
from swarmnode.net.membership.liveness import AGAIN_S, SAMPLE, SMALL_CALL_S
from swarmnode.net.membership.record import CLOCK_SKEW_MAX_S, check_record
from swarmnode.net.transport.address import dialable_of
from swarmnode.net.transport.contact import RETRY_FIXED_S, RETRY_MIN_S, STALE_S, Contact, Contacts, whom_to_try
from swarmnode.net.transport.path_check import knock
from swarmnode.net.transport.record_book import (
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
JOIN_DELAY_S = 0.3
TOLD_EVERY = round(AGAIN_S / RETRY_FIXED_S)  # failures with a bootstrap for one event: derived, an event a minute
POINT_CHECK_S = 9.0  # guess: with two tries a meeting point that is away is told within half a minute
POINT_CHECK_MAX_S = 60.0  # guess: strangers' records put the next check off until then at most
POINT_CHECKS_PER_S = 20.0  # guess: at a meeting point, of all members together
TELLING = (wire.NODE_STATE_TRAINING, wire.NODE_STATE_DRAINING, wire.NODE_STATE_LEFT)
CLOCKS_MAX = 5  # neighbours compared at a time; derived: two wrong clocks do not move the median


def point_check_s(records: int) -> float:
    """Seconds between two looks of a node with so many `records` whether its meeting points still answer: members
    together ask a meeting point POINT_CHECKS_PER_S times a second, up to 1,200 of them."""
    return min(POINT_CHECK_MAX_S, max(POINT_CHECK_S, records / POINT_CHECKS_PER_S))


def surely_ahead_s(theirs_s: float, asked_s: float, heard_s: float) -> float:
    """Seconds that a clock is at least ahead of ours (negative: behind) which showed `theirs_s` at a time between
    `asked_s` and `heard_s` of ours. 0: it may be right, as on a busy machine that took seconds to hear the answer."""
    return max(0.0, theirs_s - heard_s) + min(0.0, theirs_s - asked_s)


async def claimed_by(transport: StreamTransport, peer: PeerId) -> int | None:
    """Samples that the run has trained as `peer` knows; None if it does not answer."""
    try:
        ping = Call(call_pb2.Request(ping=call_pb2.Ping()))
        answer = await transport.call(peer, ping, timeout_s=RPC_TIMEOUT_S, reply_bytes_max=0)
    except (RemoteFault, Unavailable):
        return None
    return answer.header.pong.samples


class CallDirectory:
    """Implements ports.Directory. `create` joins the others, `close` leaves them. The transport stays open."""

    _faults: tuple[type[Exception], ...] = (OSError, Unavailable, RemoteFault)  # of asking; a timeout is an OSError

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
        for peer, addresses in self._bootstrap:
            contacts.tell(peer, addresses)
        self._run_id = run_id
        self._book = RecordBook(run_id, stages, ttl_max_s, admission, self._record_taken)
        self._unix_s = unix_s
        self.prefer(lambda peer: False, lambda: False)
        self._own: wire.SignedRecord | None = None  # our last record
        self._totals = Remembered[PeerId, int]()  # samples of the run by each peer's record
        self._mute = Remembered[PeerId, float]()  # peers that do not answer RecordsRequest, until when
        self._reached = Remembered[PeerId, float]()  # peers that answered or asked us, and when
        self._away = set[PeerId]()  # meeting points that were told to be away
        self._telemetry = telemetry
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
            await directory._join(join_timeout_s)
        except BaseException:
            transport.withdraw("records")
            await directory.close()
            raise
        directory._keeping = transport.spawn(directory._keep_joined())
        transport.after_restart.append(directory._rejoin)
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
            self._transport.after_restart.remove(self._rejoin)
            self._keeping = None

    # The port.

    async def announce(self, record: wire.SignedRecord) -> Announced:
        """Publish our record, or one of a part of this machine, until its expiry, which must be later than the previous
        one's. Not stored if no peer did so within SMALL_CALL_S."""
        own = check_record(record, run_id=self._run_id)
        if own.peer_id == self._transport.peer_id:
            self._own = record
        stored = list[bool | None]()
        before = self._book.standing(record)
        others = [] if before is None or before.signed == record else [before.signed]
        if not self._book.take(own.stage, record, self._unix_s()):
            return Announced(False, others)
        try:
            async with asyncio.timeout(SMALL_CALL_S):
                holders = await self._holders(own.stage)
                others += await self._others(holders, own, record, 0 if before is None else before.expires_unix_ms)
                stored = await asyncio.gather(*(self._store_at(peer, own, record) for peer in holders))
        except self._faults:
            pass
        if None in stored or not stored:
            self._forget(own.stage)
        if not any(stored):
            self._event("directory.failed", "warning", reason="nobody stored our record", stage=own.stage)
        return Announced(any(stored), others)

    async def _others(
        self, holders: Sequence[PeerId], own: wire.Record, record: wire.SignedRecord, had_ms: int
    ) -> list[wire.SignedRecord]:
        """Give our `record` to HOLDERS_ASKED of `holders`; the other records of its key that they had instead, but that
        which expires at `had_ms`."""
        speaking = self._speaking(holders)
        marks = [mark_of(PeerId(own.peer_id))]
        request = call_pb2.RecordsRequest(place=own.stage, announces=True, peers=marks, expires_unix_ms=[had_ms])
        asked = self._chance.sample(speaking, min(HOLDERS_ASKED, len(speaking)))
        found = dict[bytes, wire.SignedRecord]()
        for answer in await asyncio.gather(*(self._ask(peer, request, record) for peer in asked)):
            for signed in [] if answer is None else answer.records[:1]:
                with contextlib.suppress(RemoteFault):
                    if check_record(signed, run_id=self._run_id).peer_id == own.peer_id:
                        found[signed.signature] = signed
        return [*found.values()]

    async def _store_at(self, peer: PeerId, own: wire.Record, record: wire.SignedRecord) -> bool | None:
        """Whether `peer` keeps our record; None if it did not answer."""
        if peer == self._transport.peer_id:
            return True
        answer = await self._ask(peer, call_pb2.RecordsRequest(place=own.stage, announces=True), record)
        return None if answer is None else answer.kept

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
        except self._faults:
            self._event("directory.failed", "warning", reason="nobody answers a look-up", stage=place)
        known = self._book.known(place, self._unix_s())
        return [known[peer].signed for peer in sorted(known)]

    async def _look(self, place: int) -> None:
        """Learn what HOLDERS_ASKED holders and a member know."""
        holders = self._speaking(await self._holders(place))
        chosen = self._chance.sample(holders, min(HOLDERS_ASKED, len(holders)))
        members = [peer for peer in self._members(place) if peer not in chosen]
        chosen += self._chance.sample(members, min(1, len(members)))
        if not any(await asyncio.gather(*(self._learn(peer, place) for peer in chosen))):
            self._forget(place)
            await self._search(place)

    async def _ask_one(self, place: int) -> None:
        """Learn what one member knows, or with the chance of one of HOLDERS among the members a holder."""
        members = self._members(place)
        if self._chance.random() * len(members) < HOLDERS:
            members = self._speaking(await self._holders(place))
        if not members or not await self._learn(self._chance.choice(members), place):
            await self._look(place)

    def _members(self, place: int) -> list[PeerId]:
        """The machines that are known at `place`."""
        return self._speaking(sorted({machine_of(peer) for peer in self._book.known(place, self._unix_s())}))

    def _speaking(self, peers: Sequence[PeerId]) -> list[PeerId]:
        """The ones of `peers` that may answer a RecordsRequest, without this node."""
        now_s = asyncio.get_running_loop().time()
        mute = self._mute
        return [peer for peer in peers if peer != self._transport.peer_id and mute.get(peer, 0.0) <= now_s]

    async def _ask(
        self, peer: PeerId, request: call_pb2.RecordsRequest, record: wire.SignedRecord | None = None
    ) -> call_pb2.Records | None:
        """The answer of `peer`, which gets our `record` (None: this machine's own); None if there is none."""
        loop = asyncio.get_running_loop()
        call = Call(call_pb2.Request(run_id=self._run_id, record=record or self._own, records=request))
        try:
            answer = await self._transport.call(peer, call, timeout_s=RPC_TIMEOUT_S, reply_bytes_max=0)
        except (RemoteFault, Unavailable):
            self._mute[peer] = loop.time() + AGAIN_S  # it may speak an older version
            self._reached.pop(peer, None)
            return None
        self._reached[peer] = loop.time()
        return answer.header.records

    async def _learn(self, peer: PeerId, place: int) -> bool:
        """Take the records of `place` that `peer` has and this node lacks; whether it answered."""
        for _ in range(PLACE_MAX // NEWS_MAX):
            known = self._book.known(place, self._unix_s()).values()
            request = call_pb2.RecordsRequest(
                place=place,
                peers=[one.mark for one in known],
                expires_unix_ms=[one.expires_unix_ms for one in known],
            )
            if (answer := await self._ask(peer, request)) is None:
                return False
            news = answer.records
            taken = self._book.take_all(place, news, self._unix_s())
            if len(news) < NEWS_MAX or not taken:
                break
        return True

    async def _answer(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "records"."""
        request = call.header.records
        now_s = self._unix_s()
        record = call.header.record
        if request.place >= self._book.places or len(request.peers) != len(request.expires_unix_ms):
            raise RemoteFault(f"records of place {request.place}, of {len(request.peers)} peers")
        before = self._book.standing(record)
        kept = self._book.take(None, record, now_s, of=peer)
        self._reached[peer] = asyncio.get_running_loop().time()
        reply = call_pb2.Records(kept=kept, unix_ms=round(now_s * 1000))
        had = dict(zip(request.peers, request.expires_unix_ms, strict=True))
        if request.announces:
            if before is not None and before.signed != record and before.expires_unix_ms != had.get(before.mark):
                reply.records.append(before.signed)
        else:
            reply.records.extend(self._book.news(request.place, had, now_s))
        return Answer(call_pb2.Reply(records=reply))

    async def _holders(self, place: int) -> list[PeerId]:
        """The meeting points and members that keep the records of `place`; this node, if it knows nobody."""
        points = [peer for peer, _ in self._bootstrap]
        members = sorted(self._members(place), key=lambda peer: digest64("holder", place, peer))
        return list(dict.fromkeys([*self._speaking(points), *members]))[:HOLDERS] or [self._transport.peer_id]

    def _forget(self, place: int) -> None:
        """Nobody of the holders of `place` answered."""

    async def _search(self, place: int) -> None:
        """Ask whoever else may have the records of `place`."""
        near = self._speaking([peer for peer in self._here() if peer not in self._members(place)])
        for peer in self._chance.sample(near, min(1, len(near))):
            await self._learn(peer, place)

    async def claimed(self) -> int:
        peers = dict.fromkeys([*(peer for peer, _ in self._bootstrap), *(p for p, _ in self.contacts.latest(SAMPLE))])
        totals = await asyncio.gather(*(claimed_by(self._transport, peer) for peer in peers))
        answers = [total for total in totals if total is not None]
        own = self.contacts.samples.get(self._run_id, 0)
        if peers and not answers and not own:
            raise Unavailable(f"none of the {len(peers)} machines known to this one answers")
        return max(own, *answers, 0)

    async def clocks_ahead(self) -> list[float]:
        """Seconds that some neighbours' clocks are ahead of ours, of those that answer."""
        near = sorted(self._here())
        chosen = self._chance.sample(near, min(CLOCKS_MAX, len(near)))
        answers = await asyncio.gather(*map(self._clock_ahead, chosen))
        return [ahead_s for ahead_s in answers if ahead_s is not None]

    async def _clock_ahead(self, peer: PeerId) -> float | None:
        begun = self._unix_s()
        answer = await self._ask(peer, call_pb2.RecordsRequest(announces=True))
        if answer is None or not answer.unix_ms:
            return None
        return surely_ahead_s(answer.unix_ms / 1000.0, begun, self._unix_s())

    # Membership.

    async def _join(self, timeout_s: float) -> None:
        if not self._bootstrap:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SMALL_CALL_S):  # then `_keep_joined` goes on
                    await self._ask_bootstraps({})
            return
        reasons: dict[PeerId, str] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if await self._ask_bootstraps(reasons):
                        return
                    await asyncio.sleep(JOIN_DELAY_S)
        except TimeoutError:
            tried = "; ".join(f"{peer} at {', '.join(addresses)}" for peer, addresses in self._bootstrap)
            why = next(iter(reasons.values()), "no answer")
            raise Unreachable(
                f"no meeting point answers within {timeout_s:.0f} s (tried {tried}; last: {why}): "
                "is one running there, and does its firewall let the port in?"
            ) from None

    async def _ask_bootstraps(self, reasons: dict[PeerId, str]) -> bool:
        """Contact bootstraps and former peers at once, and our neighbours through those that answer."""
        for peer, _ in self._bootstrap:  # they are due whatever was tried before
            self.contacts.known[peer].retry()
        met = await self._try_lost(reasons, here=set())  # who greeted us meanwhile is asked, too
        if met:
            await self._look_around()
        return met

    async def _look_around(self) -> None:
        """Learn what those that were reached last know: a part of the swarm that nobody here had heard of."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SMALL_CALL_S):
                for peer in list(reversed(self._reached))[:HOLDERS_ASKED]:
                    for place in range(self._book.places):
                        await self._learn(peer, place)

    async def _try_lost(self, reasons: dict[PeerId, str], here: Collection[PeerId]) -> bool:
        """Dial contacts that are not `here`; return whether one answered."""
        now = self._unix_s()
        lost = whom_to_try(self.contacts.known, here, now)
        met = await asyncio.gather(*(self._meet(peer, self.contacts.known[peer], reasons) for peer in lost))
        for peer, answered in zip(lost, met, strict=True):
            self.contacts.record_try(peer, answered, now)
            if answered:
                self._mute.pop(peer, None)
            if answered and here:
                self._event("directory.merged", "info", peer=short(peer), here=len(here))
        return any(met)

    def _here(self) -> set[PeerId]:
        """Peers that are in touch."""
        oldest = asyncio.get_running_loop().time() - STALE_S
        return {peer for peer, at in self._reached.items() if at > oldest}

    async def _greet(self, peer: PeerId) -> bool:
        """Whether `peer` answers. Raises LocalFault if our clocks differ too much."""
        ahead_s = await self._clock_ahead(peer)
        if ahead_s is not None and abs(ahead_s) > CLOCK_SKEW_MAX_S:
            raise LocalFault(
                f"this machine's clock or {short(peer)}'s is off: they differ by {ahead_s:.1f} s; set it by NTP"
            )
        return ahead_s is not None

    async def _meet(self, peer: PeerId, contact: Contact, reasons: dict[PeerId, str]) -> bool:
        # The contact may be forgotten by now.
        addresses = contact.addresses
        fixed = contact.fixed
        tries = contact.failures
        try:
            async with asyncio.timeout(None if fixed else SMALL_CALL_S):
                if fixed:
                    where, why = await knock(addresses)
                    if not where:
                        raise Unavailable(why)
                await self._transport.connect(peer, addresses)
                met = await self._greet(peer)
        except TimeoutError:
            met = False
            reasons[peer] = f"no answer within {SMALL_CALL_S:.0f} s"
        except self._faults as error:
            met = False
            why = str(error)
            reasons[peer] = reasons.get(peer, why) if "dial backoff" in why else why
        doubtful = not tries and peer not in reasons  # a busy machine, perhaps: it is asked once more
        told = peer in self._away and tries % TOLD_EVERY != 0
        if met or not (doubtful or told):
            self._tell_point(peer, met, reasons.get(peer, "no answer"))
        return met

    def _tell_point(self, peer: PeerId, met: bool, why: str = "") -> None:
        """Log whether `peer` answers, if it is a meeting point."""
        if all(peer != point for point, _ in self._bootstrap):
            return
        if met:
            self._away.discard(peer)
            self._event("bootstrap.connected", "info", peer=short(peer))
        else:
            self._away.add(peer)
            self._event("bootstrap.unreachable", "warning", peer=short(peer), why=why)

    async def _ask_points(self) -> None:
        """Ask the meeting points that were in touch whether they still are: `_try_lost` tries the others again."""
        here = self._here()
        with contextlib.suppress(*self._faults, LocalFault):  # a wrong clock: the node reports it at its next start
            await asyncio.gather(*(self._greet(peer) for peer, _ in self._bootstrap if peer in here))

    async def _keep_joined(self) -> None:
        """Look for lost contacts: a partition may have healed, p2pd or all nodes restarted, or a swarm split in two."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        while True:
            if loop.time() >= asked_s + point_check_s(len(self._book)):
                asked_s = loop.time()
                await self._ask_points()
            if not self._here():
                await self._rejoin()
            elif await self._try_lost({}, self._here()):
                await self._look_around()
            for peer in self._away & self._here():  # it called first
                self._tell_point(peer, True)
            await asyncio.sleep(RETRY_MIN_S)

    async def _rejoin(self) -> None:
        """Ask the bootstraps again."""
        self._mute.clear()
        with contextlib.suppress(LocalFault):  # a wrong clock: the node reports it at its next start
            await self._ask_bootstraps({})

    def _event(self, event: str, level: str, **fields: object) -> None:
        if self._telemetry is not None:
            self._telemetry.event(event, level=level, **fields)

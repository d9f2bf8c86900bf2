"""Download a state from other replicas: a joiner pulls hashed chunks and turns elsewhere when a donor dies or lies.

A download that takes long uses several donors, side by side and one after the other. Each gives chunks of a snapshot of
its own, and the chunks of a donor that died are kept. Replicas differ by what they learnt since they met. A state mixed
of two replicas, one of them up to 8 rounds old, was at once never worse than the older one, and mostly halfway between;
ten steps later it was worse by 0.03 nats at most (measured: demo's model, rounds of ten steps, one seed;
docs/measurements/simulated-swarms.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from swarmnode.base.concurrency import gather_or_cancel
from swarmnode.base.errors import Busy, PeerTimeout, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId, digest64, rank, short, stage_name
from swarmnode.base.large_buffer import large_buffer
from swarmnode.base.metrics import name
from swarmnode.base.ports import Call, State, Telemetry, Transport
from swarmnode.base.uplink_scheduler import SLOWEST_BYTES_PER_S
from swarmnode.base.wire import access_pb2
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.transfer.snapshot import (
    CHUNK_NBYTES,
    CHUNKS_AT_ONCE,
    WHOLE,
    StateSlice,
    assemble,
    check_chunk,
    check_offer,
    chunk_span,
    mixed,
)
from swarmnode.model.section import Sizes
from swarmnode.net.membership.liveness import patiently

PAUSE_S = 0.5  # guess: before a peer is asked again; doubles
PAUSE_MAX_S = 8.0  # guess


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """Bounds of one download. All are guesses, for chunks of 1 MiB over a volunteer's link."""

    attempts_max: int = 8  # attempts in a row that bring less than `fruitful`
    pulls_max: int = 100  # attempts of any kind
    fruitful: float = 0.05  # share of the chunks that makes an attempt worth another
    failures_max: int = 3  # fruitless attempts at one donor; one that lied is not asked again at all
    chunk_retries_max: int = 2  # times one chunk is asked for again before the attempt has failed
    busy_max_s: float = 4 * 3600.0  # waited for donors that all give to others now: gigabytes over a home's line
    waited_for: bool = True  # this node cannot work without the state; else donors may put others first
    parallel: int = CHUNKS_AT_ONCE  # chunks requested at once from the first donor
    beside: int = 2  # chunks requested at once from each other donor
    sources: int = 4  # donors used side by side: a home's uplink is a quarter of another home's downlink
    alone_s: float = 60.0  # other donors are asked only when the first one needs longer
    silent_s: float = 30.0  # other donors are asked when the first one sends nothing for so long
    rest: float = 0.0  # seconds of rest after a chunk for each second it took: 1.0 leaves half of the donor's uplink
    offer_timeout_s: float = 60.0  # the donor copies and hashes its state in this time
    chunk_timeout_s: float = CHUNK_NBYTES / SLOWEST_BYTES_PER_S  # for each MiB
    patience_s: float = 2.0  # of either request; then the donor is pinged
    pause_s: float = PAUSE_S  # before the first repetition; doubles up to pause_max_s
    pause_max_s: float = PAUSE_MAX_S
    nbytes_max: int = 1 << 36


class DonorLied(RemoteFault):
    """A donor sent what contradicts its own announcement, or what is expected of any."""


def pause_s(attempt: int, first_s: float, most_s: float) -> float:
    """Seconds to wait before another `attempt`: `first_s`, then twice as long each time, at most `most_s`."""
    return float(min(most_s, first_s * 2.0 ** min(16, max(0, attempt - 1))))


@dataclass(slots=True)
class GiverRecord:
    """The results so far of asking one giver of chunks, a peer or a web location."""

    failures: int = 0
    tried: int = 0
    later_s: float = 0.0  # loop time before which it is not asked again; inf: it lied, or refuses for good
    used: bool = False  # now, for one download

    def busy(self, retry_after_s: float) -> None:
        """It gives to others now, or failed a moment ago."""
        self.later_s = asyncio.get_running_loop().time() + retry_after_s

    def record_failure(self, first_s: float, most_s: float) -> None:
        """It is asked again after a pause that doubles with each failure."""
        self.failures += 1
        self.busy(pause_s(self.failures, first_s, most_s))

    def exclude(self) -> None:
        """Never ask it again."""
        self.later_s = math.inf


class Donors:
    """The donors of one download. `known` is called again each time; best first."""

    def __init__(self, known: Callable[[], Sequence[PeerId]], me: PeerId, failures_max: int) -> None:
        self._known = known
        self._me = me
        self._failures_max = failures_max
        self._salt = digest64("beside", me)
        self._givers = defaultdict[PeerId, GiverRecord](GiverRecord)
        self.able: Sequence[PeerId] = ()
        """Donors that may still be asked, as of the last `next`."""

    def __getitem__(self, donor: PeerId) -> GiverRecord:
        return self._givers[donor]

    def next(self, first: Collection[PeerId] = (), *, by_lot: bool = False) -> PeerId | None:
        """A donor that is neither in use nor busy with others; None when there is none now.

        Donors of `first` come first, then those that failed and were tried least, then the best. With `by_lot` the last
        choice is random: joiners that each use several donors should not all meet at the best ones.
        """
        now_s = asyncio.get_running_loop().time()
        of = self._givers
        able = [peer for peer in self._known() if peer != self._me and of[peer].failures < self._failures_max]
        self.able = [peer for peer in able if of[peer].later_s < math.inf]
        free = [peer for peer in self.able if not of[peer].used and of[peer].later_s <= now_s]
        lot = {peer: rank(peer, self._salt) for peer in free} if by_lot else {}
        return min(free, key=lambda p: (p not in first, of[p].failures, of[p].tried, lot.get(p, 0)), default=None)

    def wait_s(self) -> float | None:
        """Seconds until the first busy donor is to be asked again; None when no donor is busy."""
        now_s = asyncio.get_running_loop().time()
        again_s = [self._givers[peer].later_s for peer in self.able if self._givers[peer].later_s > now_s]
        return min(again_s) - now_s if again_s else None


Accept = Callable[[State], Awaitable[None]]
Compare = Callable[[State, wire.Snapshot, Collection[PeerId]], Awaitable[object]]
Chunk = memoryview | bytes | bytearray
REPORTS = 20  # progress is told in steps of 5 %


@dataclass(frozen=True, slots=True)
class DonorClient:
    """The states that peers give of one stage: the offer of a snapshot, its chunks, and a whole download."""

    transport: Transport
    run_id: RunId
    stage: int
    sizes: Sizes
    telemetry: Telemetry
    rounds_max: Callable[[], float] = lambda: math.inf
    """The last round the run can have reached: a snapshot of a later one is a lie."""
    limits: DownloadLimits = DownloadLimits()
    cut: StateSlice = WHOLE
    round_min: int = 0
    warrant: access_pb2.Warrant | None = None
    """The owner's, of an archive that is no member."""

    async def offer(self, donor: PeerId, *, beside: bool = False) -> wire.Snapshot:
        """The donor's offer, checked. `beside`: the donor may put newcomers first that depend on it alone.

        Raises DonorLied, and Busy, Unavailable or RemoteFault as the call does.
        """
        request = self.cut.request(self.stage, self.round_min, nobody_waits=beside or not self.limits.waited_for)
        if self.warrant is not None:
            request.warrant.CopyFrom(self.warrant)
        call = self.transport.call(
            donor,
            Call(wire.Request(run_id=self.run_id, snapshot=request)),
            timeout_s=self.limits.offer_timeout_s,
            reply_bytes_max=0,
        )
        try:
            answer = await patiently(self.transport, self.run_id, donor, call, self.limits.patience_s)
        except Busy as busy:
            if self.limits.busy_max_s:
                raise
            raise Unavailable(str(busy)) from busy
        offer = answer.header.snapshot
        try:
            check_offer(
                offer,
                stage=self.stage,
                sizes=self.cut.sizes(self.sizes),
                nbytes_max=self.limits.nbytes_max,
            )
            if offer.round < self.round_min:
                raise RemoteFault(f"snapshot of round {offer.round} where {self.round_min} or later was asked for")
            if offer.round > (most := self.rounds_max()):
                raise RemoteFault(f"snapshot of round {offer.round}; the run can have come to {most:.0f}")
        except RemoteFault as fault:
            raise DonorLied(str(fault)) from fault
        return offer

    async def chunk(self, donor: PeerId, offer: wire.Snapshot, index: int, retries: int) -> Chunk:
        """Download and verify one chunk. Raises DonorLied, Unavailable, or RemoteFault where a retry at once may help.

        A slow donor has time while it answers pings. Busy and timed-out donors are asked again up to `retries` times. A
        donor that died or no longer has the snapshot is not asked again.
        """
        start, end = chunk_span(offer, index)
        request = wire.ChunkRequest(snapshot_id=offer.id, index=index, stage=self.stage)
        # States of more than 16 GiB come in larger chunks, which a home cannot send in the time of one MiB.
        timeout_s = self.limits.chunk_timeout_s * max(1.0, offer.chunk_nbytes / CHUNK_NBYTES)
        for attempt in range(1, retries + 2):
            try:
                call = self.transport.call(
                    donor,
                    Call(wire.Request(run_id=self.run_id, chunk=request)),
                    timeout_s=timeout_s,
                    reply_bytes_max=end - start,
                )
                answer = await patiently(self.transport, self.run_id, donor, call, self.limits.patience_s)
                break
            except (RemoteFault, Unavailable) as error:
                if not isinstance(error, (PeerTimeout, Busy)) or attempt > retries:
                    fault = Unavailable if isinstance(error, (PeerTimeout, Unavailable)) else RemoteFault
                    raise fault(f"chunk {index} of {len(offer.hashes)}: {error}") from error
                asked_s = error.retry_after_s if isinstance(error, Busy) else 0.0
                await asyncio.sleep(min(max(asked_s, self.pause_s(attempt)), self.limits.pause_max_s))
        if answer.header.chunk.index != index or len(answer.tensors) != 1:
            raise DonorLied(
                f"asked for chunk {index}, got chunk {answer.header.chunk.index} in {len(answer.tensors)} tensors"
            )
        data = answer.tensors[0].data
        try:
            check_chunk(offer, index, data)
        except RemoteFault as fault:
            raise DonorLied(str(fault)) from fault
        return data

    async def pull(
        self,
        donor: PeerId,
        offer: wire.Snapshot,
        missing: deque[int],
        put: Callable[[PeerId, wire.Snapshot, int, Chunk], None],
    ) -> None:
        """Get one of the chunks `missing` after the other from `donor` until none is left, and `put` each. A chunk that
        fails is missing again. Raises as `chunk` and `put` do."""
        loop = asyncio.get_running_loop()
        while missing:
            index = missing.popleft()
            begun_s = loop.time()
            try:
                data = await self.chunk(donor, offer, index, self.limits.chunk_retries_max)
            except BaseException:  # also when cancelled because another chunk of the same donor failed
                missing.append(index)
                raise
            put(donor, offer, index, data)
            if self.limits.rest and missing:
                await asyncio.sleep(self.limits.rest * (loop.time() - begun_s))

    async def download(
        self,
        donors: Callable[[], Sequence[PeerId]],
        *,
        compare: Compare | None = None,
        accept: Accept | None = None,
    ) -> tuple[State, wire.Snapshot]:
        """The part `cut` of the state of a replica of `stage` with `sizes` elements, and the offer of its donor.

        Every chunk is verified. Where a download takes longer than `limits.alone_s`, chunks come from several donors.

        `donors` returns the donors, best first, and is called before each attempt. An interrupted snapshot is continued
        at the same donor; chunks are kept while any donor offers the same hashes. A snapshot of a round later than
        `rounds_max` returns is refused. `compare` asks others about the state; it gets the state, the offer and the
        donors. `accept` takes the state, and loads it for example. Both raise RemoteFault for numbers that cannot be
        believed. Then the donor has lied, and another is asked; among several donors the liar is unknown, so the next
        state comes from one donor alone. Busy donors are asked again at the time they gave. Raises Unavailable when the
        attempts are used up or no donor is left.
        """
        known = Donors(donors, self.transport.peer_id, self.limits.failures_max)
        return await _Download(self, known, compare, accept).run()

    def pause_s(self, attempt: int) -> float:
        """Seconds to wait before another `attempt`."""
        return pause_s(attempt, self.limits.pause_s, self.limits.pause_max_s)


@dataclass(slots=True)
class _Download:
    """The state of one download: the chunks so far, and the peers that may give the others."""

    client: DonorClient
    donors: Donors
    compare: Compare | None
    accept: Accept | None
    data: memoryview | bytearray = field(default_factory=bytearray)
    have: dict[int, wire.Snapshot] = field(default_factory=dict)  # the offer that each chunk here belongs to
    offer: wire.Snapshot = field(default_factory=wire.Snapshot)  # the offer of the last donor
    begun: dict[PeerId, wire.Snapshot] = field(default_factory=dict)  # snapshots that may be continued, by donor
    missing: deque[int] = field(default_factory=deque)  # chunks that no peer was asked for yet in this attempt
    given: Counter[PeerId] = field(default_factory=Counter)  # chunks received, by peer
    pulled_s: float = 0.0  # seconds that all attempts took
    pure: bool = False  # a state mixed of several donors was refused: one donor alone from now on
    over: asyncio.Event = field(default_factory=asyncio.Event)  # nothing is missing any more
    reason: str = "nobody serves it"
    limits: DownloadLimits = field(init=False)
    telemetry: Telemetry = field(init=False)
    stage: int = field(init=False)

    def __post_init__(self) -> None:
        self.limits = self.client.limits
        self.telemetry = self.client.telemetry
        self.stage = self.client.stage

    async def run(self) -> tuple[State, wire.Snapshot]:
        """Try one donor after the other."""
        limits = self.limits
        pulls = 0
        fruitless = 0
        waited_s = 0.0
        while pulls < limits.pulls_max and fruitless < limits.attempts_max:
            donor = self.donors.next(self.begun)
            if donor is None and waited_s < limits.busy_max_s and (wait_s := self.donors.wait_s()) is not None:
                if not waited_s:
                    able = len(self.donors.able)
                    self.telemetry.event("state.waiting", stage=self.stage, donors=able, reason=self.reason)
                wait_s = min(limits.pause_max_s, wait_s)
                waited_s += wait_s
                await asyncio.sleep(wait_s)
                continue
            before = self.given.total()
            lied = False
            if donor is not None:
                try:
                    return await self._attempt(donor, pulls + 1)
                except Busy:
                    continue
                except (RemoteFault, Unavailable) as failure:
                    lied = isinstance(failure, DonorLied)
            pulls += 1
            fruitless = 0 if self._fruitful(self.given.total() - before) and not lied else fruitless + 1
            if fruitless < limits.attempts_max:
                await asyncio.sleep(self.client.pause_s(fruitless))
        raise Unavailable(f"no state for {stage_name(self.stage)} after {pulls} attempts; the last: {self.reason}")

    def _fruitful(self, chunks: int) -> bool:
        return chunks >= self.limits.fruitful * len(self.offer.hashes) > 0

    async def _attempt(self, donor: PeerId, number: int) -> tuple[State, wire.Snapshot]:
        """Get all missing chunks, from `donor` and donors beside it. Raises RemoteFault, Unavailable."""
        loop = asyncio.get_running_loop()
        able = len(self.donors.able)
        begun_s = loop.time()
        self.telemetry.event("state.donor", peer=donor, stage=self.stage, attempt=number, of=able)
        try:
            with self._blaming(donor):
                offer = self.begun.get(donor) or await self.client.offer(donor)
                self._begin(offer)
                self.begun[donor] = offer
                await self._pull(donor, offer)
                return await self._accepted(donor)
        finally:
            self.pulled_s += loop.time() - begun_s

    @contextlib.contextmanager
    def _blaming(self, donor: PeerId) -> Iterator[None]:
        """Mark `donor` as in use, and book what fails in the block to its account."""
        before = self.given[donor]
        giver = self.donors[donor]
        giver.used = True
        try:
            yield
        except Busy as busy:
            self.reason = f"{short(donor)}: {busy}"
            giver.busy(max(self.limits.pause_s, busy.retry_after_s))
            raise
        except (RemoteFault, Unavailable) as failure:
            self._failed(donor, failure, self.given[donor] - before)
            raise
        finally:
            giver.used = False

    def _failed(self, donor: PeerId, failure: RemoteFault | Unavailable, chunks: int) -> None:
        """Book the failure of `donor` after `chunks` chunks."""
        self.reason = f"{short(donor)}: {failure}"
        self._tell(donor, failure)
        begun = self.begun.get(donor)
        giver = self.donors[donor]
        if isinstance(failure, DonorLied):
            giver.exclude()
            for index in [index for index, offer in self.have.items() if offer is begun]:
                del self.have[index]
                self.missing.append(index)
        else:
            giver.tried += 1
            giver.failures += not self._fruitful(chunks)  # a donor that gave much before loses no credit
            if isinstance(failure, RemoteFault) and chunks:  # the connection broke
                return
        self.begun.pop(donor, None)

    def _tell(self, peer: PeerId, failure: RemoteFault | Unavailable) -> None:
        lied = isinstance(failure, DonorLied)
        if lied:
            self.telemetry.count(name.PEER_FAULTS, kind="state")
        self.telemetry.event(
            "state.failed", level="warning", peer=peer, stage=self.stage, lied=lied, reason=str(failure)
        )

    def _begin(self, offer: wire.Snapshot) -> None:
        """Make room for `offer`. Chunks with the same hashes are kept; all are, where the download took long."""
        if (self.offer.nbytes, self.offer.chunk_nbytes) != (offer.nbytes, offer.chunk_nbytes):
            self.data = large_buffer(offer.nbytes)
            self.have.clear()
        mixing = self.limits.sources > 1 and not self.pure and self.pulled_s >= self.limits.alone_s
        for index, theirs in list(self.have.items()):
            if theirs.hashes[index] == offer.hashes[index]:
                self.have[index] = offer
            elif not mixing:
                del self.have[index]
        self.offer = offer
        self.missing = deque(index for index in range(len(offer.hashes)) if index not in self.have)

    async def _pull(self, donor: PeerId, offer: wire.Snapshot) -> None:
        """Get all missing chunks from `donor` and other donors."""
        while self.missing:  # again, when another donor gave up on the last ones
            self.over.clear()
            works: list[Callable[[], Awaitable[None]]] = []
            works += [partial(self._work, donor, offer)] * min(self.limits.parallel, len(self.missing))
            if self.limits.sources > 1 and not self.pure:
                works.append(self._others)
            await gather_or_cancel(works)

    async def _accepted(self, donor: PeerId) -> tuple[State, wire.Snapshot]:
        """The state, once `compare` and `accept` have passed it. Raises DonorLied, Unavailable."""
        offer = mixed([self.have[index] for index in range(len(self.offer.hashes))])
        state = assemble(offer, self.data, verify=False)  # each chunk was verified as it came
        theirs = {id(offer_kept) for offer_kept in self.have.values()}
        givers = {donor, *(peer for peer, offer_kept in self.begun.items() if id(offer_kept) in theirs)}
        try:
            if self.compare is not None:
                await self.compare(state, offer, givers)
            if self.accept is not None:
                await self.accept(state)
        except RemoteFault as fault:
            self.have.clear()
            self.begun.clear()
            if offer is self.offer:
                raise DonorLied(str(fault)) from fault
            self.pure = True
            raise Unavailable(f"a state of several donors: {fault}") from fault
        self.telemetry.event(
            "state.downloaded",
            level="info" if self.limits.waited_for else "debug",  # copies are renewed all the time
            peer=donor,
            stage=self.stage,
            round=offer.round,
            nbytes=offer.nbytes,
            donors=len({id(theirs) for theirs in self.have.values()}),
        )
        return state, offer

    async def _others(self) -> None:
        """Use more donors once the first one takes long, sooner where it sends nothing."""
        begun_s = asyncio.get_running_loop().time()
        before = self.given.total()
        silent_s = min(self.limits.silent_s, self.limits.alone_s)
        await self._over_within(silent_s)
        if self.given.total() > before:
            await self._over_within(self.limits.alone_s - silent_s)
        if self.missing:
            await gather_or_cancel([partial(self._beside, begun_s, before)] * (self.limits.sources - 1))

    async def _beside(self, begun_s: float, before: int) -> None:
        """Get chunks of other donors' snapshots, one donor after the other, while the download takes long."""
        while self.missing and self._left_s(begun_s, before) > self.limits.alone_s:
            if (donor := self.donors.next(self.begun, by_lot=True)) is not None:
                with contextlib.suppress(RemoteFault, Unavailable), self._blaming(donor):
                    offer = self.begun.get(donor) or await self.client.offer(donor, beside=True)
                    if offer.chunk_nbytes != self.offer.chunk_nbytes:
                        raise Unavailable(f"chunks of {offer.chunk_nbytes} bytes")
                    self.begun[donor] = offer
                    self.telemetry.event("state.beside", peer=donor, stage=self.stage, missing=len(self.missing))
                    await gather_or_cancel(
                        [partial(self._work, donor, offer)] * min(self.limits.beside, len(self.missing))
                    )
            await self._over_within(self.limits.pause_max_s)

    def _left_s(self, begun_s: float, before: int) -> float:
        """Seconds until nothing is missing, at the rate since `begun_s`, when `before` chunks had come."""
        came = self.given.total() - before
        return len(self.missing) * (asyncio.get_running_loop().time() - begun_s) / came if came else math.inf

    async def _over_within(self, seconds: float) -> None:
        """Wait `seconds`, or until nothing is missing."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.over.wait()

    async def _work(self, donor: PeerId, offer: wire.Snapshot) -> None:
        """Get one missing chunk after the other from `donor` until none is left."""
        await self.client.pull(donor, offer, self.missing, self._put)
        self.over.set()

    def _put(self, donor: PeerId, offer: wire.Snapshot, index: int, data: Chunk) -> None:
        start, end = chunk_span(offer, index)
        self.data[start:end] = data
        self.have[index] = offer
        self.given[donor] += 1
        self.telemetry.count(name.SNAPSHOT_BYTES, end - start, direction="received")
        if len(self.have) % max(1, len(offer.hashes) // REPORTS) == 0:
            self.telemetry.event(
                "state.download",
                peer=donor,
                stage=self.stage,
                chunks=len(self.have),
                of=len(offer.hashes),
                nbytes=offer.nbytes,
            )

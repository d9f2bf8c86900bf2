"""A content-addressed set on a node (the run's data set, its base model): index and chunks, on this machine or fetched.

Every chunk is verified against its hash, so any source will do. Web locations are asked first, because members need
their bandwidth for training. Bootstraps, which have no work of their own, come next; then members that announced the
chunk; then other members.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from swarmnode.base.errors import Busy, NotPermitted, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId, digest64, short
from swarmnode.base.metrics import name
from swarmnode.base.ports import Answer, Call, Telemetry, Transport, WireTensor
from swarmnode.base.remembered import REMEMBERED_MAX, Remembered
from swarmnode.base.token_bucket import PeerBudget, TokenBucket
from swarmnode.base.uplink_scheduler import BULK_BYTES, SLOWEST_BYTES_PER_S
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.data.chunk_store import ChunkCache, ChunkIndex, ChunkStore, find_index
from swarmnode.data.index import CHUNK_NBYTES_MAX, HASH_NBYTES, INDEX_NBYTES_MAX, Index
from swarmnode.keep.transfer.download import PAUSE_MAX_S, PAUSE_S, GiverRecord, pause_s
from swarmnode.net.membership.liveness import AGAIN_S, SAMPLE
from swarmnode.net.membership.trust import STRANGERS_SHARE
from swarmnode.run.manifest import Manifest

if TYPE_CHECKING:
    from swarmnode.data.base_index import BaseIndex

MEMBERS_ASKED_MAX = SAMPLE  # for one chunk, in a row


# Serves the chunks and indexes held on this node to other members, so that the swarm distributes its own data set and
# base model.
#
# The cost is bounded. Each asker, and all askers together, have a byte budget, and a key gets each chunk twice a day.
# Keys that were not seen at work share a twentieth of the budget, however many they are: a signed record costs nothing.
# A node that trains serves nothing while its own messages wait for the line. Pieces are at most half a MiB, so that
# none delays a gradient for long.

PIECE_NBYTES = 512 << 10  # derived: half a second of a home's uplink at 8 Mbit/s
PIECE_TIMEOUT_S = PIECE_NBYTES / SLOWEST_BYTES_PER_S
CHUNK_TIMEOUT_S = 4 * PIECE_TIMEOUT_S  # a member that gives the eight pieces more slowly is left for another
METHOD = "data_chunk"
AT_ONCE_MAX = 4  # pieces under way; derived: 2 MiB fill a line of 100 Mbit/s over 160 ms
KEPT_BLOBS = 2  # read from disk for askers, apart from what this node itself works with
TIMES_A_DAY = 2  # a transfer that broke off, or a lost cache
TAKEN_MAX = 16 * REMEMBERED_MAX  # derived: sixteen chunks a peer, which is a burst of bytes (asker_burst)
DAY_S = 86_400.0
LOOKUP_NBYTES = BULK_BYTES  # charged for each request, even for a blob that is not here: a small call's most


class BlobSource(Protocol):
    """The parts of a content-addressed set that this node holds. `digest`: the SHA-256 of its index."""

    @property
    def digest(self) -> bytes: ...

    async def blob(self, sha256: bytes) -> bytes | None:
        """The chunk or index with this hash; None when it is not here."""
        ...

    def held_bits(self) -> bytes:
        """Bit i, least significant first: whether chunk i of the index is here."""
        ...


@dataclass(frozen=True, slots=True)
class ServeLimits:
    """Limits on the cost of serving, in bytes and bytes a second. All are guesses: a feeder needs 2 bytes for each
    token, so 20 kB/s at 10,000 tokens/s."""

    asker_burst: int = 64 << 20  # an index of 2 TB of text, or sixteen chunks
    asker_rate: float = 2 << 20
    all_burst: int = 128 << 20
    all_rate: float = 4 << 20
    yields: bool = True  # to this node's own training; a bootstrap has none
    retry_s: float = 1.0
    day_nbytes: int | None = None  # given to all askers in a day at most


class ChunkServer:
    """Handler of "data_chunk" for the chunks and indexes of the sets `blobs`."""

    def __init__(
        self,
        blobs: Sequence[BlobSource],
        transport: Transport,
        telemetry: Telemetry,
        limits: ServeLimits,
        works: Callable[[PeerId], bool] = lambda peer: True,
    ) -> None:
        """`works`: whether a peer was seen to take part; the others are strangers."""
        self._blobs = {one.digest: one for one in blobs}
        self._transport = transport
        self._telemetry = telemetry
        self._limits = limits
        self._works = works
        budgets = [(limits.all_rate, float(limits.all_burst))]  # of everybody: for the line, and for the day
        if limits.day_nbytes is not None:  # half of it at once, half in the course of the day
            budgets.append((0.5 * limits.day_nbytes / DAY_S, 0.5 * limits.day_nbytes))
        self._all = [TokenBucket.full(*budget) for budget in budgets]
        share = STRANGERS_SHARE  # of each
        self._strangers = [TokenBucket.full(share * rate, share * burst) for rate, burst in budgets]
        self._taken: OrderedDict[tuple[PeerId, bytes], int] = OrderedDict()  # bytes of the day
        self._day = 0.0
        self._askers = PeerBudget(limits.asker_rate, limits.asker_burst)
        self._under_way = 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def serve(self) -> None:
        """Register."""
        self._transport.serve(METHOD, self.answer, tensor_bytes_max=0)

    async def answer(self, peer: PeerId, call: Call) -> Answer:
        """Send one piece of a blob, and the bits of the chunks held here; without the piece when the blob is not here.
        Raises RemoteFault for an invalid request, Busy above the limits on serving."""
        request = call.header.data_chunk
        if len(request.sha256) != HASH_NBYTES or len(request.index) != HASH_NBYTES:
            raise RemoteFault("a chunk is asked for without the SHA-256 of itself and its index")
        if not 0 < request.nbytes <= PIECE_NBYTES:
            raise RemoteFault(f"{request.nbytes} bytes asked of a chunk; at most {PIECE_NBYTES}")
        if request.offset >= max(INDEX_NBYTES_MAX, CHUNK_NBYTES_MAX):
            raise RemoteFault(f"a piece from byte {request.offset} on; no chunk is as long")
        self._admit(peer)
        if (blobs := self._blobs.get(bytes(request.index))) is None:
            return Answer(wire.Reply(data_chunk=wire.DataChunk()))
        self._under_way += 1
        try:
            data = await self._blob(blobs, bytes(request.sha256))
        finally:
            self._under_way -= 1
        reply = wire.DataChunk(held=blobs.held_bits())
        if data is None:
            return Answer(wire.Reply(data_chunk=reply))
        if request.offset >= len(data):
            raise RemoteFault(f"a piece from byte {request.offset} on of a chunk of {len(data)} bytes")
        reply.nbytes = len(data)
        piece = memoryview(data)[request.offset : request.offset + request.nbytes]
        self._count(peer, bytes(request.sha256), len(piece), len(data))
        self._spend(peer, len(piece))
        self._telemetry.count(name.DATA_BYTES, len(piece), source="served")
        return Answer(wire.Reply(data_chunk=reply), (WireTensor("u8", (len(piece),), piece),))

    async def _blob(self, blobs: BlobSource, sha256: bytes) -> bytes | None:
        if (known := self._kept.get(sha256)) is not None:
            self._kept.move_to_end(sha256)
            return known
        data = await blobs.blob(sha256)
        if data is not None:
            self._kept[sha256] = data
            while len(self._kept) > KEPT_BLOBS:
                self._kept.popitem(last=False)
        return data

    def _admit(self, peer: PeerId) -> None:
        if self._under_way >= AT_ONCE_MAX:
            raise Busy("others are given chunks now", self._limits.retry_s)
        if self._limits.yields and self._transport.line_queue:
            raise Busy("our own messages wait for the line", self._limits.retry_s)
        self._spend(peer, LOOKUP_NBYTES)

    def _count(self, peer: PeerId, sha256: bytes, nbytes: int, whole: int) -> None:
        """Count what `peer` has of a blob of `whole` bytes today. Raises Busy when it had it TIMES_A_DAY."""
        if (day := asyncio.get_running_loop().time() // DAY_S) != self._day:
            self._day = day
            self._taken.clear()
        had = self._taken.pop((peer, sha256), 0)
        if full := had + nbytes > TIMES_A_DAY * whole:
            nbytes = 0
        self._taken[peer, sha256] = had + nbytes
        if len(self._taken) > TAKEN_MAX:
            self._taken.popitem(last=False)
        if full:
            raise Busy(f"you had this chunk {TIMES_A_DAY} times today", AGAIN_S)

    def _spend(self, peer: PeerId, nbytes: int) -> None:
        now = asyncio.get_running_loop().time()
        shared = self._all if self._works(peer) else [*self._strangers, *self._all]
        if not all(bucket.take(now, nbytes) for bucket in (self._askers.of(peer), *shared)):
            raise Busy("as many bytes of chunks as may be were given", self._limits.retry_s)


class WebReader(Protocol):
    """Reads files from the web (net/transport/web.py). Both raise Unavailable, NotPermitted."""

    async def read(self, url: str, offset: int, nbytes: int) -> bytes: ...

    async def read_whole(self, url: str, nbytes_max: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """A chunk, or the index (`number` None): bytes [offset, offset + nbytes) of `file`, with this hash. The index has
    any number of bytes up to `nbytes`. `set`: SHA-256 of the index. `published`: web locations hold it, too."""

    sha256: bytes
    file: str
    offset: int
    nbytes: int
    number: int | None
    set: bytes
    published: bool = True

    def matches(self, data: bytes) -> bool:
        whole = len(data) <= self.nbytes if self.number is None else len(data) == self.nbytes
        return whole and hashlib.sha256(data).digest() == self.sha256


@dataclass(slots=True)
class _Holder(GiverRecord):
    """A web location or member."""

    held: bytes = b""  # which chunks it has, as it said
    asked_s: float = float("-inf")

    def holds(self, number: int | None) -> bool:
        if number is None or number >> 3 >= len(self.held):
            return False
        return bool(self.held[number >> 3] >> (number & 7) & 1)


Ask = Callable[[Wanted], Awaitable[bytes | None]]


class ChunkSources:
    """Asks one source after another until one gives the wanted chunk or index."""

    def __init__(
        self,
        run_id: RunId,
        locations: Sequence[str],
        web: WebReader | None,
        transport: Transport,
        telemetry: Telemetry,
        first: Callable[[], Sequence[PeerId]],
        others: Callable[[], Iterable[PeerId]],
        counter: str = name.DATA_BYTES,
    ) -> None:
        """`locations` are http(s) URLs of folders. `first` are members without work of their own, `others` those that
        may hold chunks. `counter`: the metric of bytes received, by source."""
        self._run_id = run_id
        self._web = web
        self._transport = transport
        self._telemetry = telemetry
        self._first = first
        self._others = others
        self._counter = counter
        self._places = {url: _Holder() for url in locations} if web is not None else {}
        self._members = Remembered[PeerId, _Holder]()

    async def obtain(self, wanted: Wanted, vain: Callable[[], None] = lambda: None) -> bytes:
        """The verified bytes of `wanted`. Repeats until a source gives them; cancel it to stop. `vain` is called once,
        after the first pass in which no known source gave them."""
        for attempt in itertools.count(1):
            reason = "nobody is known who has it"
            for who, giver, ask in self._order(wanted):
                data, failure = await self._try(giver, ask, wanted)
                if data is not None:
                    return data
                if failure is not None:
                    reason = f"{who}: {failure}"
                    self._telemetry.event("data.failed", level="warning", chunk=wanted.number, reason=reason)
            if attempt == 1:
                self._telemetry.event("data.waiting", level="warning", chunk=wanted.number, reason=reason)
                vain()
            await asyncio.sleep(pause_s(attempt, PAUSE_S, PAUSE_MAX_S))
        raise AssertionError("it repeats until a source gives them")

    async def _try(self, giver: _Holder, ask: Ask, wanted: Wanted) -> tuple[bytes | None, str | None]:
        """(the bytes, the failure). Both are None when a member does not hold the chunk or is busy."""
        try:
            data = await ask(wanted)
        except NotPermitted as refusal:
            giver.exclude()
            return None, str(refusal)
        except Busy as busy:
            giver.busy(max(PAUSE_S, busy.retry_after_s))
            return None, None
        except (Unavailable, RemoteFault) as failure:
            giver.record_failure(2 * PAUSE_S, AGAIN_S)
            return None, str(failure)
        if data is None:
            return None, None
        if not await asyncio.to_thread(wanted.matches, data):
            self._telemetry.count(name.PEER_FAULTS, kind="data")
            giver.exclude()
            return None, f"gave {len(data)} bytes that do not match the hash, and is asked no more"
        giver.failures = 0
        giver.later_s = 0.0
        return data, None

    def _order(self, wanted: Wanted) -> Iterable[tuple[str, _Holder, Ask]]:
        """The sources to ask now, best first."""
        now = asyncio.get_running_loop().time()
        places = [(url, giver) for url, giver in self._places.items() if giver.later_s <= now and wanted.published]
        for url, giver in sorted(places, key=lambda one: one[1].failures):
            yield url, giver, self._of_place(url)
        first = list(dict.fromkeys(self._first()))
        for peer in first:
            if (giver := self._member(peer)).later_s <= now:
                yield short(peer), giver, self._of_member(peer, giver)
        salt = digest64(wanted.sha256, self._transport.peer_id)
        others = [(peer, self._member(peer)) for peer in self._others() if peer not in first]
        able = [
            (peer, giver)
            for peer, giver in others
            if giver.later_s <= now and (giver.holds(wanted.number) or giver.asked_s <= now - PAUSE_MAX_S)
        ]
        able.sort(key=lambda one: (not one[1].holds(wanted.number), one[1].failures, digest64(salt, one[0])))
        for peer, giver in able[:MEMBERS_ASKED_MAX]:
            yield short(peer), giver, self._of_member(peer, giver)

    def _member(self, peer: PeerId) -> _Holder:
        if peer not in self._members:
            self._members[peer] = _Holder()
        return self._members[peer]

    def _of_place(self, url: str) -> Ask:
        async def ask(wanted: Wanted) -> bytes:
            assert self._web is not None
            at = f"{url}/{wanted.file}"
            if wanted.number is None:
                data = await self._web.read_whole(at, wanted.nbytes)
            else:
                data = await self._web.read(at, wanted.offset, wanted.nbytes)
            self._telemetry.count(self._counter, len(data), source="web")
            return data

        return ask

    def _of_member(self, peer: PeerId, giver: _Holder) -> Ask:
        async def ask(wanted: Wanted) -> bytes | None:
            try:
                async with asyncio.timeout(CHUNK_TIMEOUT_S):
                    return await pieces(wanted)
            except TimeoutError:
                raise Unavailable(f"took more than {CHUNK_TIMEOUT_S:.0f} s") from None

        async def pieces(wanted: Wanted) -> bytes | None:
            """The blob, fetched piece by piece; None when the member does not hold it."""
            data = bytearray()
            whole = wanted.nbytes
            while len(data) < whole:
                nbytes = min(PIECE_NBYTES, whole - len(data))
                request = wire.DataChunkRequest(sha256=wanted.sha256, offset=len(data), nbytes=nbytes, index=wanted.set)
                answer = await self._transport.call(
                    peer,
                    Call(wire.Request(run_id=self._run_id, data_chunk=request)),
                    timeout_s=PIECE_TIMEOUT_S,
                    reply_bytes_max=PIECE_NBYTES,
                )
                reply = answer.header.data_chunk
                giver.held = reply.held
                giver.asked_s = asyncio.get_running_loop().time()
                if not reply.nbytes:
                    return None
                if reply.nbytes > wanted.nbytes or (wanted.number is not None and reply.nbytes != wanted.nbytes):
                    raise RemoteFault(f"offers {reply.nbytes} bytes where {wanted.nbytes} are due")
                whole = reply.nbytes
                piece = answer.tensors[0] if len(answer.tensors) == 1 else None
                if piece is None or piece.dtype != "u8" or not 0 < piece.nbytes <= whole - len(data):
                    raise RemoteFault("gives no piece of what it offers")
                data += piece.data
                self._telemetry.count(self._counter, piece.nbytes, source="peer")
            return bytes(data)

        return ask


PREFETCH_CHUNKS = 3
"""Chunks fetched ahead of those in work (derived: twelve MiB, an hour of text at 2,000 tokens a second)."""

SetIndex = TypeVar("SetIndex", bound=ChunkIndex)


class ChunkSet(Generic[SetIndex]):
    """An index and its chunks. `open` fetches the index and `ensure` a chunk; both wait until a source gives it. Also a
    BlobSource."""

    def __init__(
        self, kind: type[SetIndex], digest: bytes, cache: ChunkCache, folder: Path | None, telemetry: Telemetry
    ) -> None:
        """`digest` is the index's SHA-256; `folder` is one that this machine's user named, with the set's files in it;
        None: there is none."""
        self.digest = digest
        self._kind = kind
        self._sources: ChunkSources | None = None  # None: only this machine is looked at
        self.store: ChunkStore[SetIndex] | None = None
        self._cache = cache
        self._folder = folder
        self._telemetry = telemetry
        self._raw = b""
        self._in_vain: set[int] = set()  # chunks that nobody gives now
        self._news = asyncio.Event()  # that set grew
        self._locks = WeakValueDictionary[bytes, asyncio.Lock]()  # of each blob: concurrent callers fetch it once

    def fetch_from(self, sources: ChunkSources) -> None:
        """Fetch what is not on this machine from `sources` from now on."""
        self._sources = sources

    @property
    def is_open(self) -> bool:
        return self.store is not None

    @property
    def index(self) -> SetIndex:
        assert self.store is not None, "the set is not open"
        return self.store.index

    async def open(self) -> None:
        """Load or fetch the index. Raises DataError when the index is invalid, Unavailable when it is not on this
        machine and there is no source to ask."""
        async with self._turn(self.digest):
            if self.store is not None:
                return
            file = self._kind.FILE
            index_bytes = await asyncio.to_thread(find_index, self._folder, self.digest, file)
            raw = index_bytes[1] if index_bytes is not None else None
            if raw is None:
                raw = await asyncio.to_thread(self._cache.read, self.digest, INDEX_NBYTES_MAX)
            if raw is None:
                raw = await self._obtain(
                    Wanted(self.digest, file, 0, INDEX_NBYTES_MAX, None, self.digest, self._kind.PUBLISHED)
                )
                self._kept(await asyncio.to_thread(self._cache.write, self.digest, raw))
            index = self._kind.parse(raw, self.digest, self._kind.FIELD)
            folder = index_bytes[0] if index_bytes is not None else self._folder if self._kind.BARE_FOLDER else None
            self.store = await asyncio.to_thread(ChunkStore, index, self._cache, folder)
            self._raw = raw
        index.tell_opened(self._telemetry, f"{index.count} chunks" + ("" if folder is None else f", in {folder}"))

    async def ensure(self, number: int) -> None:
        """Load or fetch chunk `number` into memory, without a time limit. Raises Unavailable as `open` does."""
        store = self.store
        assert store is not None, "the set is not open"
        if store.in_memory(number):
            return
        chunk = store.index.chunk(number)
        async with self._turn(chunk.sha256):
            if store.in_memory(number) or await asyncio.to_thread(store.read, number) is not None:
                return
            try:
                data = await self._obtain(
                    Wanted(chunk.sha256, chunk.shard, chunk.offset, chunk.nbytes, chunk.number, self.digest)
                )
            finally:
                self._in_vain.discard(number)
            self._kept(await asyncio.to_thread(store.put, number, data))

    async def in_vain(self, numbers: Collection[int]) -> None:
        """Return once every known source was asked for one of the chunks `numbers` and none gave it."""
        while self._in_vain.isdisjoint(numbers):
            self._news.clear()
            await self._news.wait()

    async def prefetch(self, wanted: Callable[[], Iterable[int]], changed: asyncio.Event) -> None:
        """Keep the first PREFETCH_CHUNKS chunks that `wanted` names in memory, fetched one after the other. Starts over
        at each `changed`; runs until cancelled. A chunk that no source gives now does not delay the others."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                changed.clear()
                for number in self._ahead(wanted()):
                    ends = {tasks.create_task(self.ensure(number)), tasks.create_task(self.in_vain({number}))}
                    _, left = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    if number not in self._in_vain:
                        for end in left:
                            end.cancel()
                await changed.wait()

    def _ahead(self, wanted: Iterable[int]) -> list[int]:
        """The first PREFETCH_CHUNKS chunks of `wanted`, without those that no source gives now."""
        ahead = dict[int, None]()
        for number in wanted:
            if number not in self._in_vain:
                ahead[number] = None
            if len(ahead) >= PREFETCH_CHUNKS:
                break
        return list(ahead)

    async def blob(self, sha256: bytes) -> bytes | None:
        if self.store is None:
            return None
        if sha256 == self.digest:
            return self._raw
        number = self.store.number_of(sha256)
        return None if number is None else await asyncio.to_thread(self.store.read, number)

    def held_bits(self) -> bytes:
        return b"" if self.store is None else self.store.held_bits()

    async def _obtain(self, wanted: Wanted) -> bytes:
        if self._sources is None:
            what = "the index" if wanted.number is None else f"chunk {wanted.number}"
            raise Unavailable(f"{what} of {self._kind.FIELD} {self.digest.hex()[:16]} is not on this machine")

        def vain() -> None:
            if wanted.number is not None:
                self._in_vain.add(wanted.number)
                self._news.set()

        return await self._sources.obtain(wanted, vain)

    def _kept(self, reason: str | None) -> None:
        if reason is not None:
            self._telemetry.event("data.uncached", level="warning", reason=reason)

    def _turn(self, sha256: bytes) -> asyncio.Lock:
        if (lock := self._locks.get(sha256)) is None:
            lock = self._locks[sha256] = asyncio.Lock()
        return lock


@dataclass(frozen=True, slots=True)
class SetPorts(Generic[SetIndex]):
    """A set as a node is given it. `web` None: chunks come from members alone. `meeting_points` are members without
    work of their own, which may hold chunks."""

    set: ChunkSet[SetIndex]
    web: WebReader | None = None
    meeting_points: Callable[[], Sequence[PeerId]] = tuple


def data_set_of(manifest: Manifest, cache: ChunkCache, folder: Path | None, telemetry: Telemetry) -> ChunkSet[Index]:
    """The run's text. `folder` is one that this machine's user named, with a data set of `data make` in it."""
    return ChunkSet(Index, bytes.fromhex(manifest.data.index), cache, folder, telemetry)


def base_set_of(
    manifest: Manifest, cache: ChunkCache, folder: Path | None, telemetry: Telemetry
) -> ChunkSet[BaseIndex]:
    """The pretrained model that the run starts from. `folder` is one that this machine's user named, with the model's
    files in it."""
    from swarmnode.data.base_index import BaseIndex  # most runs have none

    return ChunkSet(BaseIndex, bytes.fromhex(manifest.base.index), cache, folder, telemetry)


def serve_chunks(
    ports: Sequence[SetPorts[Index] | SetPorts[BaseIndex] | None],
    transport: Transport,
    telemetry: Telemetry,
    works: Callable[[PeerId], bool],
) -> None:
    """Give the chunks of the run's data set and base model that are on this node to other members, most to those for
    which `works` is true."""
    sets = [each.set for each in ports if each is not None]
    if sets:
        ChunkServer(sets, transport, telemetry, ServeLimits(), works).serve()

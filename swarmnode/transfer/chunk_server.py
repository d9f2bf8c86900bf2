"""Serves the chunks and indexes held on this node to other members, so that the swarm distributes its own data set and
base model.

The cost is bounded. Each asker, and all askers together, have a byte budget, and a key gets each chunk twice a day.
Keys that were not seen at work share a twentieth of the budget, however many they are: a signed record costs nothing. A
node that trains serves nothing while its own messages wait for the line. Pieces are at most half a MiB, so that none
delays a gradient for long.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnode.data.index import CHUNK_NBYTES_MAX, HASH_NBYTES, INDEX_NBYTES_MAX
from swarmnode.errors import Busy, RemoteFault
from swarmnode.ids import PeerId
from swarmnode.metrics import name
from swarmnode.ports import Answer, Call, Telemetry, Transport, WireTensor
from swarmnode.remembered import REMEMBERED_MAX
from swarmnode.token_bucket import TokenBucket, TokenBuckets
from swarmnode.wire import call_pb2 as wire

PIECE_NBYTES = 512 << 10  # derived: half a second of a home's uplink at 8 Mbit/s
SLOWEST_BYTES_PER_S = 24_000  # guess: what is left of a home's uplink while it trains
METHOD = "data_chunk"
AT_ONCE_MAX = 4  # pieces under way; derived: 2 MiB fill a line of 100 Mbit/s over 160 ms
KEPT_BLOBS = 2  # read from disk for askers, apart from what this node itself works with
AGAIN_S = 60.0  # guess: a refusal for the day, after which other chunks may be asked for
TIMES_A_DAY = 2  # a transfer that broke off, or a lost cache
TAKEN_MAX = 16 * REMEMBERED_MAX  # derived: sixteen chunks a peer, which is a burst of bytes (asker_burst)
STRANGERS_SHARE = 0.05  # guess: of the line and of a day's bytes
DAY_S = 86_400.0
LOOKUP_NBYTES = 16 << 10  # guess: the budget charged for each request, even for a blob that is not here


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
        self._all: list[TokenBucket] = []  # of everybody: for the line, and for the day
        self._strangers: list[TokenBucket] = []  # their share of each
        self._taken: OrderedDict[tuple[PeerId, bytes], int] = OrderedDict()  # bytes of the day
        self._day = 0.0
        self._askers = TokenBuckets()
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
        limits, now = self._limits, asyncio.get_running_loop().time()
        if not self._all:
            budgets = [(limits.all_rate, float(limits.all_burst))]
            if limits.day_nbytes is not None:  # half of it at once, half in the course of the day
                budgets.append((0.5 * limits.day_nbytes / DAY_S, 0.5 * limits.day_nbytes))
            self._all = [TokenBucket.full(*budget, now) for budget in budgets]
            share = STRANGERS_SHARE
            self._strangers = [TokenBucket.full(share * rate, share * burst, now) for rate, burst in budgets]
        shared = self._all if self._works(peer) else [*self._strangers, *self._all]
        asker = self._askers.of(peer, limits.asker_rate, limits.asker_burst, now)
        if not all(bucket.take(now, nbytes) for bucket in (asker, *shared)):
            raise Busy("as many bytes of chunks as may be were given", limits.retry_s)

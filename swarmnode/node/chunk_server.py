"""Serves the chunks and indexes held on this node to other members, so that the swarm distributes its own data set and
base model.

The cost is bounded. Each asker, and all askers together, have a byte budget. A node that trains serves nothing while
its own messages wait for the line. Pieces are at most half a MiB, so that none delays a gradient for long.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnode.data.index import CHUNK_NBYTES_MAX, HASH_NBYTES, INDEX_NBYTES_MAX
from swarmnode.errors import Busy, RemoteFault
from swarmnode.ids import PeerId
from swarmnode.metrics import name
from swarmnode.ports import Answer, Call, Telemetry, Transport, WireTensor
from swarmnode.token_bucket import TokenBucket
from swarmnode.wire import call_pb2 as wire

PIECE_NBYTES = 512 << 10  # guess: half a second of a home's uplink at 8 Mbit/s
METHOD = "data_chunk"
AT_ONCE_MAX = 4  # guess: pieces under way
KEPT_BLOBS = 2  # read from disk for askers, apart from what this node itself works with
ASKERS_MAX = 1024
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


class ChunkServer:
    """Handler of "data_chunk" for the chunks and indexes of the sets `blobs`."""

    def __init__(
        self, blobs: Sequence[BlobSource], transport: Transport, telemetry: Telemetry, limits: ServeLimits
    ) -> None:
        self._blobs = {one.digest: one for one in blobs}
        self._transport = transport
        self._telemetry = telemetry
        self._limits = limits
        self._all: TokenBucket | None = None
        self._askers: OrderedDict[PeerId, TokenBucket] = OrderedDict()
        self._under_way = 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()

    def serve(self) -> None:
        """Register."""
        self._transport.serve(METHOD, self.answer, tensor_bytes_max=0)

    async def answer(self, peer: PeerId, call: Call) -> Answer:
        """Send one piece of a blob, and the bits of the chunks held here; without the piece when the blob is not here.
        Raises RemoteFault for an invalid request, Busy above the limits on serving."""
        asked = call.header.data_chunk
        if len(asked.sha256) != HASH_NBYTES or len(asked.index) != HASH_NBYTES:
            raise RemoteFault("a chunk is asked for without the SHA-256 of itself and its index")
        if not 0 < asked.nbytes <= PIECE_NBYTES:
            raise RemoteFault(f"{asked.nbytes} bytes asked of a chunk; at most {PIECE_NBYTES}")
        if asked.offset >= max(INDEX_NBYTES_MAX, CHUNK_NBYTES_MAX):
            raise RemoteFault(f"a piece from byte {asked.offset} on; no chunk is as long")
        self._admit(peer)
        if (blobs := self._blobs.get(bytes(asked.index))) is None:
            return Answer(wire.Reply(data_chunk=wire.DataChunk()))
        self._under_way += 1
        try:
            data = await self._blob(blobs, bytes(asked.sha256))
        finally:
            self._under_way -= 1
        told = wire.DataChunk(held=blobs.held_bits())
        if data is None:
            return Answer(wire.Reply(data_chunk=told))
        if asked.offset >= len(data):
            raise RemoteFault(f"a piece from byte {asked.offset} on of a chunk of {len(data)} bytes")
        told.nbytes = len(data)
        piece = memoryview(data)[asked.offset : asked.offset + asked.nbytes]
        self._spend(peer, len(piece))
        self._telemetry.count(name.DATA_BYTES, len(piece), source="served")
        return Answer(wire.Reply(data_chunk=told), (WireTensor("u8", (len(piece),), piece),))

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

    def _spend(self, peer: PeerId, nbytes: int) -> None:
        limits, now = self._limits, asyncio.get_running_loop().time()
        everybody = self._all = self._all or TokenBucket(limits.all_rate, limits.all_burst, limits.all_burst, now)
        asker = self._askers.get(peer)
        if asker is None:
            asker = self._askers[peer] = TokenBucket(limits.asker_rate, limits.asker_burst, limits.asker_burst, now)
            if len(self._askers) > ASKERS_MAX:
                self._askers.popitem(last=False)
        if not asker.take(now, nbytes) or not everybody.take(now, nbytes):
            raise Busy("as many bytes of chunks as may be were given", limits.retry_s)

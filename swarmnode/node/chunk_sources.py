"""Fetches chunks of the run's data set or base model from the manifest's web locations and from members of the run.

Every chunk is verified against its hash, so any source will do. Web locations are asked first, because members need
their bandwidth for training. Bootstraps, which have no work of their own, come next; then members that announced the
chunk; then other members.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnode.data.index import INDEX_NBYTES_MAX, Chunk
from swarmnode.errors import Busy, NotPermitted, RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId, digest64, short
from swarmnode.metrics import name
from swarmnode.node.chunk_server import PIECE_NBYTES
from swarmnode.ports import Call, Telemetry, Transport
from swarmnode.wire import call_pb2 as wire

PIECE_TIMEOUT_S = 30.0  # guess: half a MiB at 140 kbit/s
CHUNK_TIMEOUT_S = 90.0  # guess: 4 MiB at 400 kbit/s; a member that gives them more slowly is left for another
BACKOFF_S, BACKOFF_MAX_S = 1.0, 60.0  # guess: after a failure, doubling
PAUSE_S, PAUSE_MAX_S = 0.5, 8.0  # guess: when nobody gave anything, doubling
HOLDS_S = 15.0  # guess: a member that did not hold a chunk is asked again after so long
MEMBERS_ASKED_MAX = 8  # guess: for one chunk, in a row
MEMBERS_MAX = 1024  # remembered


class WebReader(Protocol):
    """Reads files from the web (transport/web.py). Both raise Unavailable, NotPermitted."""

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

    @staticmethod
    def of(chunk: Chunk, index: bytes) -> Wanted:
        return Wanted(chunk.sha256, chunk.shard, chunk.offset, chunk.nbytes, chunk.number, index)

    @staticmethod
    def index(sha256: bytes, file: str, *, published: bool) -> Wanted:
        return Wanted(sha256, file, 0, INDEX_NBYTES_MAX, None, sha256, published)

    def matches(self, data: bytes) -> bool:
        whole = len(data) <= self.nbytes if self.number is None else len(data) == self.nbytes
        return whole and hashlib.sha256(data).digest() == self.sha256


@dataclass(slots=True)
class _Giver:
    """The results so far of asking one web location or member."""

    failures: int = 0
    later_s: float = 0.0  # not to be asked before
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
        self._places = {url: _Giver() for url in locations} if web is not None else {}
        self._members: OrderedDict[PeerId, _Giver] = OrderedDict()

    async def obtain(self, wanted: Wanted, vain: Callable[[], None] = lambda: None) -> bytes:
        """The verified bytes of `wanted`. Repeats until a source gives them; cancel it to stop. `vain` is called once,
        after the first pass in which no known source gave them."""
        pause_s = PAUSE_S
        while True:
            reason = "nobody is known who has it"
            for who, giver, ask in self._order(wanted):
                data, failure = await self._try(giver, ask, wanted)
                if data is not None:
                    return data
                if failure is not None:
                    reason = f"{who}: {failure}"
                    self._telemetry.event("data.failed", level="warning", chunk=wanted.number, reason=reason)
            if pause_s == PAUSE_S:
                self._telemetry.event("data.waiting", level="warning", chunk=wanted.number, reason=reason)
                vain()
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2.0 * pause_s)

    async def _try(self, giver: _Giver, ask: Ask, wanted: Wanted) -> tuple[bytes | None, str | None]:
        """(the bytes, the failure). Both are None when a member does not hold the chunk or is busy."""
        now = asyncio.get_running_loop().time()
        try:
            data = await ask(wanted)
        except NotPermitted as refusal:
            giver.later_s = float("inf")
            return None, str(refusal)
        except Busy as busy:
            giver.later_s = now + max(PAUSE_S, busy.retry_after_s)
            return None, None
        except (Unavailable, RemoteFault) as failure:
            giver.failures += 1
            giver.later_s = now + min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(16, giver.failures - 1))
            return None, str(failure)
        if data is None:
            return None, None
        if not await asyncio.to_thread(wanted.matches, data):
            self._telemetry.count(name.PEER_FAULTS, kind="data")
            giver.later_s = float("inf")
            return None, f"gave {len(data)} bytes that do not match the hash, and is asked no more"
        giver.failures, giver.later_s = 0, 0.0
        return data, None

    def _order(self, wanted: Wanted) -> Iterable[tuple[str, _Giver, Ask]]:
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
            if giver.later_s <= now and (giver.holds(wanted.number) or giver.asked_s <= now - HOLDS_S)
        ]
        able.sort(key=lambda one: (not one[1].holds(wanted.number), one[1].failures, digest64(salt, one[0])))
        for peer, giver in able[:MEMBERS_ASKED_MAX]:
            yield short(peer), giver, self._of_member(peer, giver)

    def _member(self, peer: PeerId) -> _Giver:
        giver = self._members.get(peer)
        if giver is None:
            giver = self._members[peer] = _Giver()
            if len(self._members) > MEMBERS_MAX:
                self._members.popitem(last=False)
        return giver

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

    def _of_member(self, peer: PeerId, giver: _Giver) -> Ask:
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
                asked = wire.DataChunkRequest(sha256=wanted.sha256, offset=len(data), nbytes=nbytes, index=wanted.set)
                answer = await self._transport.call(
                    peer,
                    Call(wire.Request(run_id=self._run_id, data_chunk=asked)),
                    timeout_s=PIECE_TIMEOUT_S,
                    reply_bytes_max=PIECE_NBYTES,
                )
                told = answer.header.data_chunk
                giver.held, giver.asked_s = told.held, asyncio.get_running_loop().time()
                if not told.nbytes:
                    return None
                if told.nbytes > wanted.nbytes or (wanted.number is not None and told.nbytes != wanted.nbytes):
                    raise RemoteFault(f"offers {told.nbytes} bytes where {wanted.nbytes} are due")
                whole = told.nbytes
                piece = answer.tensors[0] if len(answer.tensors) == 1 else None
                if piece is None or piece.dtype != "u8" or not 0 < piece.nbytes <= whole - len(data):
                    raise RemoteFault("gives no piece of what it offers")
                data += piece.data
                self._telemetry.count(self._counter, piece.nbytes, source="peer")
            return bytes(data)

        return ask

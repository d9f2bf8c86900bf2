"""A content-addressed set on a node: its index and chunks, on this machine or fetched, verified either way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from swarmnode.data.chunk_store import ChunkCache, ChunkIndex, ChunkStore, find_index
from swarmnode.data.index import INDEX_NBYTES_MAX
from swarmnode.errors import Unavailable
from swarmnode.node.chunk_sources import ChunkSources, Wanted
from swarmnode.ports import Telemetry

PREFETCH_CHUNKS = 3
"""Chunks fetched ahead of those in work (guess: twelve MiB, an hour of text at 2,000 tokens a second)."""

SetIndex = TypeVar("SetIndex", bound=ChunkIndex)
Parsed = TypeVar("Parsed", covariant=True)


class Parse(Protocol[Parsed]):
    """Parses an index's bytes. Raises DataError unless they have the SHA-256 `expected` and are valid."""

    def __call__(self, raw: bytes, expected: bytes, origin: str) -> Parsed: ...


@dataclass(frozen=True, slots=True)
class SetKind(Generic[SetIndex]):
    """A kind of set: its manifest field, the file that holds its index, how that is parsed, and whether the places that
    the manifest names hold the index, too."""

    field: str
    file: str
    parse: Parse[SetIndex]
    published: bool


class ChunkSet(Generic[SetIndex]):
    """An index and its chunks. `open` fetches the index and `ensure` a chunk; both wait until a source gives it. Also a
    BlobSource (chunk_server.py)."""

    def __init__(
        self, kind: SetKind[SetIndex], digest: bytes, cache: ChunkCache, folder: Path | None, telemetry: Telemetry
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
        self._locks: dict[bytes, tuple[asyncio.Lock, int]] = {}

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
        async with _Turn(self._locks, self.digest):
            if self.store is not None:
                return
            file = self._kind.file
            found = await asyncio.to_thread(find_index, self._folder, self.digest, file)
            raw = found[1] if found is not None else None
            if raw is None:
                raw = await asyncio.to_thread(self._cache.read, self.digest, INDEX_NBYTES_MAX)
            if raw is None:
                raw = await self._obtain(Wanted.index(self.digest, file, published=self._kind.published))
                self._kept(await asyncio.to_thread(self._cache.write, self.digest, raw))
            index = self._kind.parse(raw, self.digest, self._kind.field)
            folder = found[0] if found is not None else self.folder_without_index
            self.store, self._raw = await asyncio.to_thread(ChunkStore, index, self._cache, folder), raw
        self.opened(index, "" if folder is None else f", in {folder}")

    @property
    def folder_without_index(self) -> Path | None:
        """The folder whose files are used although it holds no index; None: it is used only with its index."""
        return None

    def opened(self, index: SetIndex, where: str) -> None:
        """Tell that the index is here."""

    async def ensure(self, number: int) -> None:
        """Load or fetch chunk `number` into memory, without a time limit. Raises Unavailable as `open` does."""
        store = self.store
        assert store is not None, "the set is not open"
        if store.in_memory(number):
            return
        chunk = store.index.chunk(number)
        async with _Turn(self._locks, chunk.sha256):
            if store.in_memory(number) or await asyncio.to_thread(store.read, number) is not None:
                return
            try:
                data = await self._obtain(Wanted.of(chunk, self.digest))
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
            raise Unavailable(f"{what} of {self._kind.field} {self.digest.hex()[:16]} is not on this machine")

        def vain() -> None:
            if wanted.number is not None:
                self._in_vain.add(wanted.number)
                self._news.set()

        return await self._sources.obtain(wanted, vain)

    def _kept(self, reason: str | None) -> None:
        if reason is not None:
            self._telemetry.event("data.uncached", level="warning", reason=reason)


class _Turn:
    """A lock for each blob, so that concurrent callers fetch it once."""

    def __init__(self, locks: dict[bytes, tuple[asyncio.Lock, int]], sha256: bytes) -> None:
        self._locks = locks
        self._sha256 = sha256

    async def __aenter__(self) -> None:
        lock, waiting = self._locks.get(self._sha256, (asyncio.Lock(), 0))
        self._locks[self._sha256] = lock, waiting + 1
        try:
            await lock.acquire()
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._locks[self._sha256][0].release()
        self._leave()

    def _leave(self) -> None:
        lock, waiting = self._locks.pop(self._sha256)
        if waiting > 1:
            self._locks[self._sha256] = lock, waiting - 1

"""Stores the chunks of one data set on this machine and verifies each by its hash before use.

Chunks lie in a cache folder that all processes of the machine share: one file a chunk, named by its SHA-256, with the
least recently used removed first. They may also lie in a `data make` folder that this machine's user named. Remote
peers cannot choose a path: file names are hashes, or shard names of the index's form below the user's own folder. Data
that does not match its hash is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np

from swarmnode.base.errors import DataError, cause_of
from swarmnode.base.ports import Telemetry
from swarmnode.base.user_folders import CACHE_NBYTES
from swarmnode.data.index import INDEX_FILE, INDEX_NBYTES_MAX, Chunk

MEMORY_CHUNKS = 8
"""Chunks kept in memory: enough for the current group and the next (guess; 32 MiB)."""

_NAME = re.compile(r"[0-9a-f]{64}")
_PARTIAL = re.compile(r"\.[0-9a-f]{64}\.([0-9]{1,9})\.[0-9]+\.tmp")


@dataclass(frozen=True, slots=True)
class Held:
    """One file of the cache: its last use and its size."""

    used_ns: int
    nbytes: int


class ChunkCache:
    """Blobs by SHA-256 in `folder`, at most `nbytes_max` together. Safe for several processes and threads."""

    def __init__(self, folder: Path, nbytes_max: int = CACHE_NBYTES) -> None:
        self._folder = folder
        self.nbytes_max = nbytes_max

    def read(self, sha256: bytes, nbytes_max: int) -> bytes | None:
        """The verified blob, or None when it is not here. Removes a damaged blob."""
        path = self._folder / sha256.hex()
        data = read_regular(path, nbytes_max)
        if data is None:
            return None
        if hashlib.sha256(data).digest() != sha256:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return data

    def write(self, sha256: bytes, data: bytes) -> str | None:
        """Store `data`, whose hash the caller checked, and evict the least recently used blobs. Returns None, or the
        reason why it could not be stored."""
        if len(data) > self.nbytes_max:
            return f"{len(data)} bytes are more than the whole cache may hold (--data-cache)"
        partial = self._folder / f".{sha256.hex()}.{os.getpid()}.{threading.get_ident()}.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room(len(data))
            partial.write_bytes(data)
            partial.replace(self._folder / sha256.hex())
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            return f"{self._folder}: {cause_of(error)}"
        return None

    def held(self) -> dict[str, Held]:
        """All blobs by name, least recently used first."""
        sets: dict[str, Held] = {}
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        sets[entry.name] = Held(status.st_mtime_ns, status.st_size)
        return dict(sorted(sets.items(), key=lambda item: item[1].used_ns))

    def _make_room(self, nbytes: int) -> None:
        for left in self._folder.glob(".*.tmp"):
            if (match := _PARTIAL.fullmatch(left.name)) and not _lives(int(match[1])):
                with contextlib.suppress(OSError):
                    left.unlink()
        held = self.held()
        total = sum(one.nbytes for one in held.values())
        for name, one in held.items():
            if total + nbytes <= self.nbytes_max:
                return
            with contextlib.suppress(OSError):
                (self._folder / name).unlink()
            total -= one.nbytes


class ChunkIndex(Protocol):
    """An index of chunks numbered [0, count): of the run's text, or of the model that it starts from."""

    FIELD: ClassVar[str]  # of the manifest, with the SHA-256 of the index
    FILE: ClassVar[str]
    PUBLISHED: ClassVar[bool]  # web locations hold the index, too
    BARE_FOLDER: ClassVar[bool]  # a folder with the files alone is used, without an index: every chunk is verified

    @classmethod
    def parse(cls, raw: bytes, expected: bytes, origin: str) -> Self:
        """The index in `raw`. Raises DataError unless it has the SHA-256 `expected` and is valid."""
        ...

    def tell_opened(self, telemetry: Telemetry, note: str) -> None: ...

    @property
    def count(self) -> int: ...

    def chunk(self, number: int) -> Chunk: ...


SetIndex = TypeVar("SetIndex", bound=ChunkIndex)


class ChunkStore(Generic[SetIndex]):
    """The chunks of `index` that are on this machine."""

    def __init__(self, index: SetIndex, cache: ChunkCache, folder: Path | None = None) -> None:
        """`folder` is one with the index's files that this machine's user named, or None."""
        self.index = index
        self.cache = cache
        self._folder = folder
        self._memory: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._absent: set[int] = set()  # chunks that were missing or damaged when read from the folder
        self._numbers: dict[bytes, int] | None = None
        self._held = np.zeros(index.count, np.bool_)
        self.scan()

    def scan(self) -> None:
        """Check by name and size alone which chunks are here. Blocks for some milliseconds."""
        here = self.cache.held()
        nbytes = dict[str, int]()
        for number in range(self.index.count):
            chunk = self.index.chunk(number)
            if self._folder is not None and chunk.shard not in nbytes:
                nbytes[chunk.shard] = _regular_nbytes(self._folder / chunk.shard)
            in_folder = nbytes.get(chunk.shard, 0) >= chunk.offset + chunk.nbytes and number not in self._absent
            self._held[number] = in_folder or chunk.sha256.hex() in here

    def held_bits(self) -> bytes:
        """A bitmap, least significant bit first: whether chunk i was here at the last scan or arrived since."""
        return np.packbits(self._held, bitorder="little").tobytes()

    def number_of(self, sha256: bytes) -> int | None:
        """The number of the chunk with this hash, or None if the index has no such chunk."""
        if self._numbers is None:
            self._numbers = {self.index.chunk(number).sha256: number for number in range(self.index.count)}
        return self._numbers.get(sha256)

    def in_memory(self, number: int) -> bool:
        """Whether the chunk is in memory, so that `read` does not touch the disk."""
        return number in self._memory

    def read(self, number: int) -> bytes | None:
        """The verified chunk `number`, or None when it is not here. Blocks for some milliseconds."""
        with self._lock:
            if (known := self._memory.get(number)) is not None:
                self._memory.move_to_end(number)
                return known
        chunk = self.index.chunk(number)
        data = self.cache.read(chunk.sha256, chunk.nbytes)
        if data is None and number not in self._absent and self._folder is not None:
            data = read_regular(self._folder / chunk.shard, chunk.nbytes, chunk.offset)
            if data is None or hashlib.sha256(data).digest() != chunk.sha256:
                self._absent.add(number)
                data = None
        if data is None:
            self._held[number] = False
        else:
            self._remember(number, data)
        return data

    def put(self, number: int, data: bytes) -> str | None:
        """Store chunk `number` in memory and in the cache. Returns None, or the reason why the cache failed.
        Raises DataError unless `data` matches the hash in the index."""
        chunk = self.index.chunk(number)
        if len(data) != chunk.nbytes or hashlib.sha256(data).digest() != chunk.sha256:
            raise DataError(f"chunk {number} of {chunk.shard}: what came does not match its hash")
        self._remember(number, data)
        return self.cache.write(chunk.sha256, data)

    @property
    def spoilt(self) -> int:
        """Chunks that the folder should hold but does not, or with other bytes, as far as they were read."""
        return len(self._absent)

    def forget(self) -> None:
        """Free the chunks in memory."""
        with self._lock:
            self._memory.clear()

    def _remember(self, number: int, data: bytes) -> None:
        with self._lock:
            self._memory[number] = data
            self._held[number] = True
            self._memory.move_to_end(number)
            while len(self._memory) > MEMORY_CHUNKS:
                self._memory.popitem(last=False)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _regular_nbytes(path: Path) -> int:
    """The size of the file, or 0 when it is not a regular file."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def find_index(folder: Path | None, expected: bytes, file: str = INDEX_FILE) -> tuple[Path, bytes] | None:
    """Find the set whose index `file` has the hash `expected` in `folder` or `folder`/data. Returns (its folder, its
    index's bytes)."""
    for place in () if folder is None else (folder, folder / "data"):
        raw = read_regular(place / file, INDEX_NBYTES_MAX)
        if raw is not None and hashlib.sha256(raw).digest() == expected:
            return place, raw
    return None


def other_set(folder: Path, expected: bytes) -> str | None:
    """The reason why `folder` does not hold the data set with hash `expected`, or None when it does."""
    if find_index(folder, expected) is not None:
        return None
    for place in (folder, folder / "data"):
        raw = read_regular(place / INDEX_FILE, INDEX_NBYTES_MAX)
        if raw is not None:
            digest = hashlib.sha256(raw).hexdigest()
            return f"{place} holds data set {digest[:16]}..., the run is on {expected.hex()[:16]}..."
    return f"{folder} holds no data set; the run is on {expected.hex()[:16]}..."


def read_regular(path: Path, nbytes_max: int, offset: int = 0) -> bytes | None:
    """At most `nbytes_max` bytes of the regular file `path` from `offset`. None when the file cannot be read, or is a
    pipe, a device or a folder. O_NONBLOCK keeps the open from blocking on a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        parts = list[bytes]()
        left = nbytes_max
        while left and (part := os.pread(descriptor, left, offset)):
            parts.append(part)
            left -= len(part)
            offset += len(part)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(parts)

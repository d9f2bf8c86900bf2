"""The cached tokens of a run's text: little-endian ids, then the SHA-256 of their bytes. Readers memory-map them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import pathlib
import tempfile
from types import TracebackType
from typing import NamedTuple, cast

import numpy as np

from swarmnode.atomic_file import write_errors
from swarmnode.data.tokens import Tokens, dtype_of
from swarmnode.errors import DataError, os_errors

HASH_NBYTES = 32
SUFFIX = ".tokens"
VERIFY_BYTES_MAX = 256 << 20
"""Files up to this size are hashed when opened: 0.13 s at most (0.5 s/GB, measured)."""
CACHE_ADVICE = "free space there, or choose another --cache"


class Shard(NamedTuple):
    """An open file of tokens: `tokens` is a read-only memory map, [count]; `digest` the SHA-256 of their bytes."""

    tokens: Tokens
    digest: bytes


class ShardWriter:
    """Writes a shard to a temporary file and renames it when the `with` block ends without an error.

    Several processes may write the same shard: the last one wins, and readers see one or the other. A writer locks its
    temporary file, so the next writer can remove those of killed ones.
    """

    def __init__(self, path: pathlib.Path, vocabulary: int) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._dtype = dtype_of(vocabulary)
        self._hash = hashlib.sha256()
        self.count = 0

    def __enter__(self) -> ShardWriter:
        sweep(self._path.parent)
        with self._write_errors(HASH_NBYTES):
            self._open_locked()
        return self

    def _open_locked(self) -> None:
        """Create and lock a temporary file beside the shard. If a sweeper removes it before the lock, make another."""
        while True:
            descriptor, name = tempfile.mkstemp(prefix=f".{self._path.name}.", suffix=".tmp", dir=self._path.parent)
            self._partial, self._file = pathlib.Path(name), os.fdopen(descriptor, "wb")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                os.fchmod(descriptor, 0o644)
                return
            self._file.close()

    def write(self, tokens: Tokens) -> None:
        """Append `tokens`, [n]. Raises DataError for an id outside the vocabulary, or when the disk is full."""
        if tokens.size and int(tokens.max()) >= self._vocabulary:
            raise DataError(f"{self._path}: token {int(tokens.max())} is outside the vocabulary of {self._vocabulary}")
        raw = np.ascontiguousarray(tokens, dtype=self._dtype).data.cast("B") if tokens.size else b""
        with self._write_errors(self._nbytes + len(raw)):
            self._file.write(raw)
        self._hash.update(raw)
        self.count += tokens.size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with self._write_errors(self._nbytes):
                    self._file.write(self._hash.digest())
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    self._partial.replace(self._path)
        finally:
            self._partial.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # closing flushes again, which a full disk has already refused
                self._file.close()

    def _write_errors(self, nbytes: int) -> contextlib.AbstractContextManager[None]:
        what = f"{self._path}: cannot be written"
        return write_errors(self._path, nbytes, CACHE_ADVICE, kind=DataError, what=what)

    @property
    def _nbytes(self) -> int:
        return self.count * self._dtype.itemsize + HASH_NBYTES


def sweep(folder: pathlib.Path) -> None:
    """Make `folder` and remove the temporary files of dead writers. Raises DataError when it cannot be made."""
    with write_errors(folder, None, CACHE_ADVICE, kind=DataError, what=f"{folder}: cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    for left in sorted(folder.glob(f".*{SUFFIX}.*.tmp")):
        with contextlib.suppress(OSError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def open_shard(path: pathlib.Path, vocabulary: int) -> Shard:
    """The tokens at `path`, ids below `vocabulary`, memory-mapped; files up to VERIFY_BYTES_MAX are hashed. Raises
    DataError where it cannot be read, is cut short or does not match its hash."""
    dtype = dtype_of(vocabulary)
    with os_errors(DataError, f"{path}: cannot be read"), path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size - HASH_NBYTES
        file.seek(max(0, nbytes))
        digest = file.read(HASH_NBYTES)
    if nbytes < 0 or nbytes % dtype.itemsize:
        raise DataError(f"{path}: cut short or damaged: {nbytes + HASH_NBYTES} bytes")
    count = nbytes // dtype.itemsize
    tokens = cast(Tokens, np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype))
    # hashlib needs a buffer, which the ndarray view gives. An empty file has nothing to map.
    raw = np.asarray(tokens).data if count else b""
    if nbytes <= VERIFY_BYTES_MAX and hashlib.sha256(raw).digest() != digest:
        raise DataError(f"{path}: damaged: its tokens do not match their hash")
    forget_pages(tokens)
    return Shard(tokens, digest)


def forget_pages(tokens: Tokens) -> None:
    """Release the mapped pages of `tokens` (they stay in the system's cache) and turn off read-ahead. Samples are drawn
    at random, and a node's memory is better spent on tapes. Does nothing for tokens in memory."""
    mapped = getattr(tokens, "_mmap", None)
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_DONTNEED)
        mapped.madvise(mmap.MADV_RANDOM)

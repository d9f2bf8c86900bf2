"""The token file format: a header of 128 bytes, then little-endian ids. Readers memory-map it.

| bytes | what |
| --- | --- |
| 0..8 | magic `SWARMTOK` |
| 8..12 | version, 1 |
| 12..16 | bytes of a token: 2 (uint16) or 4 (uint32) |
| 16..24 | vocabulary: every id is below |
| 24..32 | count of tokens |
| 32..64 | SHA-256 that names the tokenizer (`Tokenizer.digest`) |
| 64..96 | SHA-256 of the tokens' bytes |
| 96..128 | zeros |
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import pathlib
import struct
import tempfile
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import numpy as np

from swarmnode.atomic_file import raise_if_full
from swarmnode.data.tokens import Tokens, dtype_of
from swarmnode.errors import DataError

MAGIC = b"SWARMTOK"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ32s32s32x")
SUFFIX = ".tokens"
VERIFY_BYTES_MAX = 256 << 20
"""Shards up to this size are hashed when opened: 0.13 s at most (0.5 s/GB, measured); larger ones on demand."""
CACHE_ADVICE = "free space there, or choose another --cache"


@dataclass(frozen=True, slots=True)
class Shard:
    """An open shard: `tokens` is a read-only memory map, [count]."""

    path: pathlib.Path
    tokens: Tokens
    vocabulary: int
    tokenizer: bytes
    payload_digest: bytes


class ShardWriter:
    """Writes a shard to a temporary file and renames it when the `with` block ends without an error.

    Several processes may write the same shard: the last one wins, and readers see one or the other. A writer locks its
    temporary file, so the next writer can remove those of killed ones. `keep` = False leaves no shard.
    """

    def __init__(self, path: pathlib.Path, vocabulary: int, tokenizer: bytes) -> None:
        self._path = path
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._dtype = dtype_of(vocabulary)
        self._hash = hashlib.sha256()
        self.count = 0
        self.keep = True

    def __enter__(self) -> ShardWriter:
        sweep(self._path.parent)
        try:
            self._open_locked()
        except OSError as error:
            raise_if_full(self._path, error, HEADER.size, CACHE_ADVICE)
            raise DataError(f"{self._path}: cannot be written: {error.strerror}") from error
        self._file.write(bytes(HEADER.size))
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
        try:
            self._file.write(raw)
        except OSError as error:
            raise_if_full(self._path, error, self._nbytes + len(raw), CACHE_ADVICE)
            raise DataError(f"{self._partial}: cannot be written: {error.strerror}") from error
        self._hash.update(raw)
        self.count += tokens.size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.keep:
                self._file.seek(0)
                self._file.write(self._header())
                self._file.flush()
                os.fsync(self._file.fileno())
                self._partial.replace(self._path)
        except OSError as failure:
            raise_if_full(self._path, failure, self._nbytes, CACHE_ADVICE)
            raise DataError(f"{self._path}: cannot be written: {failure.strerror}") from failure
        finally:
            self._partial.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # closing flushes again, which a full disk has already refused
                self._file.close()

    @property
    def _nbytes(self) -> int:
        return HEADER.size + self.count * self._dtype.itemsize

    def _header(self) -> bytes:
        width = self._dtype.itemsize
        return HEADER.pack(MAGIC, VERSION, width, self._vocabulary, self.count, self._tokenizer, self._hash.digest())


def sweep(folder: pathlib.Path) -> None:
    """Make `folder` and remove the temporary files of dead writers. Raises DataError when it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise_if_full(folder, error, None, CACHE_ADVICE)
        raise DataError(f"{folder}: cannot be made: {error.strerror}") from error
    for left in sorted(folder.glob(f".*{SUFFIX}.*.tmp")):
        with contextlib.suppress(OSError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def open_shard(path: pathlib.Path, *, tokenizer: bytes, vocabulary: int, verify: bool | None = None) -> Shard:
    """The shard at `path`, memory-mapped, made by `tokenizer` with at most `vocabulary` ids.

    `verify` None hashes the tokens of files up to VERIFY_BYTES_MAX. Raises DataError (path, what, what to do) when the
    file is not a shard, is cut short or too long, is of another tokenizer, or does not match its hash.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER.size)
            nbytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) < HEADER.size or raw[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: not a token shard (no {MAGIC.decode()} at its start); make it again, or take it out")
    _, version, width, made_vocabulary, count, made_by, payload_digest = HEADER.unpack(raw)
    if version != VERSION:
        raise DataError(f"{path}: shard of version {version}; this swarmnode reads {VERSION}: make the shard again")
    if width not in (2, 4):
        raise DataError(f"{path}: corrupt header: {width} bytes a token, allowed are 2 and 4; make the shard again")
    if nbytes != HEADER.size + count * width:
        raise DataError(
            f"{path}: {nbytes} bytes, but its header announces {HEADER.size + count * width}: cut short or damaged; "
            "fetch or make the shard again"
        )
    if made_by != tokenizer:
        raise DataError(
            f"{path}: made by another tokenizer ({made_by.hex()[:16]}..., this run's is {tokenizer.hex()[:16]}...); "
            "make the shard again, or correct data.tokenizer"
        )
    if made_vocabulary > vocabulary:
        raise DataError(f"{path}: ids up to {made_vocabulary - 1}, but model.vocabulary is {vocabulary}; raise it")
    dtype = np.dtype("<u2") if width == 2 else np.dtype("<u4")
    tokens = cast(
        Tokens,
        np.memmap(path, dtype=dtype, mode="r", offset=HEADER.size, shape=(count,)) if count else np.empty(0, dtype),
    )
    if verify or (verify is None and nbytes <= VERIFY_BYTES_MAX):
        # hashlib needs a buffer, which the ndarray view gives. An empty shard has nothing to map.
        digest = hashlib.sha256(np.asarray(tokens).data if count else b"").digest()
        if digest != payload_digest:
            raise DataError(f"{path}: damaged: its tokens do not match the hash in its header; make the shard again")
    forget_pages(tokens)
    return Shard(path, tokens, made_vocabulary, made_by, payload_digest)


def forget_pages(tokens: Tokens) -> None:
    """Release the mapped pages of `tokens` (they stay in the system's cache) and turn off read-ahead. Samples are drawn
    at random, and a node's memory is better spent on tapes. Does nothing for tokens in memory."""
    mapped = getattr(tokens, "_mmap", None)
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_DONTNEED)
        mapped.madvise(mmap.MADV_RANDOM)

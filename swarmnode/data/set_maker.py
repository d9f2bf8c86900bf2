"""Makes a data set (index.py) from text: shuffled by document, with a part held out. Resumable after a kill.

Each document ends with a token that no document contains, so that this token alone tells where documents end: the
tokenizer's end of text where that is so, else another token that no text has, else one more id.

`data make` runs two passes. The first tokenises pieces of work one by one and keeps each (token_parts.py). The second
writes the documents of all pieces to shards, in an order by hash. The files of the first pass are removed once the
index is written.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from swarmnode.base import file_lock
from swarmnode.base.atomic_file import write_errors, write_whole
from swarmnode.base.errors import DataError, UsageError
from swarmnode.base.ids import digest, digest64
from swarmnode.data.chat_template import ANSWERS, ChatTemplate
from swarmnode.data.document_row import DOCUMENT_BYTES_MAX, BadRows, DocumentSpan, Placed, Reading
from swarmnode.data.document_source import documents, find_work
from swarmnode.data.index import (
    CHUNK_NBYTES,
    INDEX_FILE,
    Index,
    ShardEntry,
    Split,
    chunk_nbytes,
    parse_index,
)
from swarmnode.data.message import counts
from swarmnode.data.sampler import mixed
from swarmnode.data.tokens import HuggingFaceTokenizer, Tokenizer, Tokens, dtype_of

WORK_FOLDER = ".parts"
PLAN_FILE = "plan.json"
LOCK_FILE = "lock"
CHUNKS_MIN = 64
"""Small sets are cut finer, so that several feeders have something to do (guess) ..."""
CHUNK_TOKENS_MIN = (1 << 16) + 1
"""... but no finer than this (guess: windows of long contexts have to fit)."""
HELD_OUT_CHUNK_TOKENS = (1 << 17) + 1
"""Tokens of a validation chunk: 64 samples of 2,048 tokens, so that a first validation need not fetch more."""
SHARD_CHUNKS = 256
SCAN_TOKENS = 1 << 20

Report = Callable[[int, int], None]
"""Told of (bytes of text that are tokenised, of how many); of 0: not known."""


# Tokenises documents, one piece of work at a time, and keeps each result on disk as soon as it is done.
#
# A part is up to four files: `<name>.tokens`, `<name>.npy` with a row for each document, if it has conversations
# `<name>.mask` (one byte a token: does it count as a target?), and if rows were left out `<name>.bad`.
# `<name>.npy` is written last and marks a complete part. The token that ends a document is not in it: set_maker.py
# chooses one that no document contains.

BATCH_DOCUMENTS = 512
BATCH_BYTES = 8 << 20
"""Text tokenised at once: enough for all cores, little enough for memory (guess)."""
ROW = np.dtype([("first", "<i8"), ("count", "<i8"), ("rank", "<u8"), ("end_counts", "?")])
"""A document's row: position of its first token in the part, number of tokens, hash of its text, and whether the token
that ends it is a target: not where the last turn of a conversation is a question, which the model does not write."""

Rows = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Encoding:
    """Turns text into ids. With `special`, the written form of a special token in plain text is that token."""

    tokenizer: Tokenizer
    template: ChatTemplate
    special: bool = False

    @property
    def dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        """The form of tokens in parts, with room for one more id, which may end the documents."""
        return dtype_of(self.tokenizer.vocabulary + 1)


@dataclass(frozen=True, slots=True)
class Part:
    """A memory-mapped part. With `mask` None, every token counts."""

    tokens: Tokens
    rows: Rows
    mask: npt.NDArray[np.uint8] | None


def part_name(work: DocumentSpan, reading: Reading, encoding: Encoding) -> str:
    """The part's file name: a hash of everything that its content depends on. The source's weight is not part of it."""
    what: tuple[str | int, ...] = (work.kind, *work.files, work.first, work.last, work.of, work.version)
    how: tuple[str | int, ...] = (*reading.keys, reading.cut_nbytes, reading.split, reading.encoding)
    who = (encoding.tokenizer.digest, encoding.template.source, encoding.special)
    return digest("part", 4, *map(os.fsencode, map(str, (*what, *how))), *map(str, who)).hex()[:32]


def make_part(folder: Path, name: str, work: DocumentSpan, reading: Reading, encoding: Encoding, bad_max: int) -> None:
    """Write the part unless it exists. Raises DataError, also when more than `bad_max` rows would be left out."""
    table = folder / f"{name}.npy"
    if not table.exists():
        bad = BadRows(bad_max)
        rows = _write_part(folder, name, work, reading, encoding, bad)
        if bad.count or bad.empty:
            write_whole(folder / f"{name}.bad", json.dumps([bad.count, bad.empty, bad.lines]).encode())
        write_whole(table, lambda file: np.save(file, rows))


def left_out(folder: Path, name: str) -> BadRows:
    """The rows that were left out of a part."""
    path = folder / f"{name}.bad"
    count, empty, lines = json.loads(path.read_bytes()) if path.exists() else (0, 0, [])
    return BadRows(count, count, empty, lines)


def open_part(folder: Path, name: str, encoding: Encoding) -> Part:
    """The part, memory-mapped."""
    rows = np.load(folder / f"{name}.npy", allow_pickle=False)
    if not len(rows):
        return Part(np.empty(0, encoding.dtype), rows, None)
    mask = folder / f"{name}.mask"
    return Part(
        np.memmap(folder / f"{name}.tokens", encoding.dtype, "r"),
        rows,
        np.memmap(mask, np.uint8, "r") if mask.exists() else None,
    )


def _write_part(
    folder: Path, name: str, work: DocumentSpan, reading: Reading, encoding: Encoding, bad: BadRows
) -> Rows:
    """Write the part's tokens and mask. Returns its table. Raises DataError when they cannot be written."""
    rows = list[tuple[int, int, int, bool]]()
    at = 0
    mask_path = folder / f"{name}.mask"
    with write_errors(folder, kind=DataError, what=f"{folder}: cannot be written"):
        with (folder / f"{name}.tokens").open("wb") as file, mask_path.open("wb") as masks:
            counted = True
            for rank, tokens, mask, end_counts in _encoded(work, reading, encoding, bad):
                file.write(tokens.astype(encoding.dtype, copy=False).data.cast("B"))
                if mask is not None and counted:  # earlier documents had no mask: all of their tokens count
                    masks.write(b"\1" * at)
                    counted = False
                if not counted:
                    masks.write(b"\1" * tokens.size if mask is None else mask.tobytes())
                rows.append((at, tokens.size, rank, end_counts))
                at += tokens.size
            for one in (file, masks):
                one.flush()
                os.fsync(one.fileno())
        if counted:
            mask_path.unlink()
    return np.array(rows, ROW)


Encoded = tuple[int, Tokens, npt.NDArray[np.uint8] | None, bool]


def _encoded(work: DocumentSpan, reading: Reading, encoding: Encoding, bad: BadRows) -> Iterator[Encoded]:
    """Yields (rank, tokens, mask, whether its end counts) of each document. Reads the next batch while it tokenises the
    current one."""
    batches = _batches(documents(work, reading, bad))
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = reader.submit(next, batches, None)
            yield from _encode(batch, encoding, bad)


def _batches(source: Iterator[Placed]) -> Iterator[list[Placed]]:
    batch = list[Placed]()
    nbytes = 0
    for placed in source:
        batch.append(placed)
        nbytes += len(placed.document) if isinstance(placed.document, str) else 4096
        if len(batch) >= BATCH_DOCUMENTS or nbytes >= BATCH_BYTES:
            yield batch
            batch = []
            nbytes = 0
    if batch:
        yield batch


def _encode(batch: Sequence[Placed], encoding: Encoding, bad: BadRows) -> Iterator[Encoded]:
    tokenizer = encoding.tokenizer
    texts = [one.document for one in batch if isinstance(one.document, str)]
    plain = iter(tokenizer.encode_all(texts, special=encoding.special))
    for placed in batch:
        document = placed.document
        if isinstance(document, str):
            yield digest64("document", document.encode()), next(plain), None, True
            continue
        try:
            text, tokens, mask = encoding.template.encode(document, tokenizer)
        except DataError as error:
            bad.add(placed.where, str(error))
            continue
        answered = document[-1]["role"] == ANSWERS and counts(document[-1])
        yield digest64("document", text.encode()), tokens, None if mask.all() and answered else mask, answered


@dataclass(frozen=True, slots=True)
class MakeOptions:
    """Options of `data make`. `weights`: copies of each document, one weight a source; .5 takes about half, chosen by
    hash. With `chunk_tokens` None, the chunk size follows from the size of the set."""

    sources: tuple[str, ...]
    weights: tuple[float, ...] = ()
    reading: Reading = field(default_factory=Reading)
    validation: float = 0.01
    seed: int = 0
    chunk_tokens: int | None = None
    skip_bad: int = 0  # files and rows that may be left out


@dataclass(frozen=True, slots=True)
class _Order:
    """The documents of a split in the order they are written: part, first token, count, and whether its end counts."""

    part: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    end_counts: npt.NDArray[np.bool_]

    @property
    def tokens(self) -> int:
        """All of them, with the token that ends each document."""
        return int(self.count.sum()) + self.count.size


@dataclass(frozen=True, slots=True)
class _Ending:
    """The form of written documents: the token that ends each, whether it may count, and whether there is a mask."""

    token: int
    counts: bool
    masked: bool
    dtype: np.dtype[Any]


def make(
    out: Path, options: MakeOptions, encoding: Encoding, beside: Callable[[bool], Mapping[str, bytes]], report: Report
) -> tuple[Index, BadRows]:
    """Write the data set of `options` to the folder `out`; returns its index, and what was left out. Resumes where an
    earlier call with the same options was killed. `beside`: the tokenizer's files by name, which lie beside the shards,
    of a set with or without a loss mask.

    Raises UsageError when `out` holds something else, DataError with file, line and what to do, DiskFull
    when the disk is, NotPermitted when a file cannot be written otherwise.
    """
    if options.weights and len(options.weights) != len(options.sources):
        raise UsageError(f"--weight: {len(options.weights)} weights for {len(options.sources)} sources; give one each")
    bad = BadRows(options.skip_bad)
    works = find_work(options.sources, options.reading, bad)
    total = sum(work.nbytes for work in works)
    cut = min(DOCUMENT_BYTES_MAX, max(1 << 10, total // CHUNKS_MIN)) if total else DOCUMENT_BYTES_MAX
    reading = replace(options.reading, cut_nbytes=min(options.reading.cut_nbytes, cut))
    folder = out / WORK_FOLDER
    _begin(out, folder, options, encoding)
    with _alone(out, folder):
        names = list[str]()
        done = 0
        for work in works:
            names.append(part_name(work, reading, encoding))
            make_part(folder, names[-1], work, reading, encoding, options.skip_bad)
            bad.merge(left_out(folder, names[-1]))
            done += work.nbytes
            report(done, total)
        parts = [open_part(folder, name, encoding) for name in names]
        weights = [options.weights[work.source] if options.weights else 1.0 for work in works]
        index = _write(out, parts, weights, options, encoding)
    for name, kept in beside(index.loss_mask).items():
        write_whole(out / name, kept)
    raw = index.canonical()
    write_whole(out / INDEX_FILE, raw)
    shutil.rmtree(folder)
    return parse_index(raw, origin=str(out / INDEX_FILE)), bad


@contextlib.contextmanager
def _alone(out: Path, folder: Path) -> Iterator[None]:
    """Hold the lock of the working folder of `out`. Raises UsageError if another process does, or if the disk keeps no
    locks, DataError if the folder cannot be written."""
    remedy = "make the data set on a local disk, then copy it"
    try:
        with write_errors(folder, kind=DataError, what=f"{folder}: cannot be used"):
            lock = file_lock.take(folder / LOCK_FILE, file_lock.this_process(), remedy)
    except file_lock.LockHeld as held:
        raise UsageError(f"{out}: another `data make` (pid {held.holder}) is at work there") from None
    try:
        yield
    finally:
        os.close(lock)


def _begin(out: Path, folder: Path, options: MakeOptions, encoding: Encoding) -> None:
    """Claim `out` for this set, or check that an earlier call with the same options claimed it. Raises UsageError when
    `out` holds another set, DataError when it cannot be used."""
    told = (repr(options.reading), options.validation, options.seed, options.chunk_tokens or 0)
    how = (encoding.tokenizer.digest, encoding.template.source, str(encoding.special))
    plan = digest(*map(os.fsencode, options.sources), *options.weights, *told, *how).hex()
    if (out / INDEX_FILE).exists():
        raise UsageError(f"{out} holds a data set already; choose another folder, or remove it")
    with write_errors(folder, kind=DataError, what=f"{folder}: cannot be used"):
        folder.mkdir(parents=True, exist_ok=True)
        begun = (folder / PLAN_FILE).read_text() if (folder / PLAN_FILE).exists() else ""
    if begun:
        if begun != json.dumps({"plan": plan}):
            raise UsageError(
                f"{out} holds the beginning of another data set: say the same as then, choose another folder, or remove"
                f" {folder}"
            )
    elif any(out.glob("*.bin")):
        raise UsageError(f"{out} holds shards without an index; choose another folder")
    else:
        write_whole(folder / PLAN_FILE, json.dumps({"plan": plan}).encode())


def _write(
    out: Path,
    parts: Sequence[Part],
    weights: Sequence[float],
    options: MakeOptions,
    encoding: Encoding,
) -> Index:
    train, held_out = _orders(parts, weights, options)
    end = _end_token(parts, encoding.tokenizer)
    counts = encoding.tokenizer.separator in (None, end)
    masked = not counts or any(part.mask is not None for part in parts)
    vocabulary = max(encoding.tokenizer.vocabulary, end + 1)
    shape = _Ending(end, counts, masked, dtype_of(vocabulary))
    if not held_out.count.size or not train.count.size:
        of = train.tokens + held_out.tokens
        raise DataError(f"{of} tokens in {train.count.size + held_out.count.size} documents: too little text to split")
    splits = []
    for name, order, most in (("train", train, None), ("validation", held_out, HELD_OUT_CHUNK_TOKENS)):
        chunk_tokens = options.chunk_tokens or _chunk_tokens(order.tokens, vocabulary, most)
        shards = []
        for number, (tokens, mask) in enumerate(_shards(parts, order, chunk_tokens, shape)):
            entry = ShardEntry(f"{name}-{number:05}.bin", tokens.size, b"")
            shards.append(_write_shard(out, entry, tokens, mask, chunk_tokens))
        splits.append(Split(chunk_tokens, order.count.size, tuple(shards)))
    return Index(encoding.tokenizer.digest, vocabulary, end, masked, splits[0], splits[1])


def _end_token(parts: Sequence[Part], tokenizer: Tokenizer) -> int:
    """The token that ends documents and is in none of them: the tokenizer's end of text, another special one or, of a
    tokenizer with an end of text, whose model may have no room for one more, the last one that is free; else a new one.
    """
    seen = np.zeros(tokenizer.vocabulary, bool)
    for part in parts:
        for first in range(0, part.tokens.size, SCAN_TOKENS):
            seen[part.tokens[first : first + SCAN_TOKENS]] = True
    able = [tokenizer.separator, *(tokenizer.special if isinstance(tokenizer, HuggingFaceTokenizer) else ())]
    if tokenizer.separator is not None:
        able += np.flatnonzero(~seen)[::-1].tolist()
    return next((one for one in able if one is not None and not seen[one]), tokenizer.vocabulary)


def _chunk_tokens(tokens: int, vocabulary: int, most: int | None) -> int:
    """Tokens of a chunk: those of 4 MiB, or `most`. Small sets get up to CHUNKS_MIN smaller chunks of equal size."""
    largest = most or CHUNK_NBYTES // chunk_nbytes(1, vocabulary, loss_mask=False) + 1
    if tokens >= CHUNKS_MIN * largest:
        return largest
    chunks = max(1, min(CHUNKS_MIN, tokens // CHUNK_TOKENS_MIN), -(-tokens // largest))
    return max(2, -(-tokens // chunks))


def _orders(parts: Sequence[Part], weights: Sequence[float], options: MakeOptions) -> tuple[_Order, _Order]:
    """Training and held-out documents in an order by hash. Training documents are copied by weight. Documents with the
    same text are all held out or all trained on."""
    part = np.concatenate([np.full(len(one.rows), number, np.int64) for number, one in enumerate(parts)])
    rows = np.concatenate([one.rows for one in parts])
    rank = rows["rank"].astype(np.uint64)
    weight = np.concatenate([np.full(len(one.rows), weights[number]) for number, one in enumerate(parts)])
    place = mixed(rank ^ np.uint64(1)) / 2.0**64
    copies = np.floor(weight).astype(np.int64) + (mixed(rank ^ np.uint64(2)) / 2.0**64 < weight % 1.0)
    counted = np.concatenate([_counted(one) for one in parts]) * (copies > 0)
    below = _held_out_below(place, counted, options.validation)
    picked = np.repeat(np.arange(rank.size), copies)
    copy = np.arange(picked.size) - np.repeat(np.cumsum(copies) - copies, copies)
    key = mixed(rank[picked] ^ mixed(copy.astype(np.uint64) * np.uint64(3) + np.uint64(options.seed)))
    held_out = place[picked] < below
    # A held-out document is written once, whatever its weight.
    chosen = (picked[~held_out][np.argsort(key[~held_out], kind="stable")], picked[held_out & (copy == 0)])
    first = chosen[1][np.argsort(mixed(rank[chosen[1]] ^ np.uint64(4)), kind="stable")]
    orders = [
        _Order(part[some], *(rows[key][some] for key in ROW.names or () if key != "rank"))
        for some in (chosen[0], first)
    ]
    return orders[0], orders[1]


def _counted(part: Part) -> npt.NDArray[np.int64]:
    """The tokens of each document that count as targets."""
    rows = part.rows
    if part.mask is None or not len(rows):
        return np.array(rows["count"], np.int64)
    sums = np.concatenate([[0], np.cumsum(part.mask, dtype=np.int64)])
    return np.asarray(sums[rows["first"] + rows["count"]] - sums[rows["first"]], np.int64)


def _held_out_below(place: npt.NDArray[np.float64], counted: npt.NDArray[np.int64], wanted: float) -> float:
    """The `place` below which documents are held out: the share `wanted` of the `counted` tokens, and one document at
    least. At least one is trained on."""
    if place.size < 2:
        return wanted
    order = np.argsort(place, kind="stable")
    total = np.cumsum(counted[order])
    ascending = place[order]
    at = min(int(np.searchsorted(total, wanted * int(total[-1]))) + 1, place.size - 1)
    copies = int(np.searchsorted(ascending, ascending[0], side="right"))  # of one text are all held out, or none
    return float(ascending[min(max(at, copies), place.size - 1)])


def _shards(
    parts: Sequence[Part], order: _Order, chunk_tokens: int, ending: _Ending
) -> Iterator[tuple[npt.NDArray[np.uint16] | npt.NDArray[np.uint32], npt.NDArray[np.uint8] | None]]:
    """Yields (tokens, mask) of each shard: the documents one after the other, each with the token that ends it, cut
    every SHARD_CHUNKS chunks."""
    size = SHARD_CHUNKS * chunk_tokens
    ends = np.cumsum(order.count + 1)
    total = int(ends[-1]) if ends.size else 0
    for begin in range(0, total, size):
        length = min(size, total - begin)
        tokens = np.empty(length, ending.dtype)
        mask = np.ones(length, np.uint8) if ending.masked else None
        at = int(np.searchsorted(ends, begin, side="right"))
        filled = 0
        while filled < length:
            part = parts[int(order.part[at])]
            count = int(order.count[at])
            skipped = max(0, begin - int(ends[at] - count - 1))
            first = int(order.first[at]) + skipped
            taken = min(count - skipped, length - filled)
            tokens[filled : filled + taken] = part.tokens[first : first + taken]
            if mask is not None and part.mask is not None:
                mask[filled : filled + taken] = part.mask[first : first + taken]
            filled += taken
            if filled < length:
                tokens[filled] = ending.token
                if mask is not None:
                    mask[filled] = ending.counts and order.end_counts[at]
                filled += 1
                at += 1
        yield tokens, mask


def _write_shard(
    out: Path,
    entry: ShardEntry,
    tokens: npt.NDArray[np.uint16] | npt.NDArray[np.uint32],
    mask: npt.NDArray[np.uint8] | None,
    chunk_tokens: int,
) -> ShardEntry:
    """Write one shard atomically."""
    hashes = list[bytes]()

    def write(file: BinaryIO) -> None:
        for first in range(0, tokens.size, chunk_tokens):
            raw = tokens[first : first + chunk_tokens].tobytes()
            if mask is not None:
                raw += np.packbits(mask[first : first + chunk_tokens], bitorder="little").tobytes()
            hashes.append(hashlib.sha256(raw).digest())
            file.write(raw)

    write_whole(out / entry.name, write)
    return replace(entry, hashes=b"".join(hashes))

"""Makes a data set (index.py) from text: shuffled by document, with a part held out. Resumable after a kill.

Each document ends with a token that no document contains, so that this token alone tells where documents end: the
tokenizer's end of text where that is so, else another token that no text has, else one more id.

`data make` runs two passes. The first tokenises pieces of work one by one and keeps each (token_parts.py). The second
writes the documents of all pieces to shards, in an order by hash. The files of the first pass are removed once the
index is written.
"""

from __future__ import annotations

import fcntl
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

from swarmnode.atomic_file import raise_if_full, write_whole
from swarmnode.data.document_row import DOCUMENT_BYTES_MAX, BadRows, Reading
from swarmnode.data.document_source import find_work
from swarmnode.data.index import (
    CHUNK_NBYTES,
    INDEX_FILE,
    Index,
    ShardEntry,
    Split,
    chunk_nbytes,
    parse_index,
)
from swarmnode.data.sampler import mixed
from swarmnode.data.token_parts import Encoding, Part, left_out, make_part, open_part, part_name
from swarmnode.data.tokens import HuggingFaceTokenizer, Tokenizer, dtype_of
from swarmnode.errors import DataError, UsageError
from swarmnode.ids import digest

WORK_FOLDER = ".parts"
PLAN_FILE = "plan.json"
CHUNKS_MIN = 64
"""Small sets are cut finer, so that several feeders have something to do (guess) ..."""
CHUNK_TOKENS_MIN = (1 << 16) + 1
"""... but no finer than this (guess: windows of long contexts have to fit)."""
HELD_OUT_CHUNK_TOKENS = (1 << 17) + 1
"""Tokens of a validation chunk: 64 samples of 2,048 tokens, so that a first validation need not fetch more."""
SHARD_CHUNKS = 256
SCAN_TOKENS = 1 << 20

Report = Callable[[str, int, int, int, int], None]
"""Told of (what goes on, done, of how much, documents, tokens): bytes of text in the first pass, tokens in the second;
of 0: not known."""


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
    """The documents of a split in the order they are written: part, first token and count of each."""

    part: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]

    @property
    def tokens(self) -> int:
        """All of them, with the token that ends each document."""
        return int(self.count.sum()) + self.count.size


@dataclass(frozen=True, slots=True)
class _Ending:
    """The form of written documents: the token that ends each, whether it counts, and whether there is a mask."""

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
    with (folder / PLAN_FILE).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{out}: another `data make` is at work there") from None
        names, done, count, tokens = list[str](), 0, 0, 0
        for work in works:
            names.append(part_name(work, reading, encoding))
            more = make_part(folder, names[-1], work, reading, encoding, options.skip_bad)
            bad.merge(left_out(folder, names[-1]))
            done, count, tokens = done + work.nbytes, count + more[0], tokens + more[1]
            report("tokenise", done, total, count, tokens)
        parts = [open_part(folder, name, encoding) for name in names]
        weights = [options.weights[work.source] if options.weights else 1.0 for work in works]
        index = _write(out, parts, weights, options, encoding, report)
    for name, kept in beside(index.loss_mask).items():
        write_whole(out / name, kept)
    raw = index.canonical()
    write_whole(out / INDEX_FILE, raw)
    shutil.rmtree(folder)
    return parse_index(raw, origin=str(out / INDEX_FILE)), bad


def _begin(out: Path, folder: Path, options: MakeOptions, encoding: Encoding) -> None:
    """Claim `out` for this set, or check that an earlier call with the same options claimed it. Raises UsageError when
    `out` holds another set, DataError when it cannot be used."""
    told = (repr(options.reading), options.validation, options.seed, options.chunk_tokens or 0)
    how = (encoding.tokenizer.digest, encoding.template.source, str(encoding.special))
    plan = digest(*map(os.fsencode, options.sources), *options.weights, *told, *how).hex()
    if (out / INDEX_FILE).exists():
        raise UsageError(f"{out} holds a data set already; choose another folder, or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / PLAN_FILE).exists():
            if json.loads((folder / PLAN_FILE).read_text()).get("plan") != plan:
                raise UsageError(
                    f"{out} holds the beginning of another data set: say the same as then, choose another folder, or"
                    f" remove {folder}"
                )
            return
        if any(out.glob("*.bin")):
            raise UsageError(f"{out} holds shards without an index; choose another folder")
        write_whole(folder / PLAN_FILE, json.dumps({"plan": plan}).encode())
    except (OSError, ValueError) as error:
        if isinstance(error, OSError):
            raise_if_full(folder, error)
        raise DataError(f"{folder}: cannot be used: {error}") from error


def _write(
    out: Path,
    parts: Sequence[Part],
    weights: Sequence[float],
    options: MakeOptions,
    encoding: Encoding,
    report: Report,
) -> Index:
    train, held_out = _orders(parts, weights, options)
    end = _end_token(parts, encoding.tokenizer)
    counts = encoding.tokenizer.separator in (None, end)
    masked = not counts or any(part.mask is not None for part in parts)
    vocabulary = max(encoding.tokenizer.vocabulary, end + 1)
    shape = _Ending(end, counts, masked, dtype_of(vocabulary))
    of, written = int(train.tokens + held_out.tokens), 0
    if not held_out.count.size or not train.count.size:
        raise DataError(f"{of} tokens in {train.count.size + held_out.count.size} documents: too little text to split")
    splits = []
    for name, order, most in (("train", train, None), ("validation", held_out, HELD_OUT_CHUNK_TOKENS)):
        chunk_tokens = options.chunk_tokens or _chunk_tokens(order.tokens, vocabulary, most)
        shards = []
        for number, (tokens, mask) in enumerate(_shards(parts, order, chunk_tokens, shape)):
            entry = ShardEntry(f"{name}-{number:05}.bin", tokens.size, b"")
            shards.append(_write_shard(out, entry, tokens, mask, chunk_tokens))
            written += tokens.size
            report("write", written, of, train.count.size + held_out.count.size, of)
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
    orders = [_Order(part[some], rows["first"][some], rows["count"][some]) for some in (chosen[0], first)]
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
    total, ascending = np.cumsum(counted[order]), place[order]
    at = min(int(np.searchsorted(total, wanted * int(total[-1]))) + 1, place.size - 1)
    copies = int(np.searchsorted(ascending, ascending[0], side="right"))  # of one text are all held out, or none
    return float(ascending[min(max(at, copies), place.size - 1)])


def _shards(
    parts: Sequence[Part], order: _Order, chunk_tokens: int, ending: _Ending
) -> Iterator[tuple[npt.NDArray[np.uint16] | npt.NDArray[np.uint32], npt.NDArray[np.uint8] | None]]:
    """Yields (tokens, mask) of each shard: the documents one after the other, each with the token that ends it, cut
    every SHARD_CHUNKS chunks."""
    size, ends = SHARD_CHUNKS * chunk_tokens, np.cumsum(order.count + 1)
    total = int(ends[-1]) if ends.size else 0
    for begin in range(0, total, size):
        length = min(size, total - begin)
        tokens = np.empty(length, ending.dtype)
        mask = np.ones(length, np.uint8) if ending.masked else None
        at = int(np.searchsorted(ends, begin, side="right"))
        filled = 0
        while filled < length:
            part, count = parts[int(order.part[at])], int(order.count[at])
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
                    mask[filled] = ending.counts
                filled, at = filled + 1, at + 1
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

"""Tokenises documents, one piece of work at a time, and keeps each result on disk as soon as it is done.

A part is up to four files: `<name>.tokens`, `<name>.npy` with a row for each document, if it has conversations
`<name>.mask` (one byte a token: does it count as a target?), and if rows were left out `<name>.bad`.
`<name>.npy` is written last and marks a complete part. The token that ends a document is not in it: set_maker.py
chooses one that no document contains.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarmnode.atomic_file import raise_if_full, write_whole
from swarmnode.data.chat_template import ChatTemplate
from swarmnode.data.document_row import BadRows, DocumentSpan, Placed, Reading
from swarmnode.data.document_source import documents
from swarmnode.data.tokens import Tokenizer, Tokens, dtype_of
from swarmnode.errors import DataError
from swarmnode.ids import digest, digest64

BATCH_DOCUMENTS = 512
BATCH_BYTES = 8 << 20
"""Text tokenised at once: enough for all cores, little enough for memory (guess)."""
ROW = np.dtype([("first", "<i8"), ("count", "<i8"), ("rank", "<u8")])
"""A document's row: position of its first token in the part, number of tokens, hash of its text."""

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
    return digest("part", 2, *map(os.fsencode, map(str, (*what, *how))), *map(str, who)).hex()[:32]


def make_part(
    folder: Path, name: str, work: DocumentSpan, reading: Reading, encoding: Encoding, bad_max: int
) -> tuple[int, int]:
    """Write the part unless it exists. Returns (documents, tokens). Raises DataError, also when more than `bad_max`
    rows would be left out."""
    table = folder / f"{name}.npy"
    if not table.exists():
        bad = BadRows(bad_max)
        rows = _write(folder, name, work, reading, encoding, bad)
        if bad.count or bad.empty:
            write_whole(folder / f"{name}.bad", json.dumps([bad.count, bad.empty, bad.lines]).encode())
        write_whole(table, lambda file: np.save(file, rows))
    rows = np.load(table, allow_pickle=False)
    return len(rows), int(rows["count"].sum())


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


def _write(folder: Path, name: str, work: DocumentSpan, reading: Reading, encoding: Encoding, bad: BadRows) -> Rows:
    """Write the part's tokens and mask. Returns its table. Raises DataError when they cannot be written."""
    rows, at = list[tuple[int, int, int]](), 0
    mask_path = folder / f"{name}.mask"
    try:
        with (folder / f"{name}.tokens").open("wb") as file, mask_path.open("wb") as masks:
            counted = True
            for rank, tokens, mask in _encoded(work, reading, encoding, bad):
                file.write(tokens.astype(encoding.dtype, copy=False).data.cast("B"))
                if mask is not None and counted:  # earlier documents had no mask: all of their tokens count
                    masks.write(b"\1" * at)
                    counted = False
                if not counted:
                    masks.write(b"\1" * tokens.size if mask is None else mask.tobytes())
                rows.append((at, tokens.size, rank))
                at += tokens.size
            for one in (file, masks):
                one.flush()
                os.fsync(one.fileno())
        if counted:
            mask_path.unlink()
    except OSError as error:
        raise_if_full(folder, error)
        raise DataError(f"{folder}: cannot be written: {error.strerror}") from error
    return np.array(rows, ROW)


Encoded = tuple[int, Tokens, npt.NDArray[np.uint8] | None]


def _encoded(work: DocumentSpan, reading: Reading, encoding: Encoding, bad: BadRows) -> Iterator[Encoded]:
    """Yields (rank, tokens, mask) of each document. Reads the next batch while it tokenises the current one."""
    batches = _batches(documents(work, reading, bad))
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = reader.submit(next, batches, None)
            yield from _encode(batch, encoding, bad)


def _batches(source: Iterator[Placed]) -> Iterator[list[Placed]]:
    batch, nbytes = list[Placed](), 0
    for placed in source:
        batch.append(placed)
        nbytes += len(placed.document) if isinstance(placed.document, str) else 4096
        if len(batch) >= BATCH_DOCUMENTS or nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _encode(batch: Sequence[Placed], encoding: Encoding, bad: BadRows) -> Iterator[Encoded]:
    tokenizer, texts = encoding.tokenizer, [one.document for one in batch if isinstance(one.document, str)]
    plain = iter(tokenizer.encode_all(texts, special=encoding.special))
    for placed in batch:
        document = placed.document
        if isinstance(document, str):
            yield digest64("document", document.encode()), next(plain), None
            continue
        try:
            text, tokens, mask = encoding.template.encode(document, tokenizer)
        except DataError as error:
            bad.add(placed.where, str(error))
            continue
        yield digest64("document", text.encode()), tokens, None if mask.all() else mask

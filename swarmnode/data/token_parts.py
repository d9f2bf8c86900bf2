"""Tokenises documents, one piece of work at a time, and keeps each result on disk as soon as it is done.

A part is up to three files: `<name>.tokens`, `<name>.npy` with a row for each document, and, if it has conversations,
`<name>.mask` (one byte a token: does it count as a target?). `<name>.npy` is written last and marks a complete part.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarmnode.data.chat_template import ChatTemplate
from swarmnode.data.document_source import Document, DocumentSpan, Reading, documents
from swarmnode.data.tokens import ByteTokenizer, Tokenizer, Tokens, dtype_of
from swarmnode.disk import raise_if_full
from swarmnode.errors import DataError
from swarmnode.ids import digest, digest64
from swarmnode.whole_file import write_whole

BATCH_DOCUMENTS = 512
BATCH_BYTES = 8 << 20
"""Text tokenised at once: enough for all cores, little enough for memory (guess)."""
ROW = np.dtype([("first", "<i8"), ("count", "<i8"), ("rank", "<u8")])
"""A document's row: position of its first token in the part, number of tokens with the end token, hash of its text."""

Rows = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Encoding:
    """Turns text into ids. `end_token` ends each document. A tokenizer without a separator gets one more id for it."""

    tokenizer: Tokenizer
    template: ChatTemplate

    @property
    def end_token(self) -> int:
        separator = self.tokenizer.separator
        return self.tokenizer.vocabulary if separator is None else separator

    @property
    def vocabulary(self) -> int:
        return max(self.tokenizer.vocabulary, self.end_token + 1)

    @property
    def dtype(self) -> np.dtype[np.uint16] | np.dtype[np.uint32]:
        return dtype_of(self.vocabulary)


@dataclass(frozen=True, slots=True)
class Part:
    """A memory-mapped part. With `mask` None, every token counts."""

    tokens: Tokens
    rows: Rows
    mask: npt.NDArray[np.uint8] | None


def part_name(work: DocumentSpan, reading: Reading, encoding: Encoding) -> str:
    """The part's file name: a hash of everything that its content depends on. The source's weight is not part of it."""
    what: tuple[str | int, ...] = (work.kind, *work.files, work.first, work.last, work.of, work.version)
    how: tuple[str | int, ...] = (reading.field, reading.messages, reading.cut_nbytes, reading.hub_split)
    return digest("part", 1, *what, *how, encoding.tokenizer.digest, encoding.template.source).hex()[:32]


def make_part(folder: Path, name: str, work: DocumentSpan, reading: Reading, encoding: Encoding) -> tuple[int, int]:
    """Write the part unless it exists. Returns (documents, tokens). Raises DataError."""
    table = folder / f"{name}.npy"
    if not table.exists():
        rows = _write(folder, name, work, reading, encoding)
        write_whole(table, lambda file: np.save(file, rows))
    rows = np.load(table, allow_pickle=False)
    return len(rows), int(rows["count"].sum())


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


def _write(folder: Path, name: str, work: DocumentSpan, reading: Reading, encoding: Encoding) -> Rows:
    """Write the part's tokens and mask. Returns its table. Raises DataError when they cannot be written."""
    rows, at = list[tuple[int, int, int]](), 0
    mask_path = folder / f"{name}.mask"
    try:
        with (folder / f"{name}.tokens").open("wb") as file, mask_path.open("wb") as masks:
            counted = True
            for rank, tokens, mask in _encoded(work, reading, encoding):
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


def _encoded(work: DocumentSpan, reading: Reading, encoding: Encoding) -> Iterator[Encoded]:
    """Yields (rank, tokens, mask) of each document. Reads the next batch while it tokenises the current one."""
    batches = _batches(documents(work, reading))
    with concurrent.futures.ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = reader.submit(next, batches, None)
            yield from _encode(batch, encoding)


def _batches(source: Iterator[Document]) -> Iterator[list[Document]]:
    batch, nbytes = list[Document](), 0
    for document in source:
        batch.append(document)
        nbytes += len(document) if isinstance(document, bytes) else 4096
        if len(batch) >= BATCH_DOCUMENTS or nbytes >= BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _encode(batch: Sequence[Document], encoding: Encoding) -> Iterator[Encoded]:
    end = np.array([encoding.end_token], encoding.dtype)
    texts, counted = list[bytes](), list[bool]()
    sizes, ranks = list[int](), list[int]()
    for document in batch:
        if isinstance(document, bytes):
            segments, plain = [(document, True)], document
        else:
            segments = [
                (text.encode(errors="replace"), answer) for text, answer in encoding.template.segments(document)
            ]
            plain = b"".join(text for text, _ in segments)
        ranks.append(digest64("document", plain))
        sizes.append(len(segments))
        for text, counts in segments:
            texts.append(text.replace(b"\0", b" ") if isinstance(encoding.tokenizer, ByteTokenizer) else text)
            counted.append(counts)
    made = iter(zip(encoding.tokenizer.encode_all(texts), counted, strict=True))
    for rank, size in zip(ranks, sizes, strict=True):
        parts = list(itertools.islice(made, size))
        tokens = np.concatenate([*(part.astype(encoding.dtype, copy=False) for part, _ in parts), end])
        if all(counts for _, counts in parts):
            yield rank, tokens, None
        else:
            # The end token counts, so that the model learns to stop after its answer.
            flags = [np.full(part.size, counts, np.uint8) for part, counts in parts]
            yield rank, tokens, np.concatenate([*flags, np.ones(1, np.uint8)])

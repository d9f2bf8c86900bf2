"""Reads documents back from a data set folder, to show them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarmnode.data.chunk_store import read_regular
from swarmnode.data.index import Index
from swarmnode.data.tokens import Tokens
from swarmnode.errors import DataError, UsageError


def document_of(folder: Path, index: Index, split: str, row: int) -> tuple[Tokens, npt.NDArray[np.uint8]]:
    """(ids [n] with the token that ends it, mask [n]) of document `row` of a split: "train" or "validation". Raises
    UsageError when there are fewer, DataError when a shard cannot be read."""
    of = getattr(index, split)
    if row >= of.documents:
        raise UsageError(f"--row {row}: there are {of.documents} documents to choose from")
    first = 0 if split == "train" else index.train.count
    ids, mask = [np.empty(0, index.dtype)], [np.empty(0, np.uint8)]
    before = 0
    for number in range(first, first + of.count):
        tokens, counts = chunk_of(folder, index, number)
        ends = np.flatnonzero(tokens == index.end_token)
        start = 0 if before == row else int(ends[row - before - 1]) + 1 if row - before <= ends.size else tokens.size
        here = row - before
        last = int(ends[here]) + 1 if 0 <= here < ends.size else tokens.size
        ids.append(tokens[start:last])
        mask.append(counts[start:last])
        if here < ends.size:
            break
        before += ends.size
    return np.concatenate(ids), np.concatenate(mask)


def chunk_of(folder: Path, index: Index, number: int) -> tuple[Tokens, npt.NDArray[np.uint8]]:
    """(ids [n], mask [n]) of a chunk. Raises DataError when it cannot be read whole."""
    chunk = index.chunk(number)
    raw = read_regular(folder / chunk.shard, chunk.nbytes, chunk.offset)
    if raw is None or len(raw) != chunk.nbytes:
        raise DataError(f"{folder / chunk.shard}: {chunk.nbytes} bytes from {chunk.offset} on cannot be read")
    tokens = np.frombuffer(raw, index.dtype, chunk.tokens)
    if not index.loss_mask:
        return tokens, np.ones(chunk.tokens, np.uint8)
    bits = np.unpackbits(np.frombuffer(raw, np.uint8, offset=tokens.nbytes), bitorder="little")
    return tokens, bits[: chunk.tokens]

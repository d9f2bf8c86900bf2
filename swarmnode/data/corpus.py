"""Opens the demo corpus on this machine: tokenised once into a cache of all processes, then mapped and sampled.

A file of the cache holds the tokens of a split, little-endian ids, and then the SHA-256 of their bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from swarmnode.base.atomic_file import atomic_file, write_errors
from swarmnode.base.errors import DataError, os_errors
from swarmnode.base.ids import digest
from swarmnode.data.index import HASH_NBYTES
from swarmnode.data.root import DataRoot
from swarmnode.data.sample import SampleBatch
from swarmnode.data.sampler import Sampler, Windows, forget_pages, spread
from swarmnode.data.source import DEMO_SHA256, HELD_OUT, demo_pieces, rank
from swarmnode.data.tokens import Tokenizer, Tokens, dtype_of, open_tokenizer
from swarmnode.run.manifest import Manifest

GROUP = 64
"""Pieces tokenised at once: 4 MiB of text at most."""
CACHE_ADVICE = "free space there, or choose another --cache"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out windows of `context` + 1 tokens. `digest` (32 bytes) identifies the tokens: feeders with a
    different digest have different text."""

    train: Windows
    validation: Windows
    sampler: Sampler
    digest: bytes

    def batch(self, indices: npt.ArrayLike) -> SampleBatch:
        """The training samples numbered `indices`, [B]."""
        return self.sampler.batch(indices)

    def validation_batch(self, first: int, count: int, wanted: int) -> SampleBatch:
        """Held-out samples [first, first + count) of `wanted`, spread over all held-out text. Fewer at the end."""
        return self.validation.gather(spread(self.validation.count, wanted)[first : first + count])


def open_corpus(manifest: Manifest, folder: pathlib.Path | None, cache: pathlib.Path) -> Corpus:
    """The demo corpus of `manifest`. Its tokenizer lies below `folder`, its tokens in `cache`. Blocks for seconds at
    first.

    Raises DataError: a tokenizer that cannot be used, too little text, a vocabulary that does not fit.
    Raises NotPermitted when the manifest names a tokenizer's file and `folder` is None, or links lead out of it.
    """
    tokenizer = open_tokenizer(manifest.data.tokenizer, DataRoot(folder))
    if tokenizer.vocabulary > manifest.model.vocabulary:
        raise DataError(
            f"{manifest.data.tokenizer}: this tokenizer has {tokenizer.vocabulary} ids, but model.vocabulary is "
            f"{manifest.model.vocabulary}; raise it"
        )
    end_token = manifest.data.document_end
    if end_token is not None and tokenizer.separator != end_token:
        raise DataError(
            f"{manifest.data.tokenizer}: this tokenizer ends documents with token {tokenizer.separator}; data.end_token"
            f" is {end_token}"
        )
    shards = _from_cache(tokenizer, cache)
    context = manifest.model.context
    train, validation = (Windows(shard.tokens, context) for shard in shards)
    if not train.count or not validation.count:
        raise DataError(
            f"the demo corpus has {shards[0].tokens.size} tokens to train on and {shards[1].tokens.size} held out, and"
            f" each needs more than model.context = {context}: lower that, or make a data set (swarmnode data make)"
        )
    return Corpus(train, validation, Sampler(train, manifest.seed), digest(*(shard.digest for shard in shards)))


class Shard(NamedTuple):
    """An open file of tokens: `tokens` is a read-only memory map, [count]; `digest` the SHA-256 of their bytes."""

    tokens: Tokens
    digest: bytes


def _from_cache(tokenizer: Tokenizer, cache: pathlib.Path) -> tuple[Shard, Shard]:
    key = digest("corpus", 6, DEMO_SHA256, tokenizer.digest).hex()[:32]
    paths = (cache / f"{key}-train.tokens", cache / f"{key}-validation.tokens")
    if all(path.exists() for path in paths):
        with contextlib.suppress(DataError):  # the cache is our own, so rebuild it
            return _open_pair(paths, tokenizer)
    splits: tuple[list[Tokens], list[Tokens]] = ([], [])
    for piece, tokens in _encoded(demo_pieces(), tokenizer):
        splits[rank(piece) < HELD_OUT].append(tokens)
    for path, parts in zip(paths, splits, strict=True):
        write_shard(path, np.concatenate([np.empty(0, tokenizer.dtype), *parts]))
    return _open_pair(paths, tokenizer)


def _open_pair(paths: tuple[pathlib.Path, pathlib.Path], tokenizer: Tokenizer) -> tuple[Shard, Shard]:
    train, validation = (open_shard(path, tokenizer.vocabulary) for path in paths)
    return train, validation


def _encoded(source: Iterator[str], tokenizer: Tokenizer) -> Iterator[tuple[str, Tokens]]:
    """Yields each piece with its tokens, followed by the separator if the tokenizer has one."""
    while group := list(itertools.islice(source, GROUP)):
        for piece, tokens in zip(group, tokenizer.encode_all(group), strict=True):
            if tokenizer.separator is not None:
                tokens = np.append(tokens, np.array([tokenizer.separator], dtype=tokens.dtype))
            yield piece, tokens


def write_shard(path: pathlib.Path, tokens: Tokens) -> None:
    """Write `tokens`, [n], to `path`. Several processes may write the same: readers see one or the other. Raises
    DiskFull, DataError."""
    raw = tokens.tobytes()
    what = f"{path}: cannot be written"
    with write_errors(path, len(raw) + HASH_NBYTES, CACHE_ADVICE, kind=DataError, what=what):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            file.write(raw)
            file.write(hashlib.sha256(raw).digest())


def open_shard(path: pathlib.Path, vocabulary: int) -> Shard:
    """The tokens at `path`, ids below `vocabulary`, memory-mapped. Raises DataError where it cannot be read, is cut
    short or does not match its hash."""
    dtype = dtype_of(vocabulary)
    with os_errors(DataError, f"{path}: cannot be read"), path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size - HASH_NBYTES
        file.seek(max(0, nbytes))
        expected = file.read(HASH_NBYTES)
    if nbytes < 0 or nbytes % dtype.itemsize:
        raise DataError(f"{path}: cut short or damaged: {nbytes + HASH_NBYTES} bytes")
    count = nbytes // dtype.itemsize
    tokens = cast(Tokens, np.memmap(path, dtype, "r", shape=(count,)) if count else np.empty(0, dtype))
    # hashlib needs a buffer, which the ndarray view gives. An empty file has nothing to map.
    if hashlib.sha256(np.asarray(tokens).data if count else b"").digest() != expected:
        raise DataError(f"{path}: damaged: its tokens do not match their hash")
    forget_pages(tokens)
    return Shard(tokens, expected)

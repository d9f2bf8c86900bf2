"""Opens a run's text on this machine: tokenised once into a cache that all processes share, then mapped and sampled."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.data.root import DataRoot
from swarmnode.data.sample import SampleBatch
from swarmnode.data.sampler import Sampler, Windows, spread
from swarmnode.data.shard import SUFFIX, Shard, ShardWriter, open_shard
from swarmnode.data.source import SourceFile, cache_key, pieces, rank, source_files
from swarmnode.data.tokens import Tokenizer, Tokens, open_tokenizer
from swarmnode.errors import DataError
from swarmnode.ids import digest
from swarmnode.manifest import Manifest

GROUP = 64
"""Pieces tokenised at once: 4 MiB of text at most."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out windows of `context` + 1 tokens. `digest` (32 bytes) identifies the tokens: feeders with a
    different digest have different text."""

    tokenizer: Tokenizer
    train: Windows
    validation: Windows
    sampler: Sampler
    digest: bytes
    tokens_train: int
    tokens_validation: int
    note: str

    def sample(self, index: int) -> Tokens:
        """The tokens of training sample `index`, [context + 1]."""
        only: Tokens = self.batch([index]).tokens[0]
        return only

    def batch(self, indices: npt.ArrayLike) -> SampleBatch:
        """The training samples numbered `indices`, [B]."""
        return self.sampler.batch(indices)

    def validation_batch(self, first: int, count: int, wanted: int) -> SampleBatch:
        """Held-out samples [first, first + count) of `wanted`, spread over all held-out text. Fewer at the end."""
        return self.validation.gather(spread(self.validation.count, wanted)[first : first + count])


def open_corpus(manifest: Manifest, folder: pathlib.Path | None, cache: pathlib.Path) -> Corpus:
    """The corpus of `manifest`. Its paths lie below `folder`, its tokens in `cache`. Blocks for seconds at first.

    Raises DataError: a source or tokenizer that cannot be used, too little text, a vocabulary that does not fit.
    Raises NotPermitted when the manifest names files and `folder` is None, or links lead out of it.
    """
    root = DataRoot(folder)
    tokenizer = open_tokenizer(manifest.data.tokenizer, root)
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
    files = source_files(manifest.data, root)
    shards, note = _from_cache(manifest, files, tokenizer, cache)
    train, validation = ([shard.tokens] for shard in shards)
    context = manifest.model.context
    windows_train, windows_validation = Windows(train, context), Windows(validation, context)
    if not windows_train.count or not windows_validation.count:
        raise DataError(
            f"data.source = {manifest.data.source!r}: too little text: {sum(t.size for t in train)} tokens to train on "
            f"and {sum(t.size for t in validation)} held out; each needs more than model.context = {context}"
        )
    return Corpus(
        tokenizer=tokenizer,
        train=windows_train,
        validation=windows_validation,
        sampler=Sampler(windows_train, manifest.seed),
        digest=digest(*(shard.digest for shard in shards)),
        tokens_train=sum(part.size for part in train),
        tokens_validation=sum(part.size for part in validation),
        note=note,
    )


def _from_cache(
    manifest: Manifest, files: list[SourceFile], tokenizer: Tokenizer, cache: pathlib.Path
) -> tuple[tuple[Shard, Shard], str]:
    key = digest(cache_key(manifest.data, files, tokenizer.digest), manifest.model.context).hex()[:32]
    paths = (cache / f"{key}-train{SUFFIX}", cache / f"{key}-validation{SUFFIX}")
    note = "the demo corpus" if manifest.data.source == "demo" else f"{len(files)} files"
    if all(path.exists() for path in paths):
        try:
            return _open_pair(paths, tokenizer), f"{note}, cached"
        except DataError as error:  # the cache is our own, so rebuild it
            note = f"{note}, cache made again: {error}"
    held_out_below = manifest.data.validation_fraction
    shards = _tokenise(manifest, files, tokenizer, paths, held_out_below)
    if shards is not None:
        _tokenise(manifest, files, tokenizer, paths, shards)
    return _open_pair(paths, tokenizer), note


def _open_pair(paths: tuple[pathlib.Path, pathlib.Path], tokenizer: Tokenizer) -> tuple[Shard, Shard]:
    train, validation = (open_shard(path, tokenizer.vocabulary) for path in paths)
    return train, validation


def _tokenise(
    manifest: Manifest,
    files: list[SourceFile],
    tokenizer: Tokenizer,
    paths: tuple[pathlib.Path, pathlib.Path],
    held_out_below: float,
) -> float | None:
    """Write both shards. Pieces with a rank below `held_out_below` are held out.

    With little text that may hold out less than one window. If a higher bound holds out enough, nothing is kept and
    that bound is returned."""
    needed = manifest.model.context + 1
    seen: list[tuple[float, int]] = []
    with (
        ShardWriter(paths[1], tokenizer.vocabulary) as validation,
        ShardWriter(paths[0], tokenizer.vocabulary) as train,
    ):
        for piece, tokens in _encoded(pieces(manifest.data, files), tokenizer):
            place = rank(piece)
            (validation if place < held_out_below else train).write(tokens)
            seen.append((place, tokens.size))
        better = None if validation.count >= needed else _rank_holding_out(needed, seen)
        train.keep = validation.keep = better is None
    return better


def _rank_holding_out(needed: int, seen: list[tuple[float, int]]) -> float | None:
    """The lowest rank with `needed` tokens in the pieces `seen` (rank, tokens) below it. None if there is none."""
    total = 0
    for place, size in sorted(seen):
        if total >= needed:
            return place
        total += size
    return None


def _encoded(source: Iterator[str], tokenizer: Tokenizer) -> Iterator[tuple[str, Tokens]]:
    """Yields each piece with its tokens, followed by the separator if the tokenizer has one."""
    while group := list(itertools.islice(source, GROUP)):
        for piece, tokens in zip(group, tokenizer.encode_all(group), strict=True):
            if tokenizer.separator is not None:
                tokens = np.append(tokens, np.array([tokenizer.separator], dtype=tokens.dtype))
            yield piece, tokens

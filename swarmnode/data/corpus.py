"""Opens the demo corpus on this machine: tokenised once into a cache of all processes, then mapped and sampled."""

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
from swarmnode.data.source import DEMO_SHA256, demo_pieces, rank
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
    shards, note = _from_cache(manifest, tokenizer, cache)
    train, validation = ([shard.tokens] for shard in shards)
    context = manifest.model.context
    windows_train, windows_validation = Windows(train, context), Windows(validation, context)
    if not windows_train.count or not windows_validation.count:
        raise DataError(
            f"the demo corpus has {train[0].size} tokens to train on and {validation[0].size} held out, and each needs"
            f" more than model.context = {context}: lower that, raise data.validation_fraction, or make a data set"
            " (swarmnode data make)"
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


def _from_cache(manifest: Manifest, tokenizer: Tokenizer, cache: pathlib.Path) -> tuple[tuple[Shard, Shard], str]:
    key = digest("corpus", 5, DEMO_SHA256, manifest.data.validation_fraction, tokenizer.digest).hex()[:32]
    paths = (cache / f"{key}-train{SUFFIX}", cache / f"{key}-validation{SUFFIX}")
    note = "the demo corpus"
    if all(path.exists() for path in paths):
        try:
            return _open_pair(paths, tokenizer), f"{note}, cached"
        except DataError as error:  # the cache is our own, so rebuild it
            note = f"{note}, cache made again: {error}"
    with (
        ShardWriter(paths[1], tokenizer.vocabulary) as validation,
        ShardWriter(paths[0], tokenizer.vocabulary) as train,
    ):
        for piece, tokens in _encoded(demo_pieces(), tokenizer):
            (validation if rank(piece) < manifest.data.validation_fraction else train).write(tokens)
    return _open_pair(paths, tokenizer), note


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

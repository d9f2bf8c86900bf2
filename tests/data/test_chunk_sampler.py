"""Samples of a data set in chunks: every window once an epoch, and blocks that need few chunks."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.data.index import ShardEntry, Split
from swarmnode.data.indexed import IndexedCorpus, open_indexed
from swarmnode.data.sampler import ChunkSampler, layout
from swarmnode.errors import DataError, Unavailable
from swarmnode.manifest import DataSpec, Manifest, ModelSpec, PipelineSpec
from tests.support.data_sets import data_set


def a_split(chunks: int, chunk_tokens: int, last: int) -> Split:
    tokens = (chunks - 1) * chunk_tokens + last
    return Split(chunk_tokens, 1, (ShardEntry("train-00000.bin", tokens, bytes(32 * chunks)),))


@given(
    st.integers(1, 40),
    st.integers(20, 400),
    st.floats(0.01, 1.0),
    st.integers(1, 19),
    st.integers(1, 64),
    st.integers(),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_draws_no_window_twice(
    chunks: int, chunk_tokens: int, last: float, context: int, block: int, seed: int
) -> None:
    split = a_split(chunks, chunk_tokens, max(1, int(last * chunk_tokens)))
    made = layout(split, context, block)
    windows = chunks * ((chunk_tokens - 1) // context)
    if made is None:
        assert windows < 2 * block or chunks == 1
        return
    sampler = ChunkSampler(made, seed)
    for epoch in (0, 3):
        drawn = sampler.locate(np.arange(made.samples) + epoch * made.samples)
        pairs = set(zip(*(part.tolist() for part in drawn), strict=True))
        assert len(pairs) == made.samples
        assert all(0 <= chunk < chunks and 0 <= window < made.windows for chunk, window in pairs)
    if chunks > 1 and windows > 40 * block and last == 1.0:
        assert made.samples >= 0.85 * windows, "hardly any text is left out of an epoch"


def test_blocks_of_a_group_need_its_chunks_alone() -> None:
    made = layout(a_split(250, (1 << 21) + 1, (1 << 21) + 1), 2048, 64)
    assert made is not None and (made.group, made.span, made.samples) == (1, 16, 250 * 1024)
    sampler, chunks = ChunkSampler(made, 3), defaultdict[int, set[int]](set)
    for block in range(40 * made.span):
        found = sampler.locate(range(block * 64, (block + 1) * 64))[0]
        chunks[block // made.span] |= set(found.tolist())
    assert all(len(some) == 1 for some in chunks.values())
    assert Counter(map(len, chunks.values())) == {1: 40} and len(set.union(*chunks.values())) == 40


def run(index: str, **data: object) -> Manifest:
    return Manifest(
        model=ModelSpec(context=16, vocabulary=256),
        pipeline=PipelineSpec(validation_samples=70),
        data=DataSpec(source="index", index=index, block_samples=8, **data),  # type: ignore[arg-type]
    )


def test_windows_and_masks_are_those_of_the_tokens(tmp_path: Path) -> None:
    index = data_set(tmp_path / "data", loss_mask=True)
    corpus = open_indexed(run(index.digest.hex()), tmp_path, tmp_path / "cache")
    tokens = np.arange(8 * 1025)
    found = corpus.batch(range(40))
    batch, mask = found.tokens, found.loss_mask
    assert batch.shape == (40, 17) and mask is not None and mask.shape == (40, 17)
    chunks, windows = corpus.sampler.locate(range(40))
    for row, chunk, window in zip(range(40), chunks, windows, strict=True):
        at = chunk * 1025 + window * 16 + np.arange(17)
        assert batch[row].tolist() == (tokens[at] * 7 % 256).tolist()
        assert mask[row].tolist() == (tokens[at] * 7 % 256 % 3 > 0).tolist()
    # 64 windows a chunk, 70 samples wanted: two chunks of held-out text.
    assert corpus.held_out_chunks(70) == [8, 9] and corpus.held_out_chunks(5) == [8]
    assert len(corpus.validation_batch(0, 100, 70)) == 70 and len(corpus.validation_batch(64, 8, 70)) == 6
    assert corpus.validation_batch(0, 1, 70).tokens[0].tolist() == ((np.arange(17) * 7 + 3) % 256).tolist()
    masked = corpus.validation_batch(0, 1, 70).loss_mask
    assert masked is not None and masked[0].tolist() == ((np.arange(17) * 7 + 3) % 256 % 3 > 0).tolist()


def test_a_data_set_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    index = data_set(tmp_path)
    wrong = Manifest(model=ModelSpec(context=16, vocabulary=128), data=DataSpec(source="index", block_samples=8))
    with pytest.raises(DataError, match="vocabulary"):
        IndexedCorpus(wrong, index, lambda number: None)
    with pytest.raises(DataError, match="end_token = 3"):
        IndexedCorpus(run(index.digest.hex(), end_token=3), index, lambda number: None)
    with pytest.raises(DataError, match="too little text"):
        IndexedCorpus(Manifest(model=ModelSpec(context=1000), data=DataSpec(block_samples=64)), index, lambda n: None)
    missing = IndexedCorpus(run(index.digest.hex()), index, lambda number: None)
    with pytest.raises(Unavailable, match="not on this machine yet"):
        missing.batch([0])
    with pytest.raises(DataError, match="is not on this machine"):
        open_indexed(run("ab" * 32), tmp_path, tmp_path / "cache")

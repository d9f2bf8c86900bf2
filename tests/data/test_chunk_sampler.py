"""Samples of a data set in chunks: no text is left out, and blocks need few chunks."""

from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarmnode.base.errors import DataError, Unavailable
from swarmnode.data.index import INDEX_FILE, ShardEntry, Split, parse_index
from swarmnode.data.indexed import IndexedCorpus, open_indexed
from swarmnode.data.sampler import ChunkSampler, layout
from swarmnode.run.manifest import DataSpec, Manifest, ModelSpec, PipelineSpec
from tests.support.data_sets import data_set, split


def a_split(chunks: int, chunk_tokens: int, last: int) -> Split:
    tokens = (chunks - 1) * chunk_tokens + last
    return Split(chunk_tokens, 1, (ShardEntry("train-00000.bin", tokens, bytes(32 * chunks)),))


@given(
    st.integers(1, 12),
    st.integers(2, 200),
    st.floats(0.0, 1.0),
    st.integers(1, 90),
    st.integers(1, 24),
    st.integers(),
)
@example(6, 32_768, 26_236 / 32_768, 8192, 2, 0)  # 190,076 tokens at 8,192
@example(3, 100, 0.01, 64, 1, 0)  # a last chunk that is shorter than a window
@example(40, 5, 0.3, 17, 2, 0)  # windows of several chunks
@settings(max_examples=80, deadline=None)
def test_every_token_is_in_a_window_of_two_epochs(
    chunks: int, chunk_tokens: int, last: float, context: int, block: int, seed: int
) -> None:
    text = a_split(chunks, chunk_tokens, max(1, int(last * chunk_tokens)))
    made = layout(text, context, block)
    if made is None:
        assert (text.tokens - 1) // context < block, "only text that does not fill a block is refused"
        return
    assert made.samples % block == 0 and made.samples > 0
    here = ChunkSampler(made, seed)
    there = ChunkSampler(made, seed)
    for first in (0, 2):
        read = np.zeros(text.tokens, np.int64)
        targets = np.zeros(text.tokens, np.int64)
        for epoch in (first, first + 1):
            indices = np.arange(made.samples) + epoch * made.samples
            starts = here.locate(indices)
            assert np.array_equal(starts[::-1], there.locate(indices[::-1])), "two feeders agree, in whatever order"
            assert starts.min() >= 0 and starts.max() + context < text.tokens
            for start in starts.tolist():
                read[start : start + context + 1] += 1
                targets[start + 1 : start + context + 1] += 1
        assert read.all()
        begins = np.arange(0, text.tokens, made.tokens)  # a chunk's first token has none before it in the chunk
        assert targets[np.setdiff1d(np.arange(text.tokens), begins)].all()


@given(st.integers(1, 30), st.integers(40, 400), st.integers(1, 19), st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_text_of_whole_chunks_is_read_evenly(chunks: int, chunk_tokens: int, context: int, block: int) -> None:
    """An epoch reads each token about once: windows overlap by no more than one block a chunk."""
    text = a_split(chunks, chunk_tokens, chunk_tokens)
    made = layout(text, context, block)
    if made is None:
        assert (text.tokens - 1) // context < block
        return
    least = -(-(chunk_tokens - 1) // context)
    assert least <= made.windows < least + block
    starts = made.starts(np.zeros(made.windows, np.int64), np.arange(made.windows))
    assert starts[0] == 0 and starts[-1] == chunk_tokens - 1 - context
    steps = np.diff(starts)
    assert steps.size == 0 or (steps.max() <= context and steps.max() - steps.min() <= 1)


def test_blocks_of_a_group_need_its_chunks_alone() -> None:
    made = layout(a_split(250, (1 << 21) + 1, (1 << 21) + 1), 2048, 64)
    assert made is not None and (made.group, made.span, made.samples) == (1, 16, 250 * 1024)
    sampler = ChunkSampler(made, 3)
    chunks = defaultdict[int, set[int]](set)
    for block in range(40 * made.span):
        found = sampler.locate(range(block * 64, (block + 1) * 64)) // made.tokens
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
    batch = found.tokens
    mask = found.loss_mask
    assert batch.shape == (40, 17) and mask is not None and mask.shape == (40, 17)
    for row, start in enumerate(corpus.sampler.locate(range(40)).tolist()):
        at = start + np.arange(17)
        assert batch[row].tolist() == (tokens[at] * 7 % 256).tolist()
        assert mask[row].tolist() == (tokens[at] * 7 % 256 % 3 > 0).tolist()
    # 64 windows a chunk, 70 samples wanted: two chunks of held-out text.
    assert corpus.held_out_chunks(70) == [8, 9] and corpus.held_out_chunks(5) == [8]
    assert len(corpus.validation_batch(0, 100, 70)) == 70 and len(corpus.validation_batch(64, 8, 70)) == 6
    assert corpus.validation_batch(0, 1, 70).tokens[0].tolist() == ((np.arange(17) * 7 + 3) % 256).tolist()
    masked = corpus.validation_batch(0, 1, 70).loss_mask
    assert masked is not None and masked[0].tolist() == ((np.arange(17) * 7 + 3) % 256 % 3 > 0).tolist()


@pytest.mark.parametrize("loss_mask", [False, True])
def test_windows_reach_over_chunks_where_those_are_short(tmp_path: Path, loss_mask: bool) -> None:
    """The last chunk is shorter than a window: its text is read with the end of the one before."""
    folder = tmp_path / "data"
    made = data_set(folder, chunks=5, chunk_tokens=100, loss_mask=loss_mask)
    train = split(folder, "train", np.arange(407) % 256, 100, 256, np.arange(407) % 5 > 0 if loss_mask else None)
    index = replace(made, train=train)
    (folder / INDEX_FILE).write_bytes(index.canonical())
    index = parse_index(index.canonical())
    corpus = open_indexed(run(index.digest.hex()), tmp_path, tmp_path / "cache")
    seen = set[int]()
    for block in range(2 * corpus.sampler.layout.samples // 8):
        indices = range(block * 8, block * 8 + 8)
        found = corpus.batch(indices)
        starts = corpus.sampler.locate(indices)
        at = starts[:, None] + np.arange(17)
        assert np.array_equal(found.tokens, at % 256)
        mask = found.loss_mask
        assert mask is None if not loss_mask else mask is not None and np.array_equal(mask, at % 5 > 0)
        assert corpus.chunks_of(indices) == np.unique(at // 100).tolist()
        seen |= set(at.ravel().tolist())
    assert seen == set(range(407))


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

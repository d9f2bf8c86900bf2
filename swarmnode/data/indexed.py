"""A corpus stored in chunks. It samples like corpus.Corpus, from the chunks that are on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarmnode.base.errors import DataError, NotPermitted, Unavailable, UsageError, os_errors
from swarmnode.data.chunk_store import ChunkCache, ChunkStore, find_index, read_regular
from swarmnode.data.corpus import Corpus, open_corpus
from swarmnode.data.index import INDEX_FILE, INDEX_NBYTES_MAX, TOKENIZER_FILE, Index, Split, parse_index
from swarmnode.data.sample import SampleBatch
from swarmnode.data.sampler import ChunkSampler, Indices, layout, spread
from swarmnode.data.tokens import Tokens
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.spec import BY_NAME

FOLDER = "data"


def index_of(folder: Path) -> Index:
    """The index of the data set in `folder`. Raises DataError."""
    raw = read_regular(folder / INDEX_FILE, INDEX_NBYTES_MAX + 1)
    if raw is None:
        text, what = (folder, f"no {INDEX_FILE} there") if folder.exists() else ("TEXT", "no such folder")
        raise DataError(f"{folder}: {what}: `swarmnode data make OUT --from {text}` makes a data set of text: give OUT")
    return parse_index(raw, origin=str(folder / INDEX_FILE))


def on_data_set(manifest: Manifest, folder: Path, locations: Sequence[str]) -> Manifest:
    """`manifest` on the data set in `folder`, its vocabulary and tokenizer with it. Raises DataError; UsageError for a
    location that no manifest may name."""
    index = index_of(folder)
    check = BY_NAME["data.locations"].check
    if check.accept(list(locations)) is None:
        raise UsageError(f"--location {', '.join(locations)[:200]}: allowed is {check.allowed}")
    is_bytes = not (folder / TOKENIZER_FILE).is_file()
    data = replace(
        manifest.data,
        source="index",
        index=index.digest.hex(),
        locations=tuple(locations),
        end_token=index.end_token,
        tokenizer="bytes" if is_bytes else TOKENIZER_FILE,
    )
    return replace(manifest, data=data, model=replace(manifest.model, vocabulary=index.vocabulary))


def fitted_blocks(manifest: Manifest, index: Index) -> tuple[int, int]:
    """(data.block_samples, inner.microbatch) of `manifest`, halved until the text of `index` holds a block."""
    block = manifest.data.block_samples
    microbatch = manifest.inner.microbatch
    while block > 1 and layout(index.train, manifest.model.context, block) is None:
        block //= 2
        microbatch = min(microbatch, block)
    return block, microbatch


def link(run: Path, folder: Path) -> Path:
    """`run`/data, which leads to `folder`; it may be there already, or be the data set itself. Raises NotPermitted."""
    place = run / FOLDER
    if place.exists() and os.path.samefile(place, folder):
        return place
    with os_errors(NotPermitted, f"{place} cannot be made to lead to {folder}"):
        place.symlink_to(folder.resolve(), target_is_directory=True)
    return place


def document_of(folder: Path, index: Index, split: str, row: int) -> tuple[Tokens, npt.NDArray[np.uint8]]:
    """(ids [n] with the token that ends it, mask [n]) of document `row` of a split: "train" or "validation". Raises
    UsageError when there are fewer, DataError when a shard cannot be read."""
    of = getattr(index, split)
    if row >= of.documents:
        raise UsageError(f"--row {row}: there are {of.documents} documents to choose from")
    first = 0 if split == "train" else index.train.count
    ids = [np.empty(0, index.dtype)]
    mask = [np.empty(0, np.uint8)]
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


class IndexedCorpus:
    """Windows of `context` + 1 tokens of the data set `index`. `read` returns a local chunk, or None if missing."""

    def __init__(self, manifest: Manifest, index: Index, read: Callable[[int], bytes | None]) -> None:
        """Raises DataError when the data set does not fit the manifest, or has too little text."""
        data = manifest.data
        context = manifest.model.context
        if index.vocabulary > manifest.model.vocabulary:
            raise DataError(
                f"data.index: tokens up to {index.vocabulary - 1}, but model.vocabulary is {manifest.model.vocabulary};"
                " raise it"
            )
        if data.end_token not in (-1, index.end_token):
            raise DataError(f"data.end_token = {data.end_token}, but the data set's is {index.end_token}: set that")
        made = layout(index.train, context, data.block_samples)
        self._held_out = (index.validation.chunk_tokens - 1) // context  # windows in a full chunk
        if not self._held_out and index.validation.count:
            raise DataError(f"model.context = {context} is more than a chunk of validation holds: make it smaller,"
                            " or the data set of more text")  # fmt: skip
        last = index.validation.tokens - (index.validation.count - 1) * index.validation.chunk_tokens
        self._held_out_count = (index.validation.count - 1) * self._held_out + (last - 1) // context
        if made is None or index.validation.count == 0 or self._held_out_count < 1:
            raise DataError(
                f"data.index: too little text: {index.train.tokens} tokens to train on and {index.validation.tokens}"
                f" held out; a block of data.block_samples = {data.block_samples} samples of model.context = {context}"
                " and one held-out sample are needed"
            )
        self.index = index
        self.digest = index.digest
        self.sampler = ChunkSampler(made, manifest.seed)
        self._context = context
        self._vocabulary = manifest.model.vocabulary
        self._read = read

    @property
    def span(self) -> int:
        """Number of consecutive blocks that lie in the same chunks."""
        return self.sampler.layout.span

    def chunks_of(self, indices: npt.ArrayLike) -> list[int]:
        """The chunks that hold training samples `indices`."""
        starts = self.sampler.locate(indices)
        size = self.index.train.chunk_tokens
        needed = {
            number
            for start in np.unique(starts).tolist()
            for number in range(start // size, (start + self._context) // size + 1)
        }
        return sorted(needed)

    def held_out_chunks(self, wanted: int) -> list[int]:
        """The chunks that hold `wanted` held-out samples. The first few are enough, because documents are shuffled."""
        count = -(-min(wanted, self._held_out_count) // self._held_out)
        return list(range(self.index.train.count, self.index.train.count + count))

    def batch(self, indices: npt.ArrayLike) -> SampleBatch:
        """The training samples numbered `indices`, [B]. Raises Unavailable when a chunk is not here."""
        return self._gather(self.sampler.locate(indices), self.index.train, 0)

    def validation_batch(self, first: int, count: int, wanted: int) -> SampleBatch:
        """Held-out samples [first, first + count) of `wanted`, spread over the first chunks. Fewer at the end."""
        starts = self._held_out_at(first, count, wanted)
        return self._gather(starts, self.index.validation, self.index.train.count)

    def _held_out_at(self, first: int, count: int, wanted: int) -> Indices:
        """The first tokens of the samples, counted from the beginning of the held-out text."""
        chunks = len(self.held_out_chunks(wanted))
        windows = spread(min(self._held_out_count, chunks * self._held_out), wanted)[first : first + count]
        numbers, within = np.divmod(windows, self._held_out)
        starts: Indices = numbers * self.index.validation.chunk_tokens + within * self._context
        return starts

    def _gather(self, starts: Indices, split: Split, first: int) -> SampleBatch:
        """The samples that begin at the tokens `starts`, [B], of `split`, whose first chunk has the number `first`."""
        places = starts[:, None] + np.arange(self._context + 1)  # [B, context + 1]
        tokens = np.empty(places.shape, self.index.dtype)
        mask = np.empty(places.shape, np.bool_) if self.index.loss_mask else None
        numbers = places // split.chunk_tokens
        for number in np.unique(numbers).tolist():
            here = numbers == number
            chunk = self._chunk(first + number)
            count = self.index.chunk(first + number).tokens
            within = places[here] - number * split.chunk_tokens
            ids = np.frombuffer(chunk, self.index.dtype, count)
            tokens[here] = ids[within]
            if mask is not None:
                bits = np.frombuffer(chunk, np.uint8, offset=ids.nbytes)
                mask[here] = bits[within >> 3] >> (within & 7).astype(np.uint8) & 1
        if tokens.size and int(tokens.max()) >= self._vocabulary:
            raise DataError(f"data.index: token {int(tokens.max())} is outside model.vocabulary = {self._vocabulary}")
        return SampleBatch(tokens, mask)

    def _chunk(self, number: int) -> bytes:
        data = self._read(number)
        if data is None:
            raise Unavailable(f"chunk {number} of the run's data is not on this machine yet")
        return data


def open_indexed(manifest: Manifest, folder: Path | None, cache: Path) -> IndexedCorpus:
    """Open the corpus of a manifest with an index, from `folder` and `cache` alone. `folder` is a `data make` data set
    or holds one as its folder `data`. Raises DataError when neither holds the index. `batch` raises Unavailable for
    missing chunks.
    """
    expected = bytes.fromhex(manifest.data.index)
    blobs = ChunkCache(cache / "chunks")
    index_bytes = find_index(folder, expected)
    raw = index_bytes[1] if index_bytes is not None else blobs.read(expected, 32 << 20)
    if raw is None:
        where = "no --data-root is given" if folder is None else f"neither {folder} nor its folder data holds it"
        raise DataError(f"the run's data set {manifest.data.index[:16]}... is not on this machine: {where}")
    store = ChunkStore(parse_index(raw, expected), blobs, index_bytes[0] if index_bytes is not None else None)
    return IndexedCorpus(manifest, store.index, store.read)


def open_text(manifest: Manifest, folder: Path | None, cache: Path) -> Corpus | IndexedCorpus:
    """Opens the part of the manifest's text that is on this machine: see open_corpus, open_indexed."""
    if manifest.data.source == "index":
        return open_indexed(manifest, folder, cache)
    return open_corpus(manifest, folder, cache)

"""Maps a sample number to a window of tokens, as a pure function of (seed, index).

The tokens are cut into windows of `context` tokens plus the one that follows. Each epoch visits every window once, in
the order of a keyed permutation that needs no storage. The permutation is a four-round Feistel network [Luby & Rackoff
1988] on the next even number of bits. It is applied again until the result is in range (cycle walking [Black & Rogaway
2002]; fewer than 4 tries on average).

ChunkSampler maps sample numbers to chunks so that a block needs few chunks and neighbouring blocks share them.

Samples drawn uniformly from the whole data set would need one chunk of 4 MiB each. An epoch is therefore a random order
of chunks (a keyed permutation), cut into small groups. The blocks of a group are drawn from its chunks, one
chunk after the other. The windows of each chunk come in their own random order. `data make` shuffles the documents of
the whole set before it cuts chunks, so a chunk is a fair sample of the set. A group belongs to one feeder (blocks.py).
"""

from __future__ import annotations

import functools
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.data.index import Split
from swarmnode.data.sample import SampleBatch
from swarmnode.data.tokens import Tokens
from swarmnode.ids import digest64

GROUP_CHUNKS_MAX = 64
CHUNK_COST = 0.003
"""A group gets another chunk only if that saves more than this share of an epoch (guess). Larger groups lose fewer
windows at their end, but there are fewer groups to share among feeders."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The mapping from samples to chunks: `chunks` chunks of `windows` windows each. A group of `group` chunks makes
    `span` blocks of `block` samples. Windows left over in a group, and chunks left over in an epoch, are drawn in other
    epochs."""

    chunks: int
    windows: int
    block: int
    group: int
    span: int

    @property
    def groups(self) -> int:
        """Number of groups in an epoch."""
        return self.chunks // self.group

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
        return self.groups * self.span * self.block


def layout(split: Split, context: int, block: int) -> ChunkLayout | None:
    """The layout of `split` that wastes the smallest share of an epoch. None when the text does not fill one block."""
    full = (split.chunk_tokens - 1) // context
    whole, last = split.count, split.tokens - (split.count - 1) * split.chunk_tokens
    short = (last - 1) // context if whole else 0
    # The last chunk may be shorter. Either leave it out, or use only its number of windows from every chunk.
    chunks, windows = max((whole, short), (whole - 1, full), key=lambda one: one[0] * one[1])
    best, least = None, float("inf")
    for group in range(1, min(chunks, GROUP_CHUNKS_MAX) + 1):
        made = ChunkLayout(chunks, windows, block, group, group * windows // block)
        lost = 1.0 - made.samples / max(1, chunks * windows) + CHUNK_COST * group
        if made.span and lost < least:
            best, least = made, lost
    return best


class ChunkSampler:
    """Maps any sample index of a run to its window, epoch after epoch without end."""

    def __init__(self, made: ChunkLayout, seed: int) -> None:
        self.layout = made
        self._order = functools.lru_cache(maxsize=4)(
            lambda epoch: Permutation(made.chunks, digest64("chunks", seed, epoch))
        )
        self._inside = functools.lru_cache(maxsize=64)(
            lambda epoch, chunk: Permutation(made.windows, digest64("chunk", seed, epoch, chunk))
        )

    def locate(self, indices: npt.ArrayLike) -> tuple[Indices, Indices]:
        """Returns (chunk, window in that chunk) for each sample index, [B] -> [B], [B]."""
        flat = np.asarray(indices, dtype=np.int64).reshape(-1)
        assert flat.size == 0 or int(flat.min()) >= 0
        made = self.layout
        blocks, within = np.divmod(flat, made.block)
        groups, block = np.divmod(blocks, made.span)
        epochs, group = np.divmod(groups, made.groups)
        slots, places = np.divmod(block * made.block + within, made.windows)
        slots += group * made.group
        chunks, windows = np.empty_like(flat), np.empty_like(flat)
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            chunks[rows] = self._order(int(epoch))(slots[rows])
        for epoch, chunk in sorted(set(zip(epochs.tolist(), chunks.tolist(), strict=True))):
            rows = np.flatnonzero((epochs == epoch) & (chunks == chunk))
            windows[rows] = self._inside(epoch, chunk)(places[rows])
        return chunks, windows


ROUNDS = 4
Indices = npt.NDArray[np.int64]

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Permutation:
    """A bijection of [0, size) chosen by `key`; calling it maps whole arrays."""

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size < 1 << 62:
            raise ValueError(f"size {size} is not in [1, 2**62)")
        self.size = size
        self._half_bits = np.uint64((max(2, (size - 1).bit_length()) + 1) // 2)
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        self._keys = [np.uint64(digest64("permutation", key, i)) for i in range(ROUNDS)]

    def __call__(self, values: npt.ArrayLike) -> Indices:
        """The images of `values`, integers in [0, size), of the same shape."""
        given = np.asarray(values)
        assert given.size == 0 or (int(given.min()) >= 0 and int(given.max()) < self.size)
        image = self._network(given.astype(np.uint64).reshape(-1))
        outside = np.flatnonzero(image >= np.uint64(self.size))
        while outside.size:
            image[outside] = self._network(image[outside])
            outside = outside[image[outside] >= np.uint64(self.size)]
        return image.astype(np.int64).reshape(given.shape)

    def _network(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x >> self._half_bits, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (mixed(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 [Steele, Lea & Flood 2014]; arithmetic modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


FORGET_EVERY = 32
"""Gathers after which mapped pages are let go: random samples would else pull the whole corpus into this process."""


class Windows:
    """Windows of `context` + 1 tokens in `tokens`, [n]. Neighbours share a token."""

    def __init__(self, tokens: Tokens, context: int) -> None:
        self.context = context
        self.count = max(0, (tokens.size - 1) // context)
        self._tokens = tokens
        self._span = np.arange(context + 1)
        self._gathers = 0

    def gather(self, windows: Indices) -> SampleBatch:
        """The samples in `windows`, [B]; their tokens are contiguous."""
        assert windows.size == 0 or (int(windows.min()) >= 0 and int(windows.max()) < self.count)
        out = np.asarray(self._tokens)[windows[:, None] * self.context + self._span]
        self._gathers += 1
        if self._gathers % FORGET_EVERY == 0:
            forget_pages(self._tokens)
        return SampleBatch(out)


def forget_pages(tokens: Tokens) -> None:
    """Release the mapped pages of `tokens` (they stay in the system's cache) and turn off read-ahead. Samples are drawn
    at random, and a node's memory is better spent on tapes. Does nothing for tokens in memory."""
    mapped = getattr(tokens, "_mmap", None)
    if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_DONTNEED)
        mapped.madvise(mmap.MADV_RANDOM)


class Sampler:
    """Maps any sample index of a run to its window, epoch after epoch without end, each epoch in its own order."""

    def __init__(self, windows: Windows, seed: int) -> None:
        if windows.count < 1:
            raise ValueError("no window to draw from")
        self._windows = windows
        self._order = functools.lru_cache(maxsize=4)(
            lambda epoch: Permutation(windows.count, digest64("epoch", seed, epoch))
        )

    def locate(self, indices: npt.ArrayLike) -> tuple[Indices, Indices]:
        """Returns (epoch, window) for each sample index."""
        flat = np.asarray(indices, dtype=np.int64).reshape(-1)
        assert flat.size == 0 or int(flat.min()) >= 0
        epochs, places = np.divmod(flat, self._windows.count)
        windows = np.empty_like(flat)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            windows[rows] = self._order(int(epoch))(places[rows])
        return epochs, windows

    def batch(self, indices: npt.ArrayLike) -> SampleBatch:
        """The samples numbered `indices`, [B]."""
        return self._windows.gather(self.locate(indices)[1])


def spread(count: int, wanted: int) -> Indices:
    """At most `wanted` window numbers spread evenly over [0, count). Every validation of a run uses the same ones."""
    taken = min(count, wanted)
    return (np.arange(taken, dtype=np.int64) * count) // max(1, taken)

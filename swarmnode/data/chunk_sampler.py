"""Maps sample numbers to chunks so that a block needs few chunks and neighbouring blocks share them.

Samples drawn uniformly from the whole data set would need one chunk of 4 MiB each. An epoch is therefore a random order
of chunks (a keyed permutation, sampler.py), cut into small groups. The blocks of a group are drawn from its chunks, one
chunk after the other. The windows of each chunk come in their own random order. `data make` shuffles the documents of
the whole set before it cuts chunks, so a chunk is a fair sample of the set. A group belongs to one feeder (blocks.py).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.data.index import Split
from swarmnode.data.sampler import Indices, Permutation
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
        self._seed = seed
        self._order = functools.lru_cache(maxsize=4)(self._order_of)
        self._inside = functools.lru_cache(maxsize=64)(self._inside_of)

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

    def _order_of(self, epoch: int) -> Permutation:
        return Permutation(self.layout.chunks, digest64("chunks", self._seed, epoch))

    def _inside_of(self, epoch: int, chunk: int) -> Permutation:
        return Permutation(self.layout.windows, digest64("chunk", self._seed, epoch, chunk))

"""Maps a sample number to a window of tokens, as a pure function of (seed, index).

A window has `context` tokens and the one that follows. Each epoch visits every window once, in the order of a keyed
permutation that needs no storage. The permutation is a four-round Feistel network [Luby & Rackoff 1988] on the next
even number of bits. It is applied again until the result is in range (cycle walking [Black & Rogaway 2002]; fewer than
4 tries on average).

ChunkSampler maps sample numbers to places so that a block needs few chunks and neighbouring blocks share them.

Samples drawn uniformly from the whole data set would need one chunk of 4 MiB each. An epoch is therefore a random order
of chunks (a keyed permutation), cut into small groups. The blocks of a group are drawn from its chunks, one
chunk after the other. The windows of each chunk come in their own random order. `data make` shuffles the documents of
the whole set before it cuts chunks, so a chunk is a fair sample of the set. A group belongs to one feeder (blocks.py).

No text is left out. The windows of a chunk overlap by as much as makes whole blocks of a group, and the last ones end
where the chunk does. The last chunk may be short: its windows begin in the one before, as if it were as long as the
others. Chunks left over in an epoch, which are fewer than a group, are drawn in the next one.
"""

from __future__ import annotations

import functools
import math
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.base.ids import digest64
from swarmnode.data.index import Split
from swarmnode.data.sample import SampleBatch
from swarmnode.data.tokens import Tokens

Indices = npt.NDArray[np.int64]

GROUP_CHUNKS_MAX = 64
CHUNK_COST = 0.003
"""A group gets another chunk only if that saves more than this share of an epoch (guess). The windows of larger groups
overlap less, but there are fewer groups to share among feeders."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The mapping from samples to tokens. The text of `total` tokens is cut into `stretches` of `tokens` tokens, each a
    chunk, or several where one is too short for a window. The last one ends with the text. Each has `windows` windows,
    spread evenly over it. A group of `group` stretches makes `span` blocks of `block` samples."""

    total: int
    tokens: int
    stretches: int
    context: int
    windows: int
    block: int
    group: int

    @property
    def span(self) -> int:
        """Number of blocks in a group."""
        return self.group * self.windows // self.block

    @property
    def groups(self) -> int:
        """Number of groups in an epoch."""
        return self.stretches // self.group

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
        return self.groups * self.span * self.block

    def starts(self, stretches: Indices, windows: Indices) -> Indices:
        """The first token of each window, [B], [B] -> [B]."""
        slack = self.tokens - 1 - self.context
        begin = np.minimum(stretches * self.tokens, self.total - self.tokens)
        return begin + windows * slack // max(1, self.windows - 1)


def layout(split: Split, context: int, block: int) -> ChunkLayout | None:
    """The layout of `split` whose windows overlap least. None when the text does not fill one block."""
    if (split.tokens - 1) // context < block:
        return None
    joined = -(-(context + 1) // split.chunk_tokens)
    tokens = min(split.tokens, joined * split.chunk_tokens)
    stretches = -(-split.tokens // tokens)
    least = -(-(tokens - 1) // context)
    best = None
    lowest = float("inf")
    for group in range(1, min(stretches, GROUP_CHUNKS_MAX) + 1):
        unit = block // math.gcd(group, block)  # so many windows more in each stretch are whole blocks
        windows = -(-least // unit) * unit
        cost = windows / least - 1.0 + stretches % group / stretches + CHUNK_COST * group * joined
        if cost < lowest:
            best = ChunkLayout(split.tokens, tokens, stretches, context, windows, block, group)
            lowest = cost
    return best


class ChunkSampler:
    """Maps any sample index of a run to its window, epoch after epoch without end."""

    def __init__(self, made: ChunkLayout, seed: int) -> None:
        self.layout = made
        self._order = functools.lru_cache(maxsize=4)(
            lambda pair: Permutation(made.stretches, digest64("chunks", seed, pair))
        )
        self._inside = functools.lru_cache(maxsize=64)(
            lambda epoch, chunk: Permutation(made.windows, digest64("chunk", seed, epoch, chunk))
        )

    def locate(self, indices: npt.ArrayLike) -> Indices:
        """The first token of the window of each sample index, [B] -> [B]."""
        flat = np.asarray(indices, dtype=np.int64).reshape(-1)
        assert flat.size == 0 or int(flat.min()) >= 0
        made = self.layout
        blocks, within = np.divmod(flat, made.block)
        groups, block = np.divmod(blocks, made.span)
        epochs, group = np.divmod(groups, made.groups)
        slots, places = np.divmod(block * made.block + within, made.windows)
        slots += group * made.group
        # Each second epoch begins in the middle of the order before it, which draws the chunks that were left over.
        slots = (slots + epochs % 2 * (made.stretches // 2)) % made.stretches
        stretches = np.empty_like(flat)
        windows = np.empty_like(flat)
        for epoch in np.unique(epochs):
            rows = np.flatnonzero(epochs == epoch)
            stretches[rows] = self._order(int(epoch) // 2)(slots[rows])
        for epoch, stretch in sorted(set(zip(epochs.tolist(), stretches.tolist(), strict=True))):
            rows = np.flatnonzero((epochs == epoch) & (stretches == stretch))
            windows[rows] = self._inside(epoch, stretch)(places[rows])
        return made.starts(stretches, windows)


ROUNDS = 4

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
        left = x >> self._half_bits
        right = x & self._mask
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
    """Windows of `context` + 1 tokens in `tokens`, [n]. Neighbours share a token. `rest` tokens at the end are in none,
    unless all begin so much later."""

    def __init__(self, tokens: Tokens, context: int) -> None:
        self.context = context
        self.count = max(0, (tokens.size - 1) // context)
        self.rest = tokens.size - 1 - self.count * context if self.count else 0
        self._tokens = tokens
        self._span = np.arange(context + 1)
        self._gathers = 0

    def gather(self, windows: Indices, later: Indices | int = 0) -> SampleBatch:
        """The samples in `windows`, [B], that begin `later` tokens, at most `rest`; their tokens are contiguous."""
        assert windows.size == 0 or (int(windows.min()) >= 0 and int(windows.max()) < self.count)
        starts = windows * self.context + later
        out = np.asarray(self._tokens)[starts[:, None] + self._span]
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
    """Maps any sample index of a run to its window, epoch after epoch without end, each epoch in its own order. In each
    second epoch the windows end where the text does, so that nothing of it is left out."""

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
        epochs, windows = self.locate(indices)
        return self._windows.gather(windows, epochs % 2 * self._windows.rest)


def spread(count: int, wanted: int) -> Indices:
    """At most `wanted` window numbers spread evenly over [0, count). Every validation of a run uses the same ones."""
    taken = min(count, wanted)
    return (np.arange(taken, dtype=np.int64) * count) // max(1, taken)

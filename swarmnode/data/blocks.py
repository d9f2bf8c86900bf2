"""Assigns samples to feeders in blocks: block b is samples [b x block_samples, (b + 1) x block_samples).

The owner of a block is the live feeder with the highest hash (rendezvous hashing [Thaler & Ravishankar 1998]). Feeders
with the same membership view therefore never draw the same block, and a feeder's death moves only its own blocks.
Feeders remember finished blocks and publish them in their records. Views that differ for a while cause duplicates,
which are counted, but never gaps.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId, digest64
from swarmnode.base.wire import record_pb2
from swarmnode.data.sampler import mixed

AHEAD_MAX = 256
"""A feeder goes this many blocks beyond the frontier before it takes over overdue blocks (guess: minutes of work)."""

AHEAD_SPANS = 16
"""The same limit in spans, the runs of blocks with one owner: with more feeders than this, some take over blocks of
others (guess)."""

RECORD_ENTRIES_MAX = 64
"""Finished blocks named in a record, 5 bytes each at most: a record has 1 KiB for everything."""

REACH = 4
"""A record may name finished blocks this far above its frontier, as a multiple of the blocks a feeder goes ahead."""

CLAIMS_MAX = 1024
"""Finished blocks accepted in a record of another feeder."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def owner(block: int, feeders: Collection[PeerId], seed: int) -> PeerId:
    """The feeder among `feeders` (not empty, in any order) that draws `block`."""
    return owners(block, 1, feeders, seed)[0][0]


def owners(first: int, count: int, feeders: Collection[PeerId], seed: int) -> list[tuple[PeerId, PeerId]]:
    """Returns (owner, runner-up) for each block in [first, first + count). A single feeder is both.

    The runner-up owns the block if the owner dies. A feeder's score for a block is the feeder's hash, mixed with the
    block's number by a bijection of 64 bits (Steele, Lea and Flood 2014, splitmix64). A separate hash for each pair
    took 50 ms with 125 feeders.
    """
    order = sorted(feeders)
    keys = np.array([_key(feeder, seed) for feeder in order], np.uint64)
    blocks = np.arange(first, first + count, dtype=np.uint64)
    numbers = mixed(keys[None, :] ^ mixed(blocks * GOLDEN + GOLDEN)[:, None])  # (count, feeders)
    best = numbers.argmax(axis=1)
    numbers[np.arange(count), best] = 0
    second = numbers.argmax(axis=1) if len(order) > 1 else best
    return [(order[i], order[j]) for i, j in zip(best.tolist(), second.tolist(), strict=True)]


@functools.lru_cache(maxsize=64)
def _owners_of(first: int, feeders: frozenset[PeerId], seed: int) -> list[tuple[PeerId, PeerId]]:
    """Caches `owners` for AHEAD_MAX blocks. In a simulated network, feeders with the same view share the result."""
    return owners(first, AHEAD_MAX, feeders, seed)


@functools.lru_cache(maxsize=4096)
def _key(feeder: PeerId, seed: int) -> int:
    return digest64(seed, "block", feeder)


class BlockLedger:
    """Tracks the finished blocks that one feeder knows of and picks its next block. Nothing here waits.

    Merge the other feeders' records before the first `take`. Otherwise a new feeder starts at block 0.
    """

    def __init__(self, me: PeerId, seed: int, span: int = 1) -> None:
        """`span` consecutive blocks have the same owner, because they lie in the same chunks of text."""
        self.me = me
        self.duplicates = 0
        """Blocks that this feeder and another feeder both finished, as far as this feeder knows."""
        self._seed = seed
        self._span = span
        self._ahead = max(AHEAD_MAX, AHEAD_SPANS * span)
        self.frontier = 0  # all blocks below this number are known to be finished by some feeder
        # Own finished blocks. Those up to `_ahead` below the frontier are kept too, to notice late claims of others.
        self._own: set[int] = set()
        self._others: set[int] = set()
        self._doubted: set[int] = set()  # finished by the word of feeders that were not met yet
        self._under_way: set[int] = set()
        self._counted: set[int] = set()
        self._view: frozenset[PeerId] = frozenset()
        self._owners: dict[int, tuple[PeerId, PeerId]] = {}

    @property
    def _reach(self) -> int:
        """A record may name finished blocks less than this far above its frontier."""
        return REACH * self._ahead

    @property
    def under_way(self) -> frozenset[int]:
        """Blocks that were taken and are neither finished nor abandoned."""
        return frozenset(self._under_way)

    def take(self, feeders: Iterable[PeerId]) -> tuple[int, str]:
        """Returns (block, reason): the next block to draw, given the live feeders. This feeder counts as live.

        The next block is this feeder's lowest open block. When it has none close above the frontier (`_ahead` blocks),
        another feeder holds the frontier up. This feeder then takes the *highest* open block of others, because the
        owners work upwards. Blocks whose runner-up is this feeder come first.
        """
        self._look(frozenset(feeders) | {self.me})
        end = self.frontier + self._ahead
        own = self._own
        others = self._others
        begun = self._under_way
        known = self._owners
        span = self._span
        for block in range(self.frontier, end):  # most blocks are finished, or belong to others
            if block in own or block in others or block in begun:
                continue
            if (known[block // span][0] if block // span in known else self._owner(block)) == self.me:
                if block in self._doubted:
                    continue
                return self._begin(block), "own"
        for block in sorted(self._doubted):
            self._doubted.discard(block)
            if self.frontier <= block < end and self._is_open(block) and self._owner(block) == self.me:
                return self._begin(block), "own, doubted"
        rest = [block for block in range(end - 1, self.frontier - 1, -1) if self._is_open(block)]
        for block in rest:
            self._owner(block)
            if self._owners[block // span][1] == self.me:
                return self._begin(block), "overdue"
        if rest:
            return self._begin(rest[0]), "overdue"
        while not (self._is_open(end) and self._owner(end) == self.me):
            end += 1
        return self._begin(end), "own, ahead"

    def coming(self, feeders: Iterable[PeerId]) -> Iterator[int]:
        """Yields the blocks that `take` returns next, if these feeders stay and take over no blocks of others."""
        self._look(frozenset(feeders) | {self.me})
        for block in range(self.frontier, self.frontier + self._ahead):
            if self._is_open(block) and self._owner(block) == self.me:
                yield block

    def finish(self, block: int) -> None:
        """Mark a taken `block` as finished: the gradient of each of its samples came back."""
        assert block in self._under_way, f"block {block} was not taken"
        self._under_way.remove(block)
        if block < self.frontier or block in self._others:
            self._count(block)
        self._own.add(block)
        self._advance()

    def merge(self, feeder: PeerId, blocks: record_pb2.Blocks, frontier_max: int) -> None:
        """Add the blocks that `feeder` reports as finished.

        Our own older record (`feeder` == me) restores a restarted feeder. `frontier_max` is the number of blocks that
        the run can have trained by now. Raises RemoteFault, and changes nothing, when the blocks are not ascending, too
        many or too far above their frontier, or when that frontier is above `frontier_max`.
        """
        self._learn(feeder, blocks, frontier_max)
        self._advance()

    def merge_all(self, told: Mapping[PeerId, record_pb2.Blocks], frontier_max: int) -> list[RemoteFault]:
        """Merge the records of many feeders, faster than one by one. Skips invalid records and returns their faults."""
        faults = []
        for feeder, blocks in told.items():
            try:
                self._learn(feeder, blocks, frontier_max)
            except RemoteFault as fault:
                faults.append(fault)
        self._advance()
        return faults

    def doubt_all(self, told: Mapping[PeerId, record_pb2.Blocks], frontier_max: int, trained: int) -> list[RemoteFault]:
        """Begin near the least frontier of feeders that were not met yet, in a run that has `trained` so many blocks:
        each feeder goes `_ahead` blocks beyond the frontier at most. Their finished blocks are drawn last.
        Returns the faults of invalid records."""
        faults = list[RemoteFault]()
        frontiers = list[int]()
        least = max(0, trained - self._ahead)
        for feeder, blocks in told.items():
            try:
                self._doubted |= self._checked(feeder, blocks, frontier_max)
                frontiers.append(blocks.finished_below)
            except RemoteFault as fault:
                faults.append(fault)
        if frontiers:
            self.frontier = max(self.frontier, least, min(*frontiers, trained))
            self._advance()
        return faults

    def _learn(self, feeder: PeerId, blocks: record_pb2.Blocks, frontier_max: int) -> None:
        claims = self._checked(feeder, blocks, frontier_max)
        if feeder == self.me:
            self._own |= claims
        else:
            for block in claims & self._own:
                self._count(block)
            self._others |= claims
        self.frontier = max(self.frontier, blocks.finished_below)

    def record(self) -> record_pb2.Blocks:
        """The finished blocks for this feeder's record, at most RECORD_ENTRIES_MAX. Blocks that others own come first,
        because their owners would draw them again. Then come the lowest."""
        reach = self._reach
        own = sorted(block for block in self._own if 0 <= block - self.frontier < reach)
        if len(own) > RECORD_ENTRIES_MAX:
            own.sort(key=lambda block: (bool(self._view) and self._owner(block) == self.me, block))
            own = sorted(own[:RECORD_ENTRIES_MAX])
        return record_pb2.Blocks(finished_below=self.frontier, finished=own)

    def finished(self) -> record_pb2.Blocks:
        """All blocks known to be finished, with at most CLAIMS_MAX above the frontier. Checkpoints store this."""
        above = sorted(block for block in self._own | self._others if block >= self.frontier)
        return record_pb2.Blocks(finished_below=self.frontier, finished=above[:CLAIMS_MAX])

    def _checked(self, feeder: PeerId, blocks: record_pb2.Blocks, frontier_max: int) -> set[int]:
        below = blocks.finished_below
        claims = blocks.finished[:]
        if below > frontier_max:
            raise RemoteFault(f"{feeder} says blocks below {below} are finished; {frontier_max} can be at most")
        if len(claims) > CLAIMS_MAX:
            raise RemoteFault(f"{feeder} names {len(claims)} finished blocks; {CLAIMS_MAX} are accepted")
        distinct = set(claims)
        if claims and (len(distinct) < len(claims) or claims[0] < below or claims != sorted(claims)):
            raise RemoteFault(f"{feeder} names finished blocks that are not ascending from {below}")
        if claims and claims[-1] >= below + self._reach:
            raise RemoteFault(f"{feeder} names finished block {claims[-1]}, too far above its frontier {below}")
        return distinct

    def _is_open(self, block: int) -> bool:
        return block not in self._own and block not in self._others and block not in self._under_way

    def _begin(self, block: int) -> int:
        self._under_way.add(block)
        return block

    def _count(self, block: int) -> None:
        if block not in self._counted:
            self._counted.add(block)
            self.duplicates += 1

    def _look(self, view: frozenset[PeerId]) -> None:
        if view != self._view:
            self._view = view
            self._owners.clear()

    def _owner(self, block: int) -> PeerId:
        piece = block // self._span
        if piece not in self._owners:
            first = piece - piece % AHEAD_MAX
            here = _owners_of(first, self._view, self._seed)
            self._owners.update(zip(range(first, first + AHEAD_MAX), here, strict=True))
        return self._owners[piece][0]

    def _advance(self) -> None:
        """Move the frontier past finished blocks and drop the entries that are no longer needed behind it."""
        before = self.frontier
        while self.frontier in self._own or self.frontier in self._others:
            self.frontier += 1
        self._others = {block for block in self._others if block >= self.frontier}
        self._doubted = {block for block in self._doubted if block >= self.frontier}
        if self.frontier != before or len(self._own) > 4 * self._ahead:
            kept = self.frontier - self._ahead
            self._own = {block for block in self._own if block >= kept}
            self._counted = {block for block in self._counted if block >= kept}
            first = self.frontier // self._span
            self._owners = {piece: who for piece, who in self._owners.items() if piece >= first}

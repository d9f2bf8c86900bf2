"""Which feeder draws which samples: block b is samples [b x block_samples, (b + 1) x block_samples).

The owner of a block is the live feeder with the highest hash (rendezvous hashing [Thaler & Ravishankar 1998]), so that
feeders whose views agree never draw the same block, and a feeder's death moves only its own blocks. Finished blocks are
remembered and spread with the feeders' records. Views that differ for a while cost duplicates, which are counted, never
gaps.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from swarmnode.errors import RemoteFault
from swarmnode.ids import PeerId, digest64
from swarmnode.wire import record_pb2

AHEAD_MAX = 256
"""Blocks a feeder goes beyond the frontier before it helps the one that holds it up (guess: minutes of work)."""

RECORD_ENTRIES_MAX = 64
"""Finished blocks named in a record, 5 bytes each at most: a record has 1 KiB for everything."""

REACH_MAX = 4 * AHEAD_MAX
"""How far above its frontier a record may name a finished block."""

CLAIMS_MAX = 1024
"""Finished blocks accepted in a record of another feeder."""

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def owner(block: int, feeders: Collection[PeerId], seed: int) -> PeerId:
    """The feeder among `feeders` (not empty, in any order) that draws `block`."""
    return owners(block, 1, feeders, seed)[0][0]


def owners(first: int, count: int, feeders: Collection[PeerId], seed: int) -> list[tuple[PeerId, PeerId]]:
    """(owner, who would be it without that one) of blocks `first` up to `first` + `count`; twice the same if alone.

    A feeder's number for a block is its own hash, mixed with the block's number by a bijection of 64 bits (Steele, Lea
    and Flood 2014, splitmix64): a hash for each pair took 50 ms with 125 feeders.
    """
    order = sorted(feeders)
    keys = np.array([_key(feeder, seed) for feeder in order], np.uint64)
    blocks = np.arange(first, first + count, dtype=np.uint64)
    numbers = _mix(keys[None, :] ^ _mix(blocks * GOLDEN + GOLDEN)[:, None])  # (count, feeders)
    best = numbers.argmax(axis=1)
    numbers[np.arange(count), best] = 0
    second = numbers.argmax(axis=1) if len(order) > 1 else best
    return [(order[i], order[j]) for i, j in zip(best.tolist(), second.tolist(), strict=True)]


@functools.lru_cache(maxsize=64)
def _owners_of(first: int, feeders: frozenset[PeerId], seed: int) -> list[tuple[PeerId, PeerId]]:
    """Of AHEAD_MAX blocks: as they are in a simulated world for many feeders that agree on who feeds."""
    return owners(first, AHEAD_MAX, feeders, seed)


@functools.lru_cache(maxsize=4096)
def _key(feeder: PeerId, seed: int) -> int:
    return digest64(seed, "block", feeder)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class BlockLedger:
    """What one feeder knows of finished blocks, and what it does next. Plain decisions: nothing waits here.

    Merge the other feeders' records before the first `take`: a newcomer that knows nothing starts at block 0.
    """

    def __init__(self, me: PeerId, seed: int) -> None:
        self.me = me
        self.duplicates = 0
        """Blocks that this feeder finished and another finished too, as far as known here."""
        self._seed = seed
        self._frontier = 0
        # Own finished blocks, also those up to AHEAD_MAX below the frontier, to notice late claims of others.
        self._own: set[int] = set()
        self._others: set[int] = set()
        self._under_way: set[int] = set()
        self._counted: set[int] = set()
        self._view: frozenset[PeerId] = frozenset()
        self._owners: dict[int, tuple[PeerId, PeerId]] = {}

    @property
    def frontier(self) -> int:
        """Every block below is known to be finished, by whomever."""
        return self._frontier

    @property
    def under_way(self) -> frozenset[int]:
        """Blocks taken and not yet finished or given up."""
        return frozenset(self._under_way)

    def take(self, feeders: Iterable[PeerId]) -> tuple[int, str]:
        """The next block to draw and why, given the live feeders (this one counts as live): (block, reason).

        The lowest block that is this feeder's own. When those within AHEAD_MAX of the frontier are done, another feeder
        holds the frontier up: then the *highest* open block of others, since they work upwards themselves.
        """
        self._look(frozenset(feeders) | {self.me})
        end = self._frontier + AHEAD_MAX
        own, others, begun, known = self._own, self._others, self._under_way, self._owners
        for block in range(self._frontier, end):  # most are finished, or others'
            if block in own or block in others or block in begun:
                continue
            if (known[block][0] if block in known else self._owner(block)) == self.me:
                return self._begin(block), "own"
        rest = [block for block in range(end - 1, self._frontier - 1, -1) if self._is_open(block)]
        for block in rest:
            self._owner(block)
            if self._owners[block][1] == self.me:
                return self._begin(block), "overdue"
        if rest:
            return self._begin(rest[0]), "overdue"
        while not (self._is_open(end) and self._owner(end) == self.me):
            end += 1
        return self._begin(end), "own, ahead"

    def finish(self, block: int) -> None:
        """`block`, taken before, is done: the gradient of each of its samples came back."""
        assert block in self._under_way, f"block {block} was not taken"
        self._under_way.remove(block)
        if block < self._frontier or block in self._others:
            self._count(block)
        self._own.add(block)
        self._advance()

    def abandon(self, block: int) -> None:
        """`block`, taken before, was not finished: whoever owns it may take it again."""
        self._under_way.discard(block)

    def merge(self, feeder: PeerId, blocks: record_pb2.Blocks, frontier_max: int) -> None:
        """Learn what `feeder` says it finished; our own older record (`feeder` == me) restores a restarted feeder.

        Raises RemoteFault, and learns nothing, when the blocks are not ascending, too many, too far above their
        frontier, or when that is above `frontier_max`: as many blocks as the samples fill that the run can have
        trained.
        """
        self._learn(feeder, blocks, frontier_max)
        self._advance()

    def merge_all(self, told: Mapping[PeerId, record_pb2.Blocks], frontier_max: int) -> list[RemoteFault]:
        """`merge` of what many feeders say, quicker; returns what was wrong with some of it, which is left out."""
        faults = []
        for feeder, blocks in told.items():
            try:
                self._learn(feeder, blocks, frontier_max)
            except RemoteFault as fault:
                faults.append(fault)
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
        self._frontier = max(self._frontier, blocks.finished_below)

    def record(self) -> record_pb2.Blocks:
        """What this feeder says in its record, RECORD_ENTRIES_MAX entries at most: first those that others own, who
        would draw them again, then the lowest."""
        own = sorted(block for block in self._own if 0 <= block - self._frontier < REACH_MAX)
        if len(own) > RECORD_ENTRIES_MAX:
            own.sort(key=lambda block: (bool(self._view) and self._owner(block) == self.me, block))
            own = sorted(own[:RECORD_ENTRIES_MAX])
        return record_pb2.Blocks(finished_below=self._frontier, finished=own)

    def finished(self) -> record_pb2.Blocks:
        """All that is known to be finished, by whomever: what a checkpoint remembers."""
        above = sorted(block for block in self._own | self._others if block >= self._frontier)
        return record_pb2.Blocks(finished_below=self._frontier, finished=above[:CLAIMS_MAX])

    def _checked(self, feeder: PeerId, blocks: record_pb2.Blocks, frontier_max: int) -> set[int]:
        below, claims = blocks.finished_below, blocks.finished[:]
        if below > frontier_max:
            raise RemoteFault(f"{feeder} says blocks below {below} are finished; {frontier_max} can be at most")
        if len(claims) > CLAIMS_MAX:
            raise RemoteFault(f"{feeder} names {len(claims)} finished blocks; {CLAIMS_MAX} are accepted")
        distinct = set(claims)
        if claims and (len(distinct) < len(claims) or claims[0] < below or claims != sorted(claims)):
            raise RemoteFault(f"{feeder} names finished blocks that are not ascending from {below}")
        if claims and claims[-1] >= below + REACH_MAX:
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
        if block not in self._owners:
            first = block - block % AHEAD_MAX
            here = _owners_of(first, self._view, self._seed)
            self._owners.update(zip(range(first, first + AHEAD_MAX), here, strict=True))
        return self._owners[block][0]

    def _advance(self) -> None:
        """Move the frontier over what is finished, and forget what lies behind."""
        before = self._frontier
        while self._frontier in self._own or self._frontier in self._others:
            self._frontier += 1
        self._others = {block for block in self._others if block >= self._frontier}
        if self._frontier != before or len(self._own) > 4 * AHEAD_MAX:
            kept = self._frontier - AHEAD_MAX
            self._own = {block for block in self._own if block >= kept}
            self._counted = {block for block in self._counted if block >= kept}
            self._owners = {block: who for block, who in self._owners.items() if block >= self._frontier}

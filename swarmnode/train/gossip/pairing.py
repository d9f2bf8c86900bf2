"""Decides which replicas meet at a round's boundary. Every replica computes the same answer alone, so that no
message and no leader is needed.

Pairs: every two members draw a number from SHA-256(run, stage, round, member), and the least numbers meet first. All
perfect matchings are equally likely, as with shuffling and pairing neighbours. But if two replicas' views differ by
one member, a shuffle changes nearly all pairs; this method changes only the few that the member's absence affects
(measured: tests/gossip/test_pairing.py).

Groups: members in the order of numbers drawn from the same hashes, cut into equal parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from swarmnode.base.ids import PeerId, RunId, digest64, short

# Guess: larger stages are cut by hash into parts of about this many, of which all pairs are looked at.
TOGETHER_MAX = 128
ROUNDS_KEPT = 4  # of which members' draws are known, 100 bytes each
MATCHINGS_KEPT = 8


def draws(run_id: RunId, stage: int, round_index: int, members: Iterable[PeerId]) -> dict[PeerId, int]:
    """64 bits for each member, which nobody else's presence changes; in the order of their names."""
    names = sorted(set(members))
    return dict(zip(names, map(_drawn(run_id, stage, round_index).__getitem__, names), strict=True))


class _PairDraws(dict[PeerId, int]):
    """The draws of one round; each member's is computed on first use."""

    def __init__(self, *of: str | int) -> None:
        self._of = of

    def __missing__(self, member: PeerId) -> int:
        drawn = self[member] = digest64("pairing", *self._of, member)
        return drawn


@lru_cache(ROUNDS_KEPT)
def _drawn(run_id: RunId, stage: int, round_index: int) -> _PairDraws:
    return _PairDraws(run_id, stage, round_index)


def shuffled(run_id: RunId, stage: int, round_index: int, members: Iterable[PeerId]) -> list[PeerId]:
    """`members` without repetitions, in an order that only (run, stage, round, members) decides."""
    drawn = draws(run_id, stage, round_index, members)
    return sorted(drawn, key=lambda member: (drawn[member], member))


def groups(
    run_id: RunId, stage: int, round_index: int, members: Iterable[PeerId], size: int | None = 2
) -> list[tuple[PeerId, ...]]:
    """The groups of this round: `size` members each (None: all in one), the last one what is left over."""
    if size == 2:
        return pairs(run_id, stage, round_index, members)
    order = shuffled(run_id, stage, round_index, members)
    step = len(order) if size is None else size
    assert step >= 1 or not order, f"groups of {size}"
    return [tuple(order[start : start + step]) for start in range(0, len(order), max(step, 1))]


def _shift(count: int) -> int:
    """The number of low bits of a draw to drop: the rest names the part that one of `count` members belongs to."""
    return 64 - max(0, (count - 1) // TOGETHER_MAX).bit_length()


def pair(run_id: RunId, stage: int, round_index: int, members: Iterable[PeerId], me: PeerId) -> tuple[PeerId, ...]:
    """Return the pair of `pairs` that contains `me`; () if `me` is not among `members`."""
    drawn = draws(run_id, stage, round_index, members)
    if me not in drawn:
        return ()
    shift = _shift(len(drawn))
    mine = drawn[me] >> shift
    part = [member for member, draw in drawn.items() if draw >> shift == mine]
    numbers = np.array([drawn[member] for member in part], np.uint64)
    other = _matching(numbers.tobytes())[part.index(me)]
    return (me,) if other < 0 else tuple(sorted((me, part[other])))


def pairs(run_id: RunId, stage: int, round_index: int, members: Iterable[PeerId]) -> list[tuple[PeerId, ...]]:
    """The pairs of this round, each in the order of names, then those left alone."""
    drawn = draws(run_id, stage, round_index, members)
    parts: dict[int, list[PeerId]] = {}
    shift = _shift(len(drawn))
    for member, draw in drawn.items():
        parts.setdefault(draw >> shift, []).append(member)
    met: list[tuple[PeerId, ...]] = []
    alone: list[tuple[PeerId, ...]] = []
    for part in parts.values():
        numbers = np.array([drawn[m] for m in part], np.uint64)
        for member, other in zip(part, _matching(numbers.tobytes()), strict=True):
            if other < 0:
                alone.append((member,))
            elif member < part[other]:
                met.append((member, part[other]))
    return met + alone


@lru_cache(MATCHINGS_KEPT)
def _matching(numbers: bytes) -> tuple[int, ...]:
    """The index of each one's partner, -1 for the odd one out: over and over, those meet who are each other's least."""
    drawn = np.frombuffer(numbers, np.uint64)
    count = len(drawn)
    never = np.iinfo(np.uint64).max
    number = _mix(drawn[:, None] ^ drawn[None, :])
    np.fill_diagonal(number, never)
    partner_of = np.full(count, -1, np.int64)
    here = np.arange(count)
    for _ in range(count // 2):
        if len(here) < 2:
            break
        least = number.argmin(axis=1)
        mutual = least[least] == np.arange(len(here))
        partner_of[here[mutual]] = here[least[mutual]]
        number = number[np.ix_(~mutual, ~mutual)]
        here = here[~mutual]
    return tuple(int(index) for index in partner_of)


def remember(nodes: int) -> None:
    """Keep what many nodes of this process find out alike."""
    global _drawn, _matching
    _drawn = lru_cache(max(ROUNDS_KEPT, nodes // 8))(_drawn.__wrapped__)
    _matching = lru_cache(max(MATCHINGS_KEPT, nodes))(_matching.__wrapped__)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64 bits in which each bit of the input moves half of the output (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ (x >> np.uint64(33))


ALONE = "the odd one out of 1 members"  # the reason of `partners` for a stage's only replica, which meets nobody


def partners(
    run_id: RunId, stage: int, round_index: int, members: Sequence[PeerId], me: PeerId, size: int | None = 2
) -> tuple[tuple[PeerId, ...], str]:
    """(those `me` meets in this round, maybe nobody; the reason)."""
    count = len(set(members))
    of = run_id, stage, round_index, members
    for group in [pair(*of, me)] if size == 2 else groups(*of, size):
        if me in group:
            others = tuple(member for member in group if member != me)
            if others:
                return others, f"round {round_index}: with {', '.join(map(short, others))} of {count} members"
            return (), f"round {round_index}: the odd one out of {count} members"
    return (), f"round {round_index}: not among the {count} eligible members"

"""Who meets whom at a round's boundary. Every replica computes the same answer alone (design section 5).

Members are sorted, drawn a number each from a generator seeded by SHA-256(run, stage, round), put in the order of the
numbers, and neighbours meet. `Random.random` is the one draw that Python promises to repeat across versions; `shuffle`
is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarmnode.ids import PeerId, RunId, digest, seeded, short


def view_hash(members: Iterable[PeerId]) -> bytes:
    """32 bytes that are equal at two replicas exactly when they saw the same members, in whatever order."""
    return digest("view", *sorted(set(members)))


def shuffled(run_id: RunId, stage: int, round_index: int, members: Iterable[PeerId]) -> list[PeerId]:
    """`members` without repetitions, in an order that only (run, stage, round, members) decides."""
    generator = seeded("pairing", run_id, stage, round_index)
    drawn = [(generator.random(), member) for member in sorted(set(members))]
    return [member for _, member in sorted(drawn)]


def groups(
    run_id: RunId, stage: int, round_index: int, members: Iterable[PeerId], size: int | None = 2
) -> list[tuple[PeerId, ...]]:
    """The groups of this round: `size` members each (None: all in one), the last one what is left over."""
    order = shuffled(run_id, stage, round_index, members)
    step = len(order) if size is None else size
    assert step >= 1 or not order, f"groups of {size}"
    return [tuple(order[start : start + step]) for start in range(0, len(order), max(step, 1))]


def partners(
    run_id: RunId, stage: int, round_index: int, members: Sequence[PeerId], me: PeerId, size: int | None = 2
) -> tuple[tuple[PeerId, ...], str]:
    """(those `me` meets in this round, maybe nobody; the reason)."""
    count = len(set(members))
    for group in groups(run_id, stage, round_index, members, size):
        if me in group:
            others = tuple(member for member in group if member != me)
            if others:
                return others, f"round {round_index}: with {', '.join(map(short, others))} of {count} members"
            return (), f"round {round_index}: the odd one out of {count} members"
    return (), f"round {round_index}: not among the {count} eligible members"


def partner(
    run_id: RunId, stage: int, round_index: int, members: Sequence[PeerId], me: PeerId
) -> tuple[PeerId | None, str]:
    """(the one `me` meets in this round, or None for a lone step; the reason)."""
    others, reason = partners(run_id, stage, round_index, members, me, 2)
    return (others[0] if others else None), reason

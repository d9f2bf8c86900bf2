"""Stages that change places on odd microbatches, to learn each other's work (CheckFree+, arXiv 2506.15461)."""

from __future__ import annotations


def swaps(stages: int) -> tuple[tuple[int, int], ...]:
    """The pairs of inner stages that change places: the first two and the last two; none below four stages.

    The first and the last stage hold embedding and head and stay in place. Pairs that would overlap are one.
    """
    if stages < 4:
        return ()
    first, last = (1, 2), (stages - 3, stages - 2)
    return (first,) if last[0] <= first[1] else (first, last)


def partner(stage: int, stages: int) -> int | None:
    """The stage that changes places with `stage`, None when it keeps its own."""
    for pair in swaps(stages):
        if stage in pair:
            return pair[1] if stage == pair[0] else pair[0]
    return None

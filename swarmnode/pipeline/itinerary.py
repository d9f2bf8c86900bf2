"""The stages a microbatch visits, in order: straight; swapped as in CheckFree+; or without a lost stage."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from swarmnode.model.stage_swap import swaps

WAYS_KEPT = 64  # guess: a run has a few itineraries, and each call names one
SKIPPED_SHARE_MAX = 1 / 3  # SkipPipe, arXiv 2502.19913: more costs more than waiting


def itinerary(stages: int, serial: int, *, swapped: bool = False, lost: Sequence[int] = ()) -> tuple[int, ...]:
    """The itinerary of the feeder's microbatch number `serial`. `lost` inner stages are left out, lowest first, up to
    SKIPPED_SHARE_MAX of all; the first and last stage never are."""
    way = list(range(stages))
    if swapped and serial % 2:
        for a, b in swaps(stages):
            way[a], way[b] = way[b], way[a]
    room = int(stages * SKIPPED_SHARE_MAX)
    left_out = [stage for stage in sorted(lost) if 0 < stage < stages - 1][:room]
    return tuple(stage for stage in way if stage not in left_out)


def successors(stage: int, stages: int, *, swapped: bool, skips: bool) -> tuple[int, ...]:
    """The stages that a microbatch may go to from `stage`, ascending: the ones whose replicas must be known well."""
    ways = [itinerary(stages, serial, swapped=swapped) for serial in (0, 1)]
    found = {way[way.index(stage) + 1] for way in ways if way[-1] != stage}
    if skips:
        found |= {way[i] for way in ways for i in [way.index(stage) + 2] if i < stages}
    return tuple(sorted(found))


@functools.lru_cache(maxsize=WAYS_KEPT)
def fault(way: tuple[int, ...], stages: int) -> str | None:
    """The error in an itinerary from outside, or None."""
    if not way or way[0] != 0 or way[-1] != stages - 1:
        return f"an itinerary that does not lead from stage 0 to stage {stages - 1}"
    if len(set(way)) != len(way) or any(stage >= stages for stage in way):
        return f"an itinerary that visits a stage twice or one that is not among {stages}"
    if stages - len(way) > int(stages * SKIPPED_SHARE_MAX):
        return f"an itinerary of {len(way)} of {stages} stages; a third may be left out"
    return None

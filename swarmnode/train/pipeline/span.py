"""The consecutive stages that one machine serves. Pure.

A machine with room serves a block of stages, one hop instead of several. Blocks are the nodes of a binary tree over the
stages: two of them nest, or have no stage in common. Petals lets a machine begin anywhere, and there spans that overlap
by halves leave some stages with twice the servers of others and every route with more hops
(github.com/bigscience-workshop/petals/issues/389). Where blocks nest, the end of each is the end of all larger ones'
halves, and machines that hold the whole model, half of it and one stage follow each other without a rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from swarmnode.base.ids import PeerId, machine_of, stage_name
from swarmnode.net.membership.swarm import Member, Swarm
from swarmnode.train.pipeline.rebalance import RebalanceRules, load


def block_around(stage: int, stages: int, most: int, fits: Callable[[range], bool]) -> range:
    """The largest block of at most `most` stages that holds `stage` and `fits`; `stage` alone if no larger one does."""
    block = range(stages)
    while len(block) > 1 and (len(block) > most or not fits(block)):
        middle = (block.start + block.stop + 1) // 2
        block = range(block.start, middle) if stage < middle else range(middle, block.stop)
    return block


def share_of(stage: int, block: Sequence[int], costs: Sequence[float]) -> float:
    """The share of a machine's time that `stage` takes where it serves all of `block`: by the stages' arithmetic."""
    return costs[stage] / sum(costs[one] for one in block) if stage in block else 1.0


def entries(before: Iterable[Member], here: Iterable[Member]) -> tuple[list[Member], frozenset[PeerId]]:
    """(the replicas of a stage that begin a span there, the peer ids of those whose machine serves the stage `before`).

    The latter get their microbatches from their own machine. Stages that are equally fast get as many there as the
    machines send whose spans end before, so each machine's work comes to it whole."""
    machines = {machine_of(member.peer) for member in before}
    heads = list[Member]()
    inner = set[PeerId]()
    for member in here:
        if machine_of(member.peer) in machines:
            inner.add(member.peer)
        else:
            heads.append(member)
    return heads, frozenset(inner)


def within(block: range, unable: Collection[int]) -> bool:
    """Whether `block` has no stage that a machine is `unable` to serve."""
    return not any(stage in unable for stage in block)


def move_block(
    swarm: Swarm, costs: Sequence[float], rules: RebalanceRules, here: range, speed: float, blocks: Iterable[range]
) -> tuple[range | None, str]:
    """The block that a machine should serve instead of `here`, where it does `speed` samples/s, and why; None: it
    stays.

    A stage that nobody serves counts first, then the slowest of all, which must become `rules.ratio` times as fast: a
    block takes as many downloads as it has stages. No stage is left with fewer than `min_keep` replicas, unless one
    that stands empty is filled: then one stays."""
    now = load(swarm, costs)
    work = speed * sum(costs[stage] for stage in here)

    def after(block: range) -> list[float]:
        there = work / sum(costs[stage] for stage in block)
        return [have - speed * (stage in here) + there * (stage in block) for stage, have in enumerate(now.capacity)]

    empty = [stage for stage, count in enumerate(now.replicas) if not count]
    best: tuple[float, range] | None = None
    for block in blocks:
        keep = 1 if empty else rules.min_keep
        left = [now.replicas[stage] - 1 for stage in here if stage not in block]
        fills = any(stage in block for stage in empty)
        if block == here or min(left, default=keep) < keep or (empty and not fills):
            continue
        slowest = min(speed for stage, speed in enumerate(after(block)) if stage not in empty or stage in block)
        if best is None or slowest > best[0]:
            best = slowest, block
    if best is None:
        return None, "every other block would leave a stage with too few replicas"
    least = min(now.capacity)
    if empty:
        return best[1], f"nobody serves {stage_name(empty[0])}"
    if best[0] < rules.ratio * max(least, 1e-9):
        return None, f"the slowest stage would do {best[0]:.3g} samples/s instead of {least:.3g}"
    return best[1], f"the slowest stage does {best[0]:.3g} samples/s then, not {least:.3g}"

"""A tied model whose first and last stage are trained by different machines keeps one table."""

from __future__ import annotations

from dataclasses import replace

import torch

from swarmnode.manifest import Manifest
from tests.support.village import TINY, Recording, Villager, Village, manifest, village


def tied(stages: int = 3, **gossip: object) -> Manifest:
    run = manifest(stages, "average", **gossip)
    return replace(run, model=replace(TINY, tied=True))


def table(person: Villager) -> torch.Tensor:
    assert person.replica is not None and person.replica.tied is not None
    return person.replica.tied._phi


def apart(v: Village) -> float:
    """Largest distance of two ends' tables."""
    tables = [table(p).clone() for p in v.people if p.task is not None and not p.task.done() and p.node.stage != 1]
    return max(float((one - tables[0]).norm()) for one in tables)


async def test_both_ends_have_the_same_table_after_rounds() -> None:
    run = tied()
    start = Recording(run, 0).tied
    assert start is not None
    begun = start._phi.clone()
    async with village(run) as v:
        first, _, last = [v.add(stage) for stage in range(3)]
        await v.until(lambda: v.total() > 1024, "training")
        await v.until(lambda: apart(v) < 1e-5 * float((table(first) - begun).norm()), "equal tables")
        one, other = first.replica, last.replica
        assert one is not None and other is not None and one.tied is not None and other.tied is not None
        moved = float((table(first) - begun).norm())
        for end in (one.tied._other, other.tied._other - begun):  # each end has the other's steps
            assert 0.1 * moved < float(end.norm()) < 2 * moved

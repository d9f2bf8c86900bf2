"""A tied model whose first and last stage are trained by different machines keeps one table."""

from dataclasses import replace

from torch import Tensor

from swarmnode.manifest import Manifest
from swarmnode.model.tied_table import TiedTable
from tests.support.village import TINY, Recording, Village, Villager, manifest, told, village


def tied(stages: int) -> Manifest:
    return replace(manifest(stages, "average"), model=replace(TINY, tied=True))


def table(person: Villager) -> TiedTable:
    assert person.replica is not None and person.replica.tied is not None
    return person.replica.tied


def lag(v: Village, start: Tensor) -> float:
    """The largest distance of the living ends' tables, relative to what the first has moved."""
    ends = [table(p).phi.clone() for p in v.people if p.task is not None and not p.task.done() and p.node.stage != 1]
    return max(float((one - ends[0]).norm()) for one in ends) / float((ends[0] - start).norm())


async def test_both_ends_have_one_table_and_a_newcomer_takes_it() -> None:
    run = tied(3)
    begun = Recording(run, 0).tied
    assert begun is not None
    start = begun.phi.clone()
    async with village(run) as v:
        first, _, last = [v.add(stage) for stage in range(3)]
        await v.until(lambda: v.total() > 512 and lag(v, start) < 0.1, "equal tables")
        second = v.add(2)
        await v.until(lambda: second.node.served is not None and bool(told(second, "table.taken")), "a newcomer")
        await last.die()
        total = v.total()
        await v.until(lambda: v.total() > total + 512 and lag(v, start) < 0.1, "equal tables after a death")
        moved = float((table(first).phi - start).norm())
        for steps in (table(first).other, table(second).other - start):  # each end has the other's
            assert 0.1 * moved < float(steps.norm()) < 2.0 * moved

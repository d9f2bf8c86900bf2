"""Whole nodes train adapters, with nothing else on the way, or a tied model with one table at both ends."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarmnode.app.local.pretrained import lay_out
from swarmnode.keep.transfer.snapshot import newcomer_part
from swarmnode.model.adapter import trained_count
from swarmnode.model.section import section_sizes, snapshot_nbytes
from swarmnode.model.split import split
from swarmnode.model.tied_table import TiedTable
from swarmnode.run.manifest import Manifest, TrainingSpec
from tests.node.test_base import held_out_loss, meeting_point, received, run_of, slice_nbytes, volunteer
from tests.support.published_model import llama, start_from
from tests.support.village import (
    TINY,
    Recording,
    Village,
    Villager,
    lose,
    losses,
    manifest,
    told,
    village,
    with_recovery,
)


def adapting(run: Manifest) -> Manifest:
    inner = replace(run.inner, optimizer="adamw", learning_rate=2e-2, muon_learning_rate=2e-2)
    return replace(run, inner=inner, training=TrainingSpec(kind="adapters", rank=4))


async def test_adapters_meet_are_downloaded_and_begin_again() -> None:
    run = adapting(with_recovery(manifest(method="average", codec="bf16", round_samples=64), keepers=0))
    async with village(run, stages=(0, 1, 1, 2)) as v:
        await v.heard(192)
        assert losses(v)[-1] < losses(v)[0] - 0.3
        joiner = v.add(2)
        await v.until(lambda: bool(told(joiner, "recovery.done")), "a joiner has the stage's adapters")
        sizes = section_sizes(run, split(run.model, 3)[2])
        assert told(joiner, "recovery.done")[0]["nbytes"] == snapshot_nbytes(
            newcomer_part(run.gossip, sizes).sizes(sizes)
        )
        await v.until(lambda: all(told(p, "exchange.paired") for p in v.people[1:]), "rounds of stages 1 and 2")
        await lose(v, 1)
        joiners = [v.add(1), v.add(1)]
        await v.until(lambda: all(told(j, "recovery.done") for j in joiners), "the stage is served again")
        assert sorted(str(told(j, "recovery.done")[0]["method"]) for j in joiners) == ["base", "replica"]
        await v.trains(64, "training goes on")
        for replica in v.made:
            assert replica.outer.message_nbytes == 2 * trained_count(run, replica.stage.part)
        one, *others = (replica.stage for replica in v.made if replica.stage.part.stage == 1)
        for other in others:
            for mine, theirs in zip(one.module.buffers(), other.module.buffers(), strict=True):
                assert torch.equal(mine, theirs), "the base stays"


@pytest.mark.parametrize("tied", [False, True])
async def test_every_node_freezes_its_part_of_the_base_model(tmp_path: Path, tied: bool) -> None:
    model = llama(tmp_path / "model", tied=tied, shard="5GB")
    made = start_from(tmp_path / "model", adapting(manifest()))
    assert made.recipe.manifest.model.tied == tied
    run = adapting(run_of(made.recipe.manifest.model, made.index, 2))
    place = lay_out(tmp_path / "run", made)
    async with village(run) as v:
        meeting_point(v, place, tmp_path / "cache")
        people = [v.add(stage, base=volunteer(v, tmp_path / f"cache-{stage}")) for stage in range(2)]
        await v.until(lambda: bool(told(people[0], "validation.done")), "the first validation")
        first = float(str(told(people[0], "validation.done")[0]["loss"]))
        assert abs(first - held_out_loss(model, run)) < 0.02, "the base in bfloat16"
        await v.heard(128)
        late = v.add(1, base=volunteer(v, tmp_path / "cache-late"))
        await v.until(lambda: late.node.state == 3, "the joiner trains")
        assert told(late, "recovery.done")[0]["method"] == "replica"
        assert received(late) == slice_nbytes(made.index, run, 1) + len(made.index.canonical())
        assert late.replica is not None and people[1].replica is not None
        mine = late.replica.stage.module
        theirs = people[1].replica.stage.module
        for (name, held), other in zip(mine.named_buffers(), theirs.buffers(), strict=True):
            assert torch.equal(held, other), name
        await v.until(lambda: losses(v)[-1] < losses(v)[0] - 0.1, "it learns")
        assert people[0].replica is not None
        table = people[0].replica.stage.module.model.embed_tokens.weight
        assert torch.equal(table, mine.head) == tied, "both ends hold the one table"


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

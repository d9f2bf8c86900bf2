"""Whole nodes of three stages that average gradients: all replicas of a stage take the same steps."""

import dataclasses

import pytest
import torch

from swarmnode.run.manifest import Manifest
from swarmnode.train.gossip import step_end
from tests.node.test_gradient import all_step, steps
from tests.support.village import Village, manifest, told, village

BATCH = 8


def run_of(stages: int = 3) -> Manifest:
    run = manifest(stages, "gradient", codec="int8", group=0, round_samples=BATCH)
    pipeline = dataclasses.replace(run.pipeline, validation_every_samples=1 << 20)
    inner = dataclasses.replace(run.inner, inner_batch=BATCH, microbatch=4, decay="constant")
    return dataclasses.replace(run, pipeline=pipeline, inner=inner)


async def together(here: Village) -> None:
    """Wait until all replicas are after the same step and hold nothing of the next, then compare them."""

    def settled() -> bool:
        return len({steps(person) for person in here.people}) == 1

    await here.until(settled, "a moment between two steps")
    for stage in range(here.run.pipeline.stages):
        mates = [person for person in here.people if person.served.stage == stage]
        for mate in mates[1:]:
            assert torch.equal(mates[0].replica.stage.theta, mate.replica.stage.theta), f"stage {stage}"


@pytest.mark.parametrize("stages", [(0, 0, 1, 1, 2, 2), (0, 0, 0, 1, 2, 2), (0, 1, 2)])
async def test_replicas_of_each_stage_stay_equal_to_the_bit(stages: tuple[int, ...]) -> None:
    async with village(run_of(), stages=stages) as here:
        await all_step(here, 20)
        await together(here)
        for stage in range(here.run.pipeline.stages):
            assert len({p.served.hop.inner_steps for p in here.people if p.served.stage == stage}) == 1


async def test_a_newcomer_at_a_later_stage_joins_the_steps() -> None:
    async with village(run_of(), stages=(0, 0, 1, 2, 2)) as here:
        await all_step(here, 5)
        newcomer = here.add(1)
        await here.until(lambda: newcomer.node.served is not None and steps(newcomer) > 0, "a newcomer that steps")
        await all_step(here, 12)
        one, other = (p.replica.stage.theta for p in here.people if p.served.stage == 1)
        assert float((one - other).norm()) < 0.05 * float(one.norm()), "the steps of its download apart, which heals"


async def test_a_kill_in_the_middle_of_a_step_stops_nobody() -> None:
    async with village(run_of(), stages=(0, 0, 1, 1, 2, 2)) as here:
        await all_step(here, 5)
        await here.people.pop(3).die()
        await all_step(here, 5)
        await here.people.pop(0).die()
        await all_step(here, 10)
        await together(here)


async def test_two_of_a_stage_that_missed_each_other_wait_for_each_other() -> None:
    """Each waited for the other in vain once, and from then on took its steps by itself, which teach nothing: one was
    always past the step when the other began it."""
    async with village(run_of(), stages=(0, 0, 0, 1, 2, 2)) as here:
        await all_step(here, 4)
        one, other = (person for person in here.people if person.served.stage == 2)
        for mate, missed in ((one, other), (other, one)):
            mate.served.gossip._lost(missed.node.me)
        await all_step(here, 4)
        for mate in (one, other):
            assert int(str(told(mate, "exchange.paired")[-1]["round"])) > steps(mate) - 3


async def test_where_all_feeders_validate_no_step_is_empty() -> None:
    run = run_of()
    pipeline = dataclasses.replace(run.pipeline, validation_every_samples=2 * BATCH, validation_samples=64)
    async with village(dataclasses.replace(run, pipeline=pipeline), stages=(0, 0, 1, 2)) as here:
        await all_step(here, 4)
        begun = [len(told(person, "exchange.paired")) for person in here.people[:2]]
        await all_step(here, 12)
        for person, before in zip(here.people, begun, strict=False):
            assert told(person, "validation.done")
            assert all(fields["samples"] for fields in told(person, "exchange.paired")[before:])


async def test_one_replica_of_a_stage_hears_of_all_feeders_and_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_end, "LISTENERS", 1)
    async with village(run_of(), stages=(0, 0, 1, 1, 1, 2, 2)) as here:
        await all_step(here, 12)
        await together(here)


async def test_listeners_that_say_nothing_hold_up_no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a hash draws are keys of one attacker."""
    monkeypatch.setattr(step_end, "listeners", lambda run_id, stage, step, members: [])
    async with village(run_of(), stages=(0, 0, 1, 1, 2, 2)) as here:
        await all_step(here, 6)

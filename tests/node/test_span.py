"""Machines that serve several stages of a run, as one hop."""

from dataclasses import replace

import pytest
import torch

from swarmnode.base.ids import part_id
from swarmnode.base.wire.record_pb2 import NODE_STATE_LEFT
from swarmnode.run.manifest import Manifest
from tests.node.test_gradient import all_step, steps
from tests.node.test_pipeline_steps import run_of
from tests.support.village import Village, Villager, manifest, told, village

pytestmark = pytest.mark.loop("village")


def spanning(run: Manifest, most: int = 3) -> Manifest:
    return replace(run, pipeline=replace(run.pipeline, span_max=most))


def everybody(v: Village) -> list[Villager]:
    """All members of the run: machines and their parts."""
    return [member for machine in v.people for member in (machine, *machine.parts.values())]


async def test_a_machine_of_two_stages_trains_with_machines_of_one() -> None:
    async with village(spanning(manifest())) as v:
        wide = v.add(1, room=2)
        for stage in (0, 2, 1):
            v.add(stage)
        await v.fed(600)
        assert sorted(wide.parts) == [0], "the block around stage 1 is 0 and 1"
        assert wide.parts[0].node.me == part_id(wide.node.me, 0)
        assert wide.parts[0].served.hop.samples > 0
        assert wide.served.hop.samples > 0


async def test_replicas_of_a_span_stay_equal_to_the_bit_with_those_of_pipelines() -> None:
    async with village(spanning(run_of())) as v:
        v.add(1, room=2)
        v.add(0, room=3)
        for stage in (0, 1, 2):
            v.add(stage)
        await v.until(lambda: len(everybody(v)) == 8, "all parts")
        await v.until(lambda: all(one.node.served is not None for one in everybody(v)), "all serve")
        await v.fed(400)
        await v.until(lambda: len({steps(one) for one in everybody(v)}) == 1, "a moment between two steps")
        for stage in range(3):
            mates = [one for one in everybody(v) if one.served.stage == stage]
            assert len(mates) >= 2
            for mate in mates[1:]:
                assert torch.equal(mates[0].replica.stage.theta, mate.replica.stage.theta), f"stage {stage}"


async def test_a_span_is_one_hop() -> None:
    sent: list[tuple[str, str]] = []

    async def link(sender: str, receiver: str, nbytes: int) -> None:
        sent.append((sender, receiver))

    async with village(spanning(manifest())) as v:
        whole = v.add(0, room=3)
        await v.until(lambda: len(whole.parts) == 2 and whole.fed > 50, "one machine trains the whole model")
        v.network.link = link
        await v.trains(200, "nothing of it goes over the line")
        assert not sent
        assert whole.parts[2].served.hop.samples >= 200


async def test_a_killed_span_is_missed_at_each_of_its_stages_and_no_more() -> None:
    async with village(spanning(run_of())) as v:
        wide = v.add(1, room=2)
        for stage in (0, 0, 1, 2):
            v.add(stage)
        await all_step(v, 5)
        await v.people.pop(v.people.index(wide)).die()
        await all_step(v, 10)


async def test_a_span_hands_over_what_it_learned_and_leaves_as_a_whole() -> None:
    async with village(spanning(manifest())) as v:
        wide = v.add(1, room=2)
        for stage in (0, 1, 2):
            v.add(stage)
        await v.fed(300)
        wide.notices.leave()
        assert wide.task is not None
        report = await wide.task
        assert report.clean
        assert all(part.node.state == NODE_STATE_LEFT for part in wide.parts.values())
        await v.trains(100, "the others go on")


async def test_a_block_moves_as_a_whole_to_the_stages_that_are_slower() -> None:
    run = spanning(manifest(4))
    pipeline = replace(run.pipeline, rebalance_period_s=5.0, min_keep=1, span_max=2)
    async with village(replace(run, pipeline=pipeline, model=replace(run.model, layers=4))) as v:
        wide = v.add(2, room=2)
        for stage in (0, 1, 2, 3, 2, 3):
            v.add(stage, unable=frozenset({0, 1, 2, 3} - {stage}))
        await v.until(lambda: {wide.node.stage, *wide.parts} == {2, 3}, "it begins in the second half")
        await v.until(lambda: bool(told(wide, "stage.moved")), "it moves")
        await v.until(lambda: wide.node.served is not None and wide.node.stage == 0, "it serves the first half")
        assert told(wide, "span.chosen")[-1] == {"first": 0, "stages": 2}
        await v.trains(100, "all go on")

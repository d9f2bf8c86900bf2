"""Machines that serve several stages of a run, as one hop."""

from dataclasses import replace

import pytest
import torch

from swarmnode.ids import part_id
from swarmnode.manifest import Manifest
from tests.node.test_gradient import steps
from tests.node.test_pipeline_steps import run_of
from tests.support.village import Village, Villager, manifest, village

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

"""Whole nodes with fewer bytes between stages: what travels there, that it trains, and who may not take part."""

import asyncio
import math

import pytest
import torch

from swarmnode.base.errors import HardwareFault
from swarmnode.run.manifest import boundary_codes, boundary_nbytes, boundary_width
from tests.support.village import Recording, cause, losses, manifest, told, village

RANK = 8


@pytest.mark.parametrize(("kind", "rank"), [("int8", 0), ("int4", 0), ("int4_int2", 0), ("subspace", RANK)])
async def test_a_swarm_trains_with(kind: str, rank: int) -> None:
    async with village(manifest(stages=3, boundary=kind, boundary_rank=rank), stages=(0, 1, 2)) as v:
        learnt = math.log(v.run.model.vocabulary) - 0.5
        await v.until(lambda: min(losses(v)[-1:], default=9.0) < learnt, "below a guess at random")
        await v.leave()
        sent = v.people[1].transport.bytes_by_method()
        trips = v.people[1].replica.counted / v.run.inner.microbatch if v.people[1].replica else 0.0
        tokens = v.run.inner.microbatch * v.run.model.context
        each = sum(boundary_nbytes(code, tokens, boundary_width(v.run)) for code in boundary_codes(kind))
        # There and back through the middle stage; tokens, headers, validation and retries beside it.
        assert trips * each <= sent["process", "received"] < trips * 4 * each


async def test_replicas_meet_and_a_newcomer_loads_in_a_subspace() -> None:
    """With lossy pairs of weights, all stay in the span."""

    run = manifest(stages=2, boundary="subspace", boundary_rank=RANK, codec="modular4")
    async with village(run, stages=(0, 1, 1)) as v:
        await v.fed(256)
        late = v.add(1)
        await v.until(lambda: told(late, "node.ready") != [], "a newcomer")
        await v.until(lambda: told(late, "exchange.paired") != [], "its round")
        await v.leave()
        for replica in v.made:
            subspace = replica.stage.subspace
            assert subspace is not None and subspace.stray(replica.stage.named(replica.outer.phi).items()) is None
            for name, weight in replica.stage.named(replica.stage.theta).items():
                if name.endswith("o_proj.weight"):
                    torch.testing.assert_close(subspace.project(weight), weight, rtol=0, atol=1e-6)


class Elsewhere(Recording):
    """A machine that computes another U."""

    def boundary_digest(self) -> bytes:
        return b"another."


async def test_a_node_with_another_subspace_is_refused() -> None:
    async with village(manifest(stages=2, boundary="subspace", boundary_rank=RANK), stages=(0, 1)) as v:
        await v.fed(64)
        odd = v.add(1, Elsewhere)
        assert odd.task is not None
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(asyncio.shield(odd.task), 100)
        fault = cause(caught.value)
        assert isinstance(fault, HardwareFault)
        assert f"this machine makes the subspace {b'another.'.hex()}" in str(fault)
        assert "install the version they use" in str(fault)
        odd.task = None
        await v.trains(1, "the others go on")


async def test_microbatches_of_another_subspace_are_refused() -> None:
    """Two that begin at once may see no record of each other that could tell."""
    async with village(manifest(stages=2, boundary="subspace", boundary_rank=RANK)) as v:
        feeder = v.add(0)
        v.add(1)
        await v.fed(64)
        feeder.served.hop.boundary_digest = b"another."
        await v.until(lambda: told(feeder, "microbatch.refused") != [], "a refusal")
        assert "one of us has another version of PyTorch" in str(told(feeder, "microbatch.refused")[0])

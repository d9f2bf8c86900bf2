"""Whole nodes with a byte a number between stages: what travels there, and that it trains."""

from __future__ import annotations

import asyncio
import math

import pytest

from swarmnode.manifest import boundary_nbytes
from tests.node.test_swarm import losses
from tests.node.village import manifest, village


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_swarm_trains_with(kind: str) -> None:
    async def body() -> None:
        async with village(manifest(stages=3, boundary=kind)) as v:
            for stage in range(3):
                v.add(stage)
            await v.until(lambda: v.total() >= 1024, "1024 samples")
            await v.leave()
            assert losses(v)[-1] < math.log(v.run.model.vocabulary) - 0.5, "below a guess at random"
            sent = v.people[1].transport.bytes_by_method()
            trips = v.people[1].replica.counted / v.run.inner.microbatch if v.people[1].replica else 0.0
            each = boundary_nbytes(kind, v.run.inner.microbatch * v.run.model.context, v.run.model.width)
            # There and back through the middle stage; tokens, headers, validation and retries beside it.
            assert 2 * trips * each <= sent["process", "received"] < 2 * trips * 4 * each

    asyncio.run(asyncio.wait_for(body(), 120))

"""What a feeder does before it feeds."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.run.manifest import LimitsSpec, Manifest
from swarmnode.train.node.feeder_loop import feeding
from swarmsim.virtual_time import run


@pytest.mark.parametrize(("takes_s", "begins_s"), [(5.0, 5.0), (3000.0, LimitsSpec().microbatch_timeout_s)])
def test_the_first_validation_comes_soon(takes_s: float, begins_s: float) -> None:
    """A large model takes most of an hour for it; the measurement goes on beside, and ends with the feeder."""
    told: dict[str, float] = {}

    async def validate(samples_total: int) -> None:
        assert samples_total == 0
        await asyncio.sleep(takes_s)
        told["validated"] = asyncio.get_running_loop().time()

    async def feed() -> None:
        told["fed"] = asyncio.get_running_loop().time()
        await asyncio.sleep(4000.0)

    async def prefetch() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        feeder: Any = SimpleNamespace(
            manifest=Manifest(),
            run=feed,
            prefetch=prefetch,
        )
        validator: Any = SimpleNamespace(
            due=lambda before, after: after > before,
            validates=lambda round_index: True,
            validate=validate,
        )
        gossip: Any = SimpleNamespace(beyond=lambda round_index: asyncio.Event().wait(), done=0)
        await feeding(feeder, validator, gossip, lambda: 0, 0, resumed=False)

    run(main())
    assert told == {"fed": begins_s, "validated": takes_s}

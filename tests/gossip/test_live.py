"""Whole nodes that meet with each codec: real coroutines and replicas, transport in memory (tests/node/village.py)."""

from __future__ import annotations

import asyncio
import math

import pytest

from tests.node.test_swarm import losses
from tests.node.village import manifest, village

KEPT = ("kept", "refused")


@pytest.mark.parametrize("codec", ["int8", "modular4"])
@pytest.mark.parametrize("acceptance", ["all", "guarded"])
def test_a_swarm_trains_with(codec: str, acceptance: str) -> None:
    async def body() -> None:
        async with village(manifest(stages=2, codec=codec, acceptance=acceptance)) as v:
            for index in range(4):
                v.add(index % 2)

            def paired() -> float:
                return sum(p.quiet.total("swarmnode_exchanges_total", outcome="paired") for p in v.people)

            def probed() -> bool:
                return any(event == "exchange.probed" for p in v.people for event, _ in p.quiet.events)

            # On a busy machine the first rounds may end before all have seen each other.
            await v.until(lambda: v.total() >= 1024 and paired() >= 6, "1024 samples and 6 outer steps in pairs")
            if acceptance == "guarded":
                await v.until(probed, "averages tried on a replica's own text")
            await v.leave()
            assert losses(v)[-1] < math.log(v.run.model.vocabulary) - 0.5, "below a guess at random"
            told = [fields for p in v.people for event, fields in p.quiet.events if event == "exchange.probed"]
            if acceptance == "guarded":
                assert told and all(math.isfinite(float(str(f["change"]))) for f in told), "loss probes, and their say"
                probes = sum(p.quiet.total("swarmnode_loss_probes_total", outcome=o) for p in v.people for o in KEPT)
                assert probes == len(told)
            else:
                assert not told
            refused = [fields for p in v.people for event, fields in p.quiet.events if event == "exchange.refused"]
            assert not [f for f in refused if f["step"] not in ("direction", "loss")], (
                refused
            )  # honest ones are, now and then

    asyncio.run(asyncio.wait_for(body(), 120))

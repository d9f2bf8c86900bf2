"""Real processes: every replica of a stage is killed at once; a node of another stage goes there and brings it back."""

import math
import signal
from pathlib import Path

import pytest

from swarmnode.local.summary import count, totals
from swarmnode.metrics import name
from tests.support.live_swarm import swarm_in

pytestmark = pytest.mark.nightly  # tests/node and tests/simulation have lost stages in each push


async def test_the_first_and_the_last_stage_come_back(tmp_path: Path) -> None:
    swarm = swarm_in(tmp_path)
    fleet = swarm.fleet
    async with swarm.running():
        await swarm.progress(512, "from the start")
        brought_back = 0
        for stage in (1, 0):
            await swarm.until(lambda: [len(swarm.training(s)) for s in (0, 1)] == [2, 2], "two replicas of each")
            await swarm.until(lambda stage=stage: swarm.keeps(stage), f"a snapshot of stage {stage}")
            victims = swarm.training(stage)
            for victim in victims:
                victim.signal(signal.SIGKILL)
            await swarm.until(lambda victims=victims: not any(v.alive for v in victims), "the whole stage is gone")
            await swarm.until(lambda stage=stage: bool(swarm.training(stage)), f"stage {stage} is served again")
            await swarm.progress(256, f"after stage {stage} was lost")
            ring, rebuilt = (count(fleet.facts(), name.RECOVERIES, method=m) for m in ("ring", "checkfree"))
            assert ring + rebuilt > brought_back, "from a snapshot in the ring, or rebuilt"
            brought_back = ring + rebuilt
            for victim in victims:
                await fleet.replace(victim)
        done = totals(fleet.facts())
        # Of microbatches since then: who measured the held-out loss last may have been killed.
        assert done.loss_train is not None
        assert done.loss_train < math.log(256) - 1.0, "nothing learned was lost"

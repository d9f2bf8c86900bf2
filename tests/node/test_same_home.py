"""A replica dies and comes again with the same key, over and over: its neighbours hold answers made for its former
life, and nobody is called a forger. What it feeds then is counted on top of what it fed before."""

import asyncio
import os
from dataclasses import replace

from swarmnode.run.manifest import Manifest
from tests.support.village import Village, Villager, told, village
from tests.support.village import manifest as usual

RESTARTS = int(os.environ.get("SWARMNODE_RESTARTS", "4"))  # `make soak`: 50


def manifest() -> Manifest:
    run = usual(stages=3, window_max=8)
    limits = replace(run.limits, microbatch_timeout_s=600.0)
    return replace(run, pipeline=replace(run.pipeline, audit_share=0.1), limits=limits)


async def dies_with_answers_on_the_way(v: Village, victim: Villager, last: Villager) -> None:
    """Kill `victim` at a moment when the stage behind it has counted what `victim` has not answered yet."""
    done = last.served.parts.backlog.finished
    await v.until(
        lambda: last.served.parts.backlog.finished > done and len(victim.served.parts.backlog) > 1, "microbatches there"
    )
    await victim.die()


async def test_a_middle_stage_that_restarts_makes_nobody_a_forger() -> None:
    async with village(manifest()) as v:
        feeder = v.add(0)
        middle = v.add(1)
        last = v.add(2)
        for turn in range(RESTARTS):
            await v.until(lambda before=v.total(): v.total() >= before + 64, f"training before restart {turn}")  # type: ignore[misc]
            await dies_with_answers_on_the_way(v, middle, last)
            middle = v.add(1, again=middle)
        await v.until(lambda before=v.total(): v.total() >= before + 64, "training after the last restart")  # type: ignore[misc]
        assert v.forged() == []
        assert [fields for p in v.people for fields in told(p, "peer.excluded")] == []
        assert not feeder.node.presence.routing.routers[1].banned(middle.node.me, asyncio.get_running_loop().time())
        started_anew = [fields for fields in told(feeder, "microbatch.lost") if "counted here" in str(fields)]
        print(f"{RESTARTS} restarts, {len(started_anew)} microbatches started anew")


async def test_samples_of_the_only_feeder_after_a_restart_are_counted() -> None:
    """Nobody else writes its entry, and its neighbours know that as high as its former life came. Counting from below,
    it would train as much again before the run's count, and with it rounds and validation, went on."""
    async with village(usual(stages=2)) as v:
        feeder = v.add(0)
        last = v.add(1)
        await v.fed(300)
        await feeder.die()
        known = last.node.presence.progress.total
        again = v.add(0, again=feeder)
        await v.until(lambda: last.node.presence.progress.total >= known + 32, "the run's count goes on")
        trained = again.served.hop.samples
        assert trained <= 64, f"{trained} samples were trained until 32 of them were counted"

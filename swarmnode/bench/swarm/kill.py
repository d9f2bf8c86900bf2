"""Pause of a swarm when a node is killed: `kill -9` of a replica of each stage in turn, feeders included, each replaced
by a newcomer before the next. `python -m swarmnode.bench.swarm.kill` prints every kill and the percentiles.

A useful step is a microbatch whose gradient came back to a feeder. Each kill gives two times: until the next useful
step, and the longest pause between two of them in the `WATCH_S` that follow.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

from swarmnode.bench.swarm import harness
from swarmnode.bench.swarm.harness import BOUND_S, FINE_S, SwarmHarness
from swarmnode.errors import LocalFault
from swarmnode.local.summary import totals
from swarmnode.manifest import PRESETS

KILLS = 10
NODES = 6
WATCH_S = 10.0
TARGET_P95_S = 5.0


def run(kills: int = KILLS, preset: str = "demo") -> dict[str, Any]:
    """{"kills": [a row each], "next step s": {p50, p95, max}, "longest pause s": ..., "losses", "microbatches"}."""
    manifest = PRESETS[preset]
    with harness.swarm_of(manifest, NODES) as swarm:
        return asyncio.run(_measure(swarm, manifest.pipeline.stages, kills))


async def _measure(swarm: SwarmHarness, stages: int, kills: int) -> dict[str, Any]:
    async with swarm.running():
        await swarm.until(lambda: swarm.done() > 20, "the first twenty microbatches")
        rows = [await _kill(swarm, number % stages) for number in range(kills)]
        await swarm.fleet.poll()
        seen = totals(swarm.fleet.facts())
    return {
        "kills": rows,
        "next useful step, s": harness.spread([row["next step s"] for row in rows]),
        "longest pause, s": harness.spread([row["longest pause s"] for row in rows]),
        "target p95, s": TARGET_P95_S,
        "validation loss, nats": {"first": seen.loss_validation_first, "last": seen.loss_validation},
        "microbatches": dict(seen.microbatches),
        "exchanges": dict(seen.exchanges),
        "newcomers that took over": seen.recoveries,
    }


async def _kill(swarm: SwarmHarness, stage: int) -> dict[str, Any]:
    """Kill a replica of `stage` once it has two, observe the pause, and replace it by a newcomer."""
    await swarm.until(lambda: len(swarm.training(stage)) >= 2, f"two replicas of stage {stage}")
    victim = swarm.training(stage)[0]
    loop = asyncio.get_running_loop()
    await swarm.fleet.poll()
    before = swarm.done()
    victim.signal(signal.SIGKILL, told="killed by bench")
    killed_s = last_s = loop.time()
    first: float | None = None
    pause, seen = 0.0, before
    while (now := loop.time()) < killed_s + WATCH_S or first is None:
        if now > killed_s + BOUND_S:
            raise LocalFault(f"no useful step within {BOUND_S:g} s of the death of {victim.name} (stage {stage})")
        await swarm.fleet.poll()
        done, now = swarm.done(), loop.time()
        if done > seen:
            first = now - killed_s if first is None else first
            pause = max(pause, now - last_s)
            seen, last_s = done, now
        await asyncio.sleep(FINE_S)
    await swarm.fleet.replace(victim)
    return {
        "victim": victim.name,
        "stage": stage,
        "next step s": round(first, 3),
        "longest pause s": round(max(pause, loop.time() - last_s), 3),
        "microbatches in the next 10 s": seen - before,
    }


if __name__ == "__main__":
    json.dump(run(), sys.stdout, indent=1)
    sys.stdout.write("\n")

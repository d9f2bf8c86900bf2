"""Time to recover a lost stage: all replicas of the middle, the first and the last stage are killed at once, in a local
swarm of processes whose other stages have a spare replica. `swarmnode bench recovery` prints every loss.

A stage is served again once one of its nodes reports that it trains. Killed nodes are replaced before the next loss.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.swarm import harness
from benchmarks.swarm.harness import FINE_S, SwarmHarness
from swarmnode.errors import LocalFault
from swarmnode.local.fleet import Fleet
from swarmnode.local.summary import count, totals
from swarmnode.manifest import PRESETS
from swarmnode.metrics import name
from swarmnode.model.section import section_sizes, snapshot_nbytes
from swarmnode.model.split import stages_of

NODES = 6
TARGET_S = 10.0  # from the loss, with a spare node, to service
SETTLE_SAMPLES = 512  # guess: trained between two losses
FIRST_SAMPLES = 4096  # four rounds of the demo: no node has a snapshot before the first
METHODS = ("replica", "ring", "disk", "archive", "checkpoint", "base", "checkfree", "fresh")


def run(preset: str = "demo", losses: int = 3, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """{"losses": [a row each], "served after, s": {p50, p95, max}, "target, s", "validation loss, nats": ...}.

    `say` gets a line after each loss.
    """
    manifest = PRESETS[preset]
    stages = manifest.pipeline.stages
    parts = stages_of(manifest)
    nbytes = [snapshot_nbytes(section_sizes(manifest, part)) for part in parts]
    order = [stages // 2, 0, stages - 1]
    with harness.swarm_of(manifest, NODES) as swarm:
        wanted = [order[number % len(order)] for number in range(losses)]
        return asyncio.run(_measure(swarm, wanted, nbytes, say))


async def _measure(
    swarm: SwarmHarness, stages: list[int], nbytes: list[int], say: Callable[[str], None]
) -> dict[str, Any]:
    async with swarm.running():
        await swarm.progress(FIRST_SAMPLES, "from the start")
        rows = []
        for stage in stages:
            rows.append(await _lose(swarm, stage, nbytes[stage]))
            say(", ".join(f"{key} {value}" for key, value in rows[-1].items()))
        await swarm.fleet.poll()
        seen = totals(swarm.fleet.facts())
    return {
        "losses": rows,
        "served after, s": harness.spread([row["served after s"] for row in rows]),
        "target, s": TARGET_S,
        "validation loss, nats": {"first": seen.loss_validation_first, "last": seen.loss_validation},
        "microbatches": dict(seen.microbatches),
    }


async def _lose(swarm: SwarmHarness, stage: int, nbytes: int) -> dict[str, Any]:
    """Kill every replica of `stage`, wait until it is served and a microbatch has come through, replace the dead."""
    fleet = swarm.fleet
    await swarm.until(lambda: len(swarm.training(stage)) >= 2, f"two replicas of stage {stage}")
    victims = swarm.training(stage)

    def back() -> bool:
        return any(child not in victims for child in swarm.training(stage))

    await fleet.poll()
    before, loss = _recoveries(fleet), _loss(fleet)
    for victim in victims:
        victim.signal(signal.SIGKILL, told="killed by bench")
    loop = asyncio.get_running_loop()
    killed_s = loop.time()
    await swarm.until(back, f"stage {stage} is served again", FINE_S)
    served_s = loop.time() - killed_s
    await fleet.poll()
    done = swarm.done()
    await swarm.until(lambda: swarm.done() > done, f"a microbatch has come through stage {stage}", FINE_S)
    useful_s = loop.time() - killed_s
    how = _recoveries(fleet) - before
    loss_after = _loss(fleet)
    for victim in victims:
        await fleet.replace(victim)
    await swarm.progress(SETTLE_SAMPLES, f"after stage {stage} was lost")
    return {
        "stage": stage,
        "killed": len(victims),
        "how": "+".join(sorted(how)),
        "state bytes": nbytes,
        "served after s": round(served_s, 2),
        "next step s": round(useful_s, 2),
        "loss before": loss,
        "loss at once": loss_after,
        f"after {SETTLE_SAMPLES} samples": _loss(fleet),
    }


def _recoveries(fleet: Fleet) -> Counter[str]:
    found: Counter[str] = Counter()
    for method in METHODS:
        found[method] = count(fleet.facts(), name.RECOVERIES, method=method)
    return found


def _loss(fleet: Fleet) -> float | None:
    """Mean nats per token reported by living nodes."""
    losses = [child.status.loss_train for child in fleet.alive if child.status is not None and child.status.loss_train]
    return sum(losses) / len(losses) if losses else None


if __name__ == "__main__":
    try:
        json.dump(run(), sys.stdout, indent=1)
    except LocalFault as fault:
        sys.exit(str(fault))
    sys.stdout.write("\n")

"""Local swarms under real faults: killed, frozen, starved, disconnected and preempted processes.

`swarmnode bench chaos` runs one swarm after another. Each has an order of faults (fault_injection.py) drawn from its
seed, and at least `KILLS_MIN` killed processes. A line per run shows the faults, the pauses of the swarm, and broken
laws, if any (laws.py, read from the nodes' logs; a condition not met in time is a broken law too). A useful step is a
microbatch whose gradient came back to a feeder.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.swarm.fault_injection import FAULTS, SAMPLES_BETWEEN, STAGES, ChaosRun
from benchmarks.swarm.harness import spread
from benchmarks.swarm.laws import broken
from swarmnode.app.local.fleet import Note
from swarmnode.app.local.summary import totals
from swarmnode.base.errors import LocalFault
from swarmnode.base.ids import seeded
from swarmnode.base.ports import Clock
from swarmnode.run.manifest.recipe import PRESETS

KILLS_MIN = 20
KILLS_MORE = (
    "feeder killed",
    "partner killed",
    "replica killed",
)  # after every fault has occurred: until enough are killed


def run(clock: Clock, seed: int = 0, note: Note = lambda text: None, kills: int = KILLS_MIN) -> dict[str, Any]:
    """Run one swarm through all faults, and `kills` killed processes at least; `clock` is wall time. "laws broken"
    holds one sentence per violation; times are p50, p95 and max, in seconds."""
    manifest = replace(
        PRESETS["tiny"], pipeline=replace(PRESETS["tiny"].pipeline, stages=STAGES, rebalance_period_s=10.0)
    )
    folder = Path(tempfile.mkdtemp(prefix="swarmnode-chaos-"))
    note(f"logs in {folder}; kept if anything goes wrong")
    life = ChaosRun(folder, replace(manifest, seed=seed), seeded("chaos", seed), note, clock)
    try:
        asyncio.run(_live(life, kills))
        laws = []
    except LocalFault as stuck:
        laws = [str(stuck)]
    laws += broken([child.plan.home for child in life.fleet.nodes]) + life.left_running()
    if not laws:
        shutil.rmtree(folder)
    seen = totals(life.fleet.facts())
    return {
        "seed": seed,
        "kills": life.kills,
        "faults": life.done_to,
        "stood still, s": _spread(life.stood_still_s),
        "stage lost to served, s": _spread(life.lost_s),
        "microbatches": dict(seen.microbatches),
        "exchanges": dict(seen.exchanges),
        "validation loss, nats": {"first": seen.loss_validation_first, "last": seen.loss_validation},
        "laws broken": laws,
    }


def row(life: dict[str, Any]) -> dict[str, Any]:
    """A line of the table: the result of `run`, shortened."""
    still = life["stood still, s"]
    back = life["stage lost to served, s"]
    done = life["microbatches"]
    return {
        "seed": life["seed"],
        "kills": life["kills"],
        "kinds": len(set(life["faults"])),
        "still s, p50 p95": f"{still['p50']:.2g} {still['p95']:.2g}" if still else "",
        "stage back s, p50 max": f"{back['p50']:.2g} {back['max']:.2g}" if back else "",
        "done": done.get("done"),
        "lost": done.get("lost"),
        "paired": life["exchanges"].get("paired"),
        "loss": life["validation loss, nats"]["last"],
        "laws": len(life["laws broken"]),
    }


def in_a_row(lives: Sequence[dict[str, Any]]) -> int:
    """Number of latest lives without a broken law."""
    return next((n for n, life in enumerate(reversed(lives)) if life["laws broken"]), len(lives))


async def _live(life: ChaosRun, kills: int) -> None:
    try:
        async with life.running():
            await life.progress(SAMPLES_BETWEEN, "from the start")
            order = sorted(FAULTS)
            life.chance.shuffle(order)
            for what in order:
                await life.suffer(what)
            while life.kills < kills:
                await life.suffer(life.chance.choice(KILLS_MORE))
            await life.whole()
    finally:
        await life.close()


def _spread(values: list[float]) -> dict[str, float]:
    return {key: round(value, 3) for key, value in spread(values).items()} if values else {}

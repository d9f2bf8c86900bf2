"""Lives of a local swarm under a storm of real faults: processes killed, frozen, starved, cut off, told to go.

`swarmnode bench chaos` runs life after life, each with an order of faults (bench/storm.py) drawn from its seed and at
least `KILLS_MIN` processes killed, and prints one line a life: what was done, how long the swarm stood still, and which
law was broken, if any (bench/laws.py, read from the logs that the nodes left; a condition that was not met in time is a
broken law too). A useful step is a microbatch whose gradient came back to a feeder.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarmnode.bench.laws import broken
from swarmnode.bench.storm import FAULTS, SAMPLES_BETWEEN, STAGES, Life
from swarmnode.bench.watching import spread
from swarmnode.errors import LocalFault
from swarmnode.ids import seeded
from swarmnode.local.fleet import Note
from swarmnode.local.summary import totals
from swarmnode.manifest import PRESETS
from swarmnode.ports import Clock

KILLS_MIN = 20
KILLS_MORE = ("feeder killed", "partner killed", "replica killed")  # once every fault has been: until enough are killed


def run(clock: Clock, seed: int = 0, note: Note = lambda text: None) -> dict[str, Any]:
    """One life; `clock` is the wall's. Laws broken are in "laws broken", a sentence each; seconds as p50, p95, max."""
    manifest = replace(
        PRESETS["tiny"], pipeline=replace(PRESETS["tiny"].pipeline, stages=STAGES, rebalance_period_s=10.0)
    )
    folder = Path(tempfile.mkdtemp(prefix="swarmnode-chaos-"))
    note(f"logs in {folder}; kept if anything goes wrong")
    life = Life(folder, replace(manifest, seed=seed), seeded("chaos", seed), note, clock)
    try:
        asyncio.run(_live(life))
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
    """One line of the table: what `run` found, shortened."""
    still, back = life["stood still, s"], life["stage lost to served, s"]
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
    """How many of the last lives broke no law."""
    return next((n for n, life in enumerate(reversed(lives)) if life["laws broken"]), len(lives))


async def _live(life: Life) -> None:
    try:
        async with life.running():
            await life.progress(SAMPLES_BETWEEN, "from the start")
            order = sorted(FAULTS)
            life.chance.shuffle(order)
            for what in order:
                await life.suffer(what)
            while life.kills < KILLS_MIN:
                await life.suffer(life.chance.choice(KILLS_MORE))
            await life.whole()
    finally:
        await life.close()


def _spread(values: list[float]) -> dict[str, float]:
    return {key: round(value, 3) for key, value in spread(values).items()} if values else {}

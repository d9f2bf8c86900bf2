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

import psutil

from swarmnode import manifest as manifests
from swarmnode.bench.laws import broken
from swarmnode.bench.storm import BOUND_S, FAULTS, NODES, SAMPLES_BETWEEN, STAGES, Life, Note
from swarmnode.bench.watching import spread
from swarmnode.errors import LocalFault
from swarmnode.ids import seeded
from swarmnode.local.fleet import Fleet, FleetPlan
from swarmnode.local.summary import totals
from swarmnode.manifest import PRESETS, SIGNED_FILE
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
    manifests.init(folder, manifest)
    manifests.sign_folder(folder)
    life = Life(seeded("chaos", seed), note, clock)
    plan = FleetPlan(folder, folder / SIGNED_FILE, NODES, STAGES, folder / "cache", seed, life.command)
    life.fleet = Fleet(plan, note)
    try:
        asyncio.run(_live(life))
        laws = []
    except LocalFault as stuck:
        laws = [str(stuck)]
    laws += broken([child.plan.home for child in life.fleet.nodes]) + _left_running(life)
    if not laws:
        shutil.rmtree(folder)
    seen = totals(life.fleet.facts())
    return {
        "seed": seed,
        "kills": life.kills,
        "faults": life.done,
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
        await life.fleet.start(asyncio.Event())
        await life.until(lambda: life.samples() > SAMPLES_BETWEEN, "the first samples")
        order = sorted(FAULTS)
        life.chance.shuffle(order)
        for what in order:
            await _suffer(life, what)
        while life.kills < KILLS_MIN:
            await _suffer(life, life.chance.choice(KILLS_MORE))
        await life.whole()
    finally:
        await life.fleet.stop("the storm is over")
        await life.fleet.reap()
        await life.close()


async def _suffer(life: Life, what: str) -> None:
    begun = life.clock.unix_s()
    await FAULTS[what](life)
    life.done.append(what)
    await life.progress(f"after: {what}")
    life.note(f"{what}: {life.clock.unix_s() - begun:.1f} s")


def _left_running(life: Life) -> list[str]:
    _, alive = psutil.wait_procs(list(life.processes.values()), timeout=BOUND_S)
    return [f"process {process.pid} was left running" for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def _spread(values: list[float]) -> dict[str, float]:
    return {key: round(value, 3) for key, value in spread(values).items()} if values else {}

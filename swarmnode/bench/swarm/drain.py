"""Work saved by a machine with a preemption notice, by length of the notice: the share of its pending microbatches that
were finished, and the share of its updates since the last round that another replica received. Simulated: dozens of
preemptions of home machines. Live: nodes of a local swarm, killed at the end of the notice, as in a cloud."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Callable, Sequence
from typing import Any

from swarmnode.bench.swarm import harness
from swarmnode.bench.swarm.harness import SwarmHarness
from swarmnode.bench.swarm.laws import read_log
from swarmnode.errors import SwarmnodeError
from swarmnode.manifest import PRESETS
from swarmnode.simulation.life import simulate
from swarmnode.simulation.preemption_record import PreemptionRecord
from swarmnode.simulation.scenario import FaultSpec, find, read_scenario, shorter
from swarmnode.simulation.world import World

NOTICES_S = (120.0, 30.0, 5.0, 0.0)
TARGETS = {120.0: 1.0, 30.0: 1.0, 5.0: 0.9}  # seconds of notice: share saved
SCENARIO = "churn-16"
SIMULATED_S = 180.0
EVERY_S = 10.0
NODES = 6


def run(live: bool, seeds: int, note: Callable[[str], None]) -> dict[str, Any]:
    """{"simulated": [a row per notice], "live": [...]}: saved shares, with the targets."""
    found: dict[str, Any] = {"simulated": [_simulated(notice_s, seeds, note) for notice_s in NOTICES_S]}
    if live:
        found["live"] = _live(note)
    return found


def _row(
    notice_s: float, batch: int, preempted: int, held: int, finished: int, unsent: int, sent: int
) -> dict[str, Any]:
    """`batch`: samples per microbatch, so that pending work and trained samples can be added."""
    target = TARGETS.get(notice_s)
    return {
        "notice s": notice_s,
        "nodes taken": preempted,
        "microbatches held": held,
        "finished": finished / held if held else 1.0,
        "samples unsent": unsent,
        "passed on": sent / unsent if unsent else 1.0,
        "saved in all": (batch * finished + sent) / max(1, batch * held + unsent),
        "target": "reported" if target is None else target,
    }


def _simulated(notice_s: float, seeds: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Preemptions of machines, one every EVERY_S, all with the same notice."""
    scenario = shorter(read_scenario(find(SCENARIO)), SIMULATED_S)
    moments = tuple(EVERY_S * k for k in range(4, int(SIMULATED_S / EVERY_S)))
    faults = {"preempt": FaultSpec(at_s=moments, notices_s=(notice_s,), back_s=30.0)}
    preempted: list[PreemptionRecord] = []

    def look(world: World) -> None:
        preempted.extend(one for one in world.preempted if one.node is not None)

    for seed in range(seeds):
        outcome = simulate(dataclasses.replace(scenario, faults=faults), seed, look=look)
        note(
            f"{notice_s:g} s, seed {seed}: {len(preempted)} preempted, {'; '.join(outcome.failures) or 'no law broken'}"
        )
    held, finished = sum(one.held for one in preempted), sum(one.finished for one in preempted)
    unsent, sent = sum(one.unsent for one in preempted), sum(one.sent for one in preempted)
    return _row(notice_s, scenario.manifest.inner.microbatch, len(preempted), held, finished, unsent, sent)


def _live(note: Callable[[str], None], preset: str = "demo") -> list[dict[str, Any]]:
    manifest = PRESETS[preset]
    with harness.swarm_of(manifest, NODES) as swarm:
        return asyncio.run(_measure(swarm, manifest.pipeline.stages, manifest.inner.microbatch, note))


async def _measure(swarm: SwarmHarness, stages: int, batch: int, note: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    async with swarm.running():
        await swarm.until(lambda: swarm.done() > 20, "twenty microbatches")
        for index, notice_s in enumerate(NOTICES_S[:-1]):
            found = [await _take(swarm, (index + k) % stages, notice_s, note) for k in range(2)]
            rows.append(_row(notice_s, batch, len(found), *(sum(column) for column in zip(*found, strict=True))))
    return rows


async def _take(swarm: SwarmHarness, stage: int, notice_s: float, note: Callable[[str], None]) -> Sequence[int]:
    """(held, finished, unsent, sent) of a replica of `stage`, notified and killed at the end of the notice."""
    await swarm.until(lambda: len(swarm.training(stage)) >= 2, f"two replicas of stage {stage}")
    victim = swarm.training(stage)[0]
    home = victim.plan.home

    try:
        async with asyncio.timeout(notice_s):
            await victim.drain(notice_s, "bench drain")
    except (TimeoutError, SwarmnodeError) as error:
        note(f"{victim.name} is killed: {error or 'its notice ended'}")
        victim.signal(signal.SIGKILL, told="its notice was over")
    await swarm.until(lambda: not victim.alive, f"the end of {victim.name}")
    lines = read_log(home)
    begun = [line["fields"] for line in lines if line["event"] == "node.draining"][-1]
    ended = [line["fields"] for line in lines if line["event"] == "node.left"]
    left = ended[-1] if ended else {**begun, "finished": 0, "sent": 0}
    note(f"{notice_s:g} s, {victim.name} of stage {stage}: {left}")
    await swarm.fleet.replace(victim)
    return left["held"], left["finished"], left["unsent"], left["sent"]

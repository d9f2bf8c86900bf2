"""What a machine that is taken away brings home: the share of the microbatches it held that were finished, and of what
it had learnt since its last round that another replica got, by the length of the notice. Simulated: dozens of
preemptions of home machines; live: nodes of a local swarm, killed when their notice is over, as a cloud does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Callable, Sequence
from typing import Any

from swarmnode.bench import watching
from swarmnode.bench.laws import read_log
from swarmnode.bench.watching import Watched
from swarmnode.errors import SwarmnodeError
from swarmnode.manifest import PRESETS
from swarmnode.simulation.scenario import FaultSpec, find, read_scenario, shorter
from swarmnode.simulation.taken import Taken
from swarmnode.simulation.world import World, simulate

NOTICES_S = (120.0, 30.0, 5.0, 0.0)
TARGETS = {120.0: 1.0, 30.0: 1.0, 5.0: 0.9}  # issue 5
SCENARIO = "churn-16"
SIMULATED_S = 180.0
EVERY_S = 10.0
NODES = 6


def run(live: bool, seeds: int, note: Callable[[str], None]) -> dict[str, Any]:
    """{"simulated": [a row a notice], "live": [...]}: shares saved, against the targets."""
    found: dict[str, Any] = {"simulated": [_simulated(notice_s, seeds, note) for notice_s in NOTICES_S]}
    if live:
        found["live"] = _live(note)
    return found


def _row(notice_s: float, batch: int, taken: int, held: int, finished: int, unsent: int, sent: int) -> dict[str, Any]:
    """`batch`: samples of a microbatch, so that work held and samples learnt can be added up."""
    target = TARGETS.get(notice_s)
    return {
        "notice s": notice_s,
        "nodes taken": taken,
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
    taken: list[Taken] = []

    def look(world: World) -> None:
        taken.extend(one for one in world.taken if one.node is not None)

    for seed in range(seeds):
        outcome = simulate(dataclasses.replace(scenario, faults=faults), seed, look=look)
        note(f"{notice_s:g} s, seed {seed}: {len(taken)} taken, {'; '.join(outcome.failures) or 'every law held'}")
    held, finished = sum(one.held for one in taken), sum(one.finished for one in taken)
    unsent, sent = sum(one.unsent for one in taken), sum(one.sent for one in taken)
    return _row(notice_s, scenario.manifest.inner.microbatch, len(taken), held, finished, unsent, sent)


def _live(note: Callable[[str], None], preset: str = "demo") -> list[dict[str, Any]]:
    manifest = PRESETS[preset]
    with watching.swarm_of(manifest, NODES) as swarm:
        return asyncio.run(_measure(swarm, manifest.pipeline.stages, manifest.inner.microbatch, note))


async def _measure(swarm: Watched, stages: int, batch: int, note: Callable[[str], None]) -> list[dict[str, Any]]:
    rows = []
    async with swarm.running():
        await swarm.until(lambda: swarm.done() > 20, "twenty microbatches")
        for index, notice_s in enumerate(NOTICES_S[:-1]):
            found = [await _take(swarm, (index + k) % stages, notice_s, note) for k in range(2)]
            rows.append(_row(notice_s, batch, len(found), *(sum(column) for column in zip(*found, strict=True))))
    return rows


async def _take(swarm: Watched, stage: int, notice_s: float, note: Callable[[str], None]) -> Sequence[int]:
    """(held, finished, unsent, sent) of a replica of `stage`, told and killed when its time is over."""
    await swarm.until(lambda: len(swarm.training(stage)) >= 2, f"two replicas of stage {stage}")
    victim = swarm.training(stage)[0]
    home = victim.plan.home

    try:
        async with asyncio.timeout(notice_s):
            await victim.drain(notice_s, "bench drain")
    except (TimeoutError, SwarmnodeError) as error:
        note(f"{victim.name} is killed: {error or 'its notice was over'}")
        victim.signal(signal.SIGKILL, told="its notice was over")
    await swarm.until(lambda: not victim.alive, f"the end of {victim.name}")
    lines = read_log(home)
    begun = [line["fields"] for line in lines if line["event"] == "node.draining"][-1]
    ended = [line["fields"] for line in lines if line["event"] == "node.left"]
    left = ended[-1] if ended else {**begun, "finished": 0, "sent": 0}
    note(f"{notice_s:g} s, {victim.name} of stage {stage}: {left}")
    await swarm.fleet.replace(victim)
    return left["held"], left["finished"], left["unsent"], left["sent"]

"""Real processes: all nodes of a run leave, come back to their homes or without one, and go on from where they were."""

import json
import signal
import statistics
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.swarm.harness import SwarmHarness, fleet_in
from swarmnode.app.local.child import Child, node_command
from swarmnode.app.local.fleet import Command
from swarmnode.run.manifest.recipe import PRESETS

BOUND_S = 200.0
STAGES = 3
SAMPLES = 768  # by then far more than a nat is learned: what is lost would be seen
LAST = 4  # held-out losses before the end whose median counts: one measured in a round differs by .03


def told(home: Path, event: str) -> list[dict[str, Any]]:
    """The fields of each `event` in a node's log, with its Unix time as `unix_s`."""
    lines = (home / "events.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines if f'"event":"{event}"' in line]
    return [row["fields"] | {"unix_s": datetime.fromisoformat(row["ts"]).timestamp()} for row in found]


def swarm_of(folder: Path, command: Command = node_command) -> SwarmHarness:
    preset = PRESETS["tiny"]
    gossip = replace(preset.gossip, round_samples=128, round_seconds_min=0.0)
    pipeline = replace(preset.pipeline, stages=STAGES, validation_every_samples=128)
    manifest = replace(preset, gossip=gossip, pipeline=pipeline)
    fleet = fleet_in(folder, manifest, STAGES, lambda note: None, command, cache=folder / "cache", dashboard_port=0)
    return SwarmHarness(fleet, BOUND_S)


async def all_leave(swarm: SwarmHarness) -> int:
    """Ctrl-C at every node; the run's samples by the state saved last."""
    for child in swarm.fleet.nodes:
        child.signal(signal.SIGINT)
    await swarm.until(lambda: not any(child.alive for child in swarm.fleet.nodes), "all have left")
    return max(int(saved["samples_total"]) for c in swarm.fleet.nodes for saved in told(c.plan.home, "state.saved"))


async def all_join(swarm: SwarmHarness) -> None:
    """Start every node again in its home, without a word about its stage."""
    again = list[Child]()
    for child in swarm.fleet.nodes:
        plan = replace(child.plan, stage=None, bootstraps=swarm.fleet._addresses())
        again.append(await Child.start(plan, node_command(plan)))
    swarm.fleet.nodes[:] = again


def losses(swarm: SwarmHarness) -> list[tuple[float, float]]:
    """(samples, held-out loss) as all feeders measured them, in order."""
    found = [row for child in swarm.fleet.nodes for row in told(child.plan.home, "validation.done")]
    return [(row["samples_total"], row["loss"]) for row in sorted(found, key=lambda row: row["unix_s"])]


async def test_all_leave_and_come_back_and_nothing_is_lost(tmp_path: Path) -> None:
    swarm = swarm_of(tmp_path)
    async with swarm.running():
        await swarm.progress(SAMPLES, "from the start")
        homes = {child.plan.home: child.stage for child in swarm.fleet.nodes}
        samples = await all_leave(swarm)
        before = losses(swarm)
        begun = {home: len(told(home, "state.fresh")) for home in homes}
        await all_join(swarm)
        joined_s = time.time()
        await swarm.until(lambda: swarm.samples() > 0, "the first sample")
        first_s = time.time() - joined_s
        await swarm.until(lambda: len(swarm.training()) == STAGES, "everybody trains again")
        await swarm.until(lambda: len(losses(swarm)) >= len(before) + LAST, "held-out losses")
        for home, stage in homes.items():
            assert len(told(home, "state.fresh")) == begun[home], "no stage begins from the seed"
            done = told(home, "recovery.done")[-1]
            assert (done["stage"], done["method"]) == (stage, "disk"), done
            assert "samples behind the newest known (disk" in (home / "stderr.log").read_text()
        after = losses(swarm)[len(before) :]
        assert after[0][0] >= samples - 128, "the count of samples goes on"
        was, now = (statistics.median(loss for _, loss in each) for each in (before[-LAST:], after[:LAST]))
        ready_s = max(told(home, "node.ready")[-1]["unix_s"] for home in homes) - joined_s
        print(f"validation {was:.3f}, then {now:.3f}; all serve after {ready_s:.1f} s, first sample {first_s:.1f} s")
        assert now < was + 0.02

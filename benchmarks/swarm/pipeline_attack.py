"""Lies in the pipeline: in a swarm of real processes, some replicas of one stage give false answers (`bench attack
--pipeline`).

Results per lie: held-out nats relative to the same swarm without the liars at as many samples, lies and seconds until
every caller had excluded the liars, exclusions of honest nodes, and the cost of the checks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.swarm.byzantine_replica import ALL, HONEST, STEER, Steering
from benchmarks.swarm.harness import fleet_in
from benchmarks.swarm.laws import read_log
from benchmarks.swarm.learning_swarm import LOOK_SAMPLES, Validation, trained, validations
from swarmnode.errors import UsageError
from swarmnode.local.child import Child, NodePlan, node_command
from swarmnode.local.fleet import Fleet
from swarmnode.local.summary import count
from swarmnode.manifest import PRESETS, Manifest
from swarmnode.metrics import name
from swarmnode.ports import Clock

PLACES = {"first": (0, 2), "inner": (1, 3), "last": (1, 2)}  # the stage attacked, of so many
JOURNAL = "pipeline.jsonl"
LAST_SHARE = 0.25  # last part of a run, whose validations are averaged
HUNDREDTH = 99


@dataclass(frozen=True, slots=True)
class PipelineLife:
    """One swarm: `number` of the `replicas` of `stage` of `stages` give one false answer in `every`, of kind `lie`;
    None: they are absent."""

    lie: str | None
    number: int
    replicas: int
    stage: int
    stages: int
    samples: int
    every: int
    seed: int

    def row(self) -> dict[str, Any]:
        """Its settings, as written to the journal. A swarm without liars is the same for every `every`."""
        return asdict(self) | ({"every": 0} if self.lie is None else {})


def run(
    lies: Sequence[str],
    liars: float,
    replicas: int,
    samples: int,
    every: int,
    place: str,
    clock: Clock,
    say: Callable[[str], None],
    *,
    seeds: Sequence[int] = (0,),
    out: Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """{"lies": [means over the seeds], "lives": [...]}: `liars` of the `replicas` of the stage at `place` (PLACES)
    falsify one answer in `every`. `seeds` are the manifest's. With `out`, each life is also a line of
    OUT/pipeline.jsonl; with `resume`, lives already there are not repeated. Raises UsageError for unknown lies, and for
    invalid shares."""
    for lie in lies:
        if lie.startswith(STEER):
            Steering.of(lie)
    if wrong := [lie for lie in lies if lie not in (*ALL, HONEST) and not lie.startswith(STEER)]:
        raise UsageError(f"unknown lie {wrong[0]!r}: use one of {', '.join((*ALL, HONEST))}")
    number = round(liars * replicas)
    if not 0 < number < replicas:
        raise UsageError(f"{liars:g} of {replicas} replicas are {number} liars; at least one and not all must lie")
    wanted = [
        PipelineLife(lie, number, replicas, *PLACES[place], samples, every, seed)
        for seed in seeds
        for lie in (None, *lies)
    ]
    journal = None if out is None else out / JOURNAL
    found = _read(journal) if journal is not None and resume else []
    for life in wanted:
        if any(life.row().items() <= row.items() for row in found):
            continue
        row = life.row() | live(life, clock, say)
        say(json.dumps(row))
        found.append(row)
        if journal is not None:
            journal.parent.mkdir(parents=True, exist_ok=True)
            with journal.open("a") as file:
                file.write(json.dumps(row) + "\n")
    rows = [row for row in found if any(life.row().items() <= row.items() for life in wanted)]
    return {"lies": summary(rows), "lives": rows}


def _read(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per lie: means over the seeds that were run with and without it; "out" is the share of (liar, caller) pairs
    in which the caller excluded the liar, and seconds are of the slowest caller."""
    clean = {row["seed"]: row for row in rows if row["lie"] is None}
    found = []
    for lie in dict.fromkeys(row["lie"] for row in rows if row["lie"] is not None):
        mine = [row for row in rows if row["lie"] == lie]
        costs = [row["nats"] - clean[row["seed"]]["nats"] for row in mine if row["seed"] in clean]
        told = [liar for row in mine for liar in row["liars"]]
        lateness = [liar["s from hundredth"] for liar in told if "s from hundredth" in liar]
        found.append(
            {
                "lie": lie,
                "seeds": len(mine),
                "cost": statistics.fmean(costs) if costs else math.nan,
                "spread": statistics.stdev(costs) if len(costs) > 1 else math.nan,
                "out": sum(liar["out of"] for liar in told) / max(1, sum(liar["callers"] for liar in told)),
                "lies before, most": max((liar.get("lies before", liar["lies"]) for liar in told), default=0),
                "s from first, most": max(
                    (liar["s from first"] for liar in told if "s from first" in liar), default=math.nan
                ),
                "s from hundredth, most": max(lateness, default=math.nan),
                "honest excluded": sum(row["honest excluded"] for row in mine),
                "checked": statistics.fmean(row["checked"] for row in mine),
            }
        )
    return found


def _manifest(stages: int) -> Manifest:
    demo = PRESETS["demo"]
    pipeline = dataclasses.replace(demo.pipeline, stages=stages, validation_every_samples=LOOK_SAMPLES)
    pipeline = dataclasses.replace(pipeline, rebalance_period_s=0.0)  # a liar that moves tells no more lies
    return dataclasses.replace(demo, pipeline=pipeline)


def live(life: PipelineLife, clock: Clock, say: Callable[[str], None]) -> dict[str, Any]:
    """Run one swarm, and return its row: nats, samples trained, share of hops done again, and exclusions."""

    def tell(text: str) -> None:
        say(f"{life.lie or 'without liars'}, seed {life.seed}: {text}")

    lie = life.lie
    stage = life.stage
    samples = life.samples
    replicas = life.replicas
    manifest = dataclasses.replace(_manifest(life.stages), seed=life.seed)
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder:
        stage_of = [index % life.stages for index in range(life.stages * replicas)]
        names = [f"node-{index:02}" for index, at in enumerate(stage_of) if at == stage][-life.number :]
        if lie is None:
            stage_of = [at for index, at in enumerate(stage_of) if f"node-{index:02}" not in names]
            names = []

        def command(plan: NodePlan) -> list[str]:
            usual = node_command(plan)
            if lie is None or plan.name not in names:
                return usual
            log = Path(folder) / f"lies-{plan.name}"
            return [sys.executable, "-m", "benchmarks.byzantine_node", lie, str(life.every), str(log), *usual[3:]]

        fleet = fleet_in(Path(folder), manifest, len(stage_of), command=command, stage_of=tuple(stage_of))
        readings = asyncio.run(trained(fleet, samples, clock, tell))
        honest = [child for child in fleet.nodes if child.plan.name not in names]
        found = validations([child.plan.home for child in honest], readings)
        row: dict[str, Any] = {"nats": _nats(found, samples), "trained": readings[-1].samples}
        row["tokens/s"] = readings[-1].samples * manifest.model.context / (readings[-1].unix_s - readings[0].unix_s)
        facts = fleet.facts()
        # Feeders' activations are checked as well, so each stage has a hop.
        hops = life.stages * count(facts, name.MICROBATCHES, outcome="done")
        row["checked"] = count(facts, name.REDONE) / max(1, hops)
        row |= _exclusions(fleet, names, Path(folder), stage)
        return row


def _nats(found: Sequence[Validation], samples: int) -> float:
    """Mean of the validations in the last part of a run of `samples`."""
    last = [one.nats for one in found if (1.0 - LAST_SHARE) * samples <= one.samples <= (1.0 + LAST_SHARE) * samples]
    return statistics.fmean(last) if last else float("nan")


def _exclusions(fleet: Fleet, liars: Sequence[str], folder: Path, stage: int) -> dict[str, Any]:
    """Number of exclusions of honest nodes by honest ones, and a row per liar (`_when`)."""
    by_peer = {child.status.peer_id: child for child in fleet.nodes if child.status is not None}
    callers = [child for child in fleet.nodes if child.plan.stage == (stage - 1 if stage else 1)]
    out: dict[str, dict[str, float]] = {liar: {} for liar in liars}
    honest = 0
    for teller in fleet.nodes:
        if teller.plan.name in liars:
            continue
        for event in read_log(teller.plan.home):
            if event["event"] not in ("peer.excluded", "peer.left_out"):
                continue
            child = by_peer.get(event["fields"]["peer"])
            if child is None or child.plan.name not in liars:
                honest += 1
            elif teller in callers:
                when = datetime.datetime.fromisoformat(event["ts"]).timestamp()
                out[child.plan.name].setdefault(teller.plan.name, when)
    told = [_when(liar, out[liar], callers, folder) for liar in liars]
    return {"honest excluded": honest, "liars": told}


def _when(liar: str, by_caller: dict[str, float], callers: Sequence[Child], folder: Path) -> dict[str, Any]:
    """Counts of a liar's lies, in total and before all callers had excluded it, and the seconds from its first and its
    hundredth lie to exclusion."""
    log = folder / f"lies-{liar}"
    times = [float(line) for line in log.read_text().split()] if log.exists() else []
    row: dict[str, Any] = {"name": liar, "lies": len(times), "out of": len(by_caller), "callers": len(callers)}
    if times and by_caller:
        end = max(by_caller.values())
        row |= {"lies before": sum(when < end for when in times), "s from first": end - times[0]}
        if len(times) > HUNDREDTH:
            row["s from hundredth"] = end - times[HUNDREDTH]
    if (planted := log.with_name(f"{log.name}-backdoor")).exists():
        nats = [float(line) for line in planted.read_text().split()]
        tenth = max(1, len(nats) // 10)
        row["target after trigger, first"] = statistics.fmean(nats[:tenth])
        row["target after trigger, last"] = statistics.fmean(nats[-tenth:])
    return row

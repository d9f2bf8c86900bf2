"""Lies in the pipeline: real processes, some replicas of one stage answer falsely (`bench attack --pipeline`).

For each lie: held-out nats against the same swarm without the liars at as many samples, how many lies and seconds it
took until every caller had excluded the liars, whether anybody honest was excluded, and what the checks cost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from swarmnode.bench.laws import read_log
from swarmnode.bench.learning_swarm import LOOK_SAMPLES, Validation, trained, validations
from swarmnode.bench.liar import ALL
from swarmnode.bench.watching import fleet_in
from swarmnode.errors import UsageError
from swarmnode.local.child import Child, NodePlan, node_command
from swarmnode.local.fleet import Fleet
from swarmnode.local.summary import count
from swarmnode.manifest import PRESETS, Manifest
from swarmnode.metrics import name
from swarmnode.ports import Clock

STAGES = 2
LAST_SHARE = 0.25  # of a run: its validations are averaged
HUNDREDTH = 99


def run(
    lies: Sequence[str],
    liars: float,
    replicas: int,
    samples: int,
    every: int,
    stage: int,
    clock: Clock,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """{"without": ..., "rows": [one a lie]}: `liars` of the `replicas` of `stage` of two stages give one false answer
    in `every`. Raises UsageError for lies, shares or stages that there are not."""
    if wrong := [lie for lie in lies if lie not in ALL]:
        raise UsageError(f"lie {wrong[0]!r}; there are {', '.join(ALL)}")
    number = round(liars * replicas)
    if not 0 < number < replicas:
        raise UsageError(f"{liars:g} of {replicas} replicas are {number} liars; at least one and not all must lie")
    one = partial(_one, number, replicas, samples, every, stage, clock, say)
    clean = one(None)
    rows = []
    for lie in lies:
        row = one(lie)
        rows.append({"lie": lie, "cost": row["nats"] - clean["nats"], **row})
        say(f"{lie}: {rows[-1]['cost']:+.3f} nats")
    return {"liars": number, "replicas": replicas, "stage": stage, "every": every, "without": clean, "rows": rows}


def _manifest() -> Manifest:
    demo = PRESETS["demo"]
    pipeline = dataclasses.replace(demo.pipeline, stages=STAGES, validation_every_samples=LOOK_SAMPLES)
    return dataclasses.replace(demo, pipeline=pipeline)


def _one(
    number: int,
    replicas: int,
    samples: int,
    every: int,
    stage: int,
    clock: Clock,
    say: Callable[[str], None],
    lie: str | None,
) -> dict[str, Any]:
    """One life; without a `lie` the liars are not there."""
    manifest = _manifest()
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder:
        stage_of = [index % STAGES for index in range(STAGES * replicas)]
        names = [f"node-{index:02}" for index, at in enumerate(stage_of) if at == stage][-number:]
        if lie is None:
            stage_of = [at for index, at in enumerate(stage_of) if f"node-{index:02}" not in names]
            names = []

        def command(plan: NodePlan) -> list[str]:
            usual = node_command(plan)
            if lie is None or plan.name not in names:
                return usual
            log = Path(folder) / f"lies-{plan.name}"
            return [sys.executable, "-m", "swarmnode.cli.liar", lie, str(every), str(log), *usual[3:]]

        fleet = fleet_in(Path(folder), manifest, len(stage_of), command=command, stage_of=tuple(stage_of))
        readings = asyncio.run(trained(fleet, samples, clock, lambda text: say(f"{lie or 'without liars'}: {text}")))
        honest = [child for child in fleet.nodes if child.plan.name not in names]
        found = validations([child.plan.home for child in honest], readings)
        row: dict[str, Any] = {"nats": _nats(found, samples), "samples": readings[-1].samples}
        row["tokens/s"] = readings[-1].samples * manifest.model.context / (readings[-1].unix_s - readings[0].unix_s)
        facts = fleet.facts()
        row["checked"] = count(facts, name.REDONE) / max(1, count(facts, name.MICROBATCHES, outcome="done"))
        row |= _exclusions(fleet, names, Path(folder), stage)
        return row


def _nats(found: Sequence[Validation], samples: int) -> float:
    """The mean of the validations of the last part of a run of `samples`."""
    last = [one.nats for one in found if (1.0 - LAST_SHARE) * samples <= one.samples <= (1.0 + LAST_SHARE) * samples]
    return statistics.fmean(last) if last else float("nan")


def _exclusions(fleet: Fleet, liars: Sequence[str], folder: Path, stage: int) -> dict[str, Any]:
    """Who was excluded by whom, and after how many lies."""
    by_peer = {child.status.peer_id: child for child in fleet.nodes if child.status is not None}
    callers = [child for child in fleet.nodes if child.plan.stage != stage]
    out: dict[str, dict[str, float]] = {liar: {} for liar in liars}
    honest = 0
    for caller in fleet.nodes:
        for event in read_log(caller.plan.home):
            if event["event"] == "peer.excluded" and caller.plan.name not in liars and caller.plan.stage != stage:
                child = by_peer.get(event["fields"]["peer"])
                if child is None or child.plan.name not in liars:
                    honest += 1
                else:
                    when = datetime.datetime.fromisoformat(event["ts"]).timestamp()
                    out[child.plan.name][caller.plan.name] = when
    told = [_when(liar, out[liar], callers, folder) for liar in liars]
    return {"honest excluded": honest, "liars": told}


def _when(liar: str, by_caller: dict[str, float], callers: Sequence[Child], folder: Path) -> dict[str, Any]:
    """Of one liar: its lies, those before all callers had excluded it, and seconds from its first and hundredth lie."""
    log = folder / f"lies-{liar}"
    times = [float(line) for line in log.read_text().split()] if log.exists() else []
    row: dict[str, Any] = {"name": liar, "lies": len(times), "excluded by": f"{len(by_caller)} of {len(callers)}"}
    if times and by_caller:
        end = max(by_caller.values())
        row |= {"lies before": sum(when < end for when in times), "s from first": end - times[0]}
        if len(times) > HUNDREDTH:
            row["s from hundredth"] = end - times[HUNDREDTH]
    return row

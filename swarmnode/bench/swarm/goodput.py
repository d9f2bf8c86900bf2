"""Share of a fleet's work that survives machine deaths: simulated lives of the real node code at 0 to 33 % deaths per
hour, of each machine and of each whole stage, with three recovery methods. `swarmnode bench goodput` prints the table
and draws it.

* snapshots: a lost stage is restored from the snapshot at a node of the stage before (swarmnode's default);
* neighbours: only embedding and head are kept; other stages are rebuilt from their neighbours (CheckFree);
* checkpoint: the whole run stops and resumes from its last checkpoint, as a run without either must.

Goodput is the samples that count in the end over those of the same life without deaths; samples repeated after a
roll-back do not count twice. It excludes what a rebuilt stage has forgotten: `swarmnode bench checkfree` measures that
in nats. Deaths are one list per seed, thinned for the lower rates, so that all lives of a seed see the same ones.
"""

from __future__ import annotations

import concurrent.futures
import html
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swarmnode.ids import seeded
from swarmnode.simulation.life import simulate
from swarmnode.simulation.outcome import Outcome
from swarmnode.simulation.scenario import Scenario, parse_scenario
from swarmnode.simulation.world import World

RATES = (0.0, 0.05, 0.10, 0.16, 0.33)  # deaths per hour of each machine and of each stage
STAGES, MACHINES = 6, 12
BACK_S = 300.0  # guess: until a replacement machine joins; for a whole stage, 60 s
STAGE_BACK_S = 60.0
CHECKPOINT_ROUNDS = 4  # guess: with rounds of 100 to 150 s every 8 minutes

_KEPT_NOTHING = {"method": "copy", "keepers": 1, "snapshot_bytes_max": 0}
POLICIES: dict[str, dict[str, Any]] = {
    "snapshots": {"recovery": {"method": "copy", "keepers": 2, "snapshot_rounds": 4}},
    "neighbours": {"recovery": _KEPT_NOTHING},
    "checkpoint": {"recovery": _KEPT_NOTHING, "checkpoint": {"every_rounds": CHECKPOINT_ROUNDS, "keep": 2}},
}


@dataclass(frozen=True, slots=True)
class GoodputRun:
    policy: str
    rate: float
    seed: int
    hours: float


def moments(seed: int, what: str, rate: float, count: int, hours: float) -> tuple[float, ...]:
    """Times in seconds at which one of `count` machines or stages dies, each `rate` times per hour."""
    draw, now, found = seeded(seed, "goodput", what), 0.0, []
    most = max(RATES) * count / 3600.0
    while (now := now + draw.expovariate(most)) < hours * 3600.0:
        if draw.random() * max(RATES) < rate:
            found.append(round(now, 3))
    return tuple(found)


def scenario(life: GoodputRun) -> Scenario:
    rolls_back = life.policy == "checkpoint"
    stages = moments(life.seed, "stages", life.rate, STAGES, life.hours)
    machines = moments(life.seed, "machines", life.rate, MACHINES, life.hours)
    tree = {
        "seconds": life.hours * 3600.0,
        "work_factor": 1000.0,
        "checkpoints": rolls_back,
        "fleet": [{"name": "volunteer", "count": MACHINES, "flops": "2e11", "up_mbps": 100, "down_mbps": 300}],
        "manifest": {
            "pipeline": {"stages": STAGES, "window_max": 16},
            "inner": {"inner_batch": 32},
            "gossip": {"round_samples": 256, "round_seconds_min": 60.0},
            "limits": {"announce_period_s": 30.0, "record_ttl_s": 120.0},
            **POLICIES[life.policy],
        },
        "faults": {
            "gone": {"at_s": list(machines), "back_s": BACK_S},
            "blackout" if rolls_back else "stage_lost": {"at_s": list(stages), "back_s": STAGE_BACK_S},
        },
        "bounds": {"throughput": 0.0},
    }
    return parse_scenario(tree, "goodput", Path(), f"{life.policy} at {life.rate:.0%}")


def live(life: GoodputRun) -> dict[str, Any]:
    """{"policy", "rate", "samples", "repeated", "machines lost", "stages lost", "cpu_s", "failures"}."""
    resumed: list[int] = []

    def look(world: World) -> None:
        resumed.extend(world.resumed)

    outcome = simulate(scenario(life), life.seed, look=look)
    lost = moments(life.seed, "stages", life.rate, STAGES, life.hours)
    began = outcome.storm.at_s - life.hours * 3600.0
    repeated = _repeated(outcome, [began + moment for moment in lost], resumed) if life.policy == "checkpoint" else 0.0
    return {
        "policy": life.policy,
        "rate": life.rate,
        "samples": outcome.storm.samples - repeated,
        "repeated": repeated,
        "machines lost": outcome.struck.get("gone", 0),
        "stages lost": len(lost),
        "cpu_s": outcome.cpu_s,
        "failures": outcome.failures,
    }


def _repeated(outcome: Outcome, lost: Sequence[float], resumed: Sequence[int]) -> float:
    """Samples trained after the checkpoint that a roll-back restored, summed over all roll-backs."""
    times, done = [sample.at_s for sample in outcome.curve], [sample.samples for sample in outcome.curve]
    repeated = base = before = 0.0
    for moment, kept in zip(lost, resumed, strict=False):  # a loss in the last seconds has no roll-back
        until = float(np.interp(moment, times, done))
        total = base + until - before
        repeated += max(0.0, total - kept)
        base, before = float(kept), until
    return repeated


def run(
    hours: float, seeds: int, jobs: int, out: Path, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """{"goodput": a row each rate, ...}; writes `out`/goodput.html."""
    todo = [
        GoodputRun(policy, rate, seed, hours)
        for seed in range(seeds)
        for policy in POLICIES
        for rate in RATES
        if rate or policy == "snapshots"  # without deaths all policies are equal
    ]
    lives = []
    for life in _all(todo, jobs):
        lives.append(life)
        say(f"{life['policy']} at {life['rate']:.0%}: {life['samples']:.0f} samples, {life['cpu_s']:.0f} CPU s")
    rows = table(lives)
    out.mkdir(parents=True, exist_ok=True)
    page = out / "goodput.html"
    page.write_text(draw(rows), encoding="utf-8")
    failures = [f"{life['policy']} at {life['rate']:.0%}: {line}" for life in lives for line in life["failures"]]
    cpu_s = sum(life["cpu_s"] for life in lives)
    return {"goodput": rows, "hours": hours, "seeds": seeds, "cpu_s": cpu_s, "failures": failures, "page": str(page)}


def table(lives: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each rate: shares of the samples without deaths, summed over the seeds."""
    free = sum(life["samples"] for life in lives if not life["rate"])
    rows = []
    for rate in RATES:
        of_rate = [life for life in lives if life["rate"] == rate]
        first = [life for life in of_rate if life["policy"] == "snapshots"]
        row: dict[str, Any] = {
            "deaths an hour": f"{rate:.0%}",
            "machines lost": sum(life["machines lost"] for life in first),
            "stages lost": sum(life["stages lost"] for life in first),
        }
        for policy in POLICIES:
            samples = sum(life["samples"] for life in of_rate if life["policy"] == policy or not rate)
            row[policy] = round(samples / free, 4)
        row["made twice"] = round(sum(life["repeated"] for life in of_rate) / free, 4)
        rows.append(row)
    return rows


def _all(todo: Sequence[GoodputRun], jobs: int) -> Iterator[dict[str, Any]]:
    if jobs <= 1:
        yield from map(live, todo)
        return
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(live, todo)


_COLOURS = {"snapshots": "#06c", "neighbours": "#c60", "checkpoint": "#777"}
_STYLE = "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right}"


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """A page with the table and its curves; needs nothing but a browser."""
    width, height, left, low = 640, 360, 60, 320

    def x(rate: float) -> float:
        return left + rate / max(RATES) * (width - left - 110)

    def y(share: float) -> float:
        return low - share * (low - 20)

    parts = []
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(f"<line x1={left} x2={x(max(RATES)):.0f} y1={at:.0f} y2={at:.0f} stroke=#ddd />")
        parts.append(f"<text x={left - 8} y={at + 4:.0f} text-anchor=end>{tenth * 10} %</text>")
    for rate in RATES:
        parts.append(f"<text x={x(rate):.0f} y={low + 18} text-anchor=middle>{rate:.0%}</text>")
    parts.append(f"<text x={x(max(RATES) / 2):.0f} y={low + 36} text-anchor=middle>deaths an hour</text>")
    taken: list[float] = []
    for policy, colour in _COLOURS.items():
        points = [(x(rate), y(row[policy])) for rate, row in zip(RATES, rows, strict=True)]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill=none stroke="{colour}" stroke-width=2 />')
        parts += [f'<circle cx={a:.1f} cy={b:.1f} r=3 fill="{colour}" />' for a, b in points]
        label = points[-1][1] + 4
        while any(abs(label - other) < 14 for other in taken):
            label += 14
        taken.append(label)
        parts.append(f'<text x={points[-1][0] + 8:.0f} y={label:.0f} fill="{colour}">{policy}</text>')
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(str(v))}" for v in row.values()) for row in rows)
    head = "".join(f"<th>{html.escape(key)}" for key in rows[0])
    return (
        f"<!doctype html><meta charset=utf-8><title>Goodput</title><style>{_STYLE}</style>"
        f"<h1>Goodput against deaths</h1><p>Samples that count in the end, over those of a run without deaths.</p>"
        f"<svg width={width} height={height}>{''.join(parts)}</svg><table><tr>{head}{cells}</table>"
    )

"""Methods and codecs of gossip on the same model, text, seeds and replicas: loss against bytes.

`swarmnode bench gossip` prints a table and writes a page with the Pareto front. Every replica has real arithmetic and a
real outer optimizer (benchmarks/method/replica_batch.py). Messages are encoded, and their encoded length is counted.
"""

from __future__ import annotations

import concurrent.futures
import html
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.method.inner_optimizer import check_optimizer
from benchmarks.method.replica_batch import ReplicaBatch, ToySpec, read_text
from swarmnode.base.errors import UsageError
from swarmnode.run.gossip_rules import with_property
from swarmnode.run.manifest import GossipSpec, InnerSpec
from swarmnode.run.manifest.text import from_tree
from swarmnode.train.gossip import compression
from swarmnode.train.gossip.outer import Outer, outer
from swarmsim.drawing import STYLE, Curve, drawing
from swarmsim.drawing import table as html_table

ALONE = "alone"
PARALLEL = "parallel"
"""Base lines: replicas that never meet, and synchronous data parallel."""


def _base(method: str) -> str:
    """A row's method without its numbers."""
    return method.partition("+")[0]


def page(result: dict[str, Any]) -> str:
    """A page of one drawing, loss against bytes (logarithmic), and the table; nothing is loaded from outside."""
    rows = result["methods"]
    drawn = [row for row in rows if row["bytes/param/round"] > 0 and _base(row["method"]) != PARALLEL]
    drawn.sort(key=lambda row: float(row["bytes/param/round"]))
    points = [(row["bytes/param/round"], row["nats"]) for row in drawn]
    front = [(at, nats) for n, (at, nats) in enumerate(points) if all(nats < other for _, other in points[:n])]
    curves = [Curve(row["method"], "#06c", [point]) for row, point in zip(drawn, points, strict=True)]
    curves.append(Curve("the best", "#888", front, dashed=True))
    lone = [row["nats"] for row in rows if row["method"] == ALONE and points]
    curves += [Curve(ALONE, "#c00", [(points[0][0], nats), (points[-1][0], nats)], dashed=True) for nats in lone]
    also = "".join(  # an outlier would compress all others
        f" Not drawn: synchronous data parallel, {row['nats']:.4f} nats at {row['bytes/param/round']:g} bytes."
        for row in rows
        if _base(row["method"]) == PARALLEL
    )
    return (
        f"<!doctype html><meta charset=utf-8><title>swarmnode bench gossip</title><style>{STYLE}</style>"
        f"<h1>Loss against bytes</h1><p>preset {html.escape(result['preset'])}, lower left is better.{also}</p>"
        f"{drawing(curves, 'bytes a parameter and round', 'held-out nats a byte')}"
        f"{html_table([{key: _cell(value) for key, value in row.items()} for row in rows])}"
    )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.4f}"
    return str(value)


RATE = "rate"
DEFAULT = (
    ALONE,
    PARALLEL,
    "noloco/fp32",
    "noloco/bf16",
    "noloco/int8",
    "noloco/modular6",
    "noloco/modular4",
    "noloco/modular3",
    "average/modular4",
    "diloco/int8",
    "desloc/int8",
    "sparseloco/fp32",
    "sparseloco/topk",
    "sparseloco/topk64",
    "sparseloco/ternary",
    "sparseloco/powersgd",
    "partial_average/topk",
    "partial_average/topk64",
    "streaming/e3m0",
    "delayed/e3m0",
    "edit/e3m0",
)
"""Not eager: here an exchange takes no time, and there it is diloco with another rate."""

RESULTS = "gossip.json"
LOOKS = 10  # evaluations during a run, for the comparison at equal bytes

PRESETS: dict[str, tuple[ToySpec, int]] = {
    # (what is trained, seeds); minutes on 2 cores with --jobs 2, computed from the measured CPU seconds of one run
    "quick": (replace(ToySpec(), batch=4), 1),  # 23 runs of 25 CPU s: 5 to 10 minutes
    "standard": (ToySpec(), 3),  # 69 runs of 43 CPU s: 26 minutes, more on a busy machine
    "long": (
        replace(ToySpec(), width=128, heads=4, ffn=352, layers=4, context=128, rounds=120, inner_steps=25),
        3,
    ),  # hours: a guess, never run
}


@dataclass(frozen=True, slots=True)
class GossipRun:
    """Parameters of one method and codec on one seed; picklable, for worker processes."""

    what: str
    seed: int
    size: ToySpec
    text: str | None = None
    healing: bool = True
    acceptance: str = ""


def parts(what: str) -> tuple[str, dict[str, float]]:
    """Parse "method/codec+NAME=NUMBER": ("method/codec" or a base line, numbers by name). Raises UsageError."""
    base, *given = what.split("+")
    try:
        numbers = {name: float(number) for name, number in (one.split("=") for one in given)}
    except ValueError:
        numbers = {"": math.nan}
    if (base not in (ALONE, PARALLEL) and "/" not in base) or "@" in base:
        raise UsageError(
            f"{what!r} is not a method: use {ALONE}, {PARALLEL}, METHOD/CODEC such as noloco/modular4,"
            " or METHOD/CODEC/F"
        )
    taken = (RATE,) if base in (ALONE, PARALLEL) else (RATE, "alpha", "beta", "gamma")
    if not numbers.keys() <= set(taken):
        raise UsageError(f"{what!r}: after {base} use numbers such as +{taken[-1]}=0.5, with names {', '.join(taken)}")
    return base, numbers


def spec(what: str, acceptance: str = "") -> GossipSpec:
    """Gossip section of the manifest for "method/codec"; constants default to the method's own, `acceptance` "" to the
    manifest's. Raises UsageError and ManifestError."""
    base, numbers = parts(what)
    method, _, rest = base.partition("/")
    codec, slash, fragments = rest.partition("/")
    if slash and not (fragments.isdigit() and int(fragments)):
        raise UsageError(f"{what!r}: FRAGMENTS of METHOD/CODEC/FRAGMENTS is {fragments!r}; use a number, such as 5")
    table: dict[str, Any] = {name: number for name, number in numbers.items() if name != RATE}
    table |= {
        "method": method,
        "codec": codec,
        "fragments": int(fragments or 1),
        "group": 2 if method in with_property("in_groups") else 0,
    }
    if acceptance:
        table["acceptance"] = acceptance
    if method in with_property("averages_gradients"):
        table["round_samples"] = InnerSpec().inner_batch
    return from_tree({"gossip": table, "pipeline": {"stages": 1}}, what).gossip


def maker(what: str, acceptance: str = "", *, healing: bool = True) -> Callable[[Tensor], Outer] | None:
    """Constructor of a replica's outer optimizer; None for replicas that never meet. `acceptance` "": the manifest's
    default."""
    if parts(what)[0] in (ALONE, PARALLEL):
        return None
    found = spec(what, acceptance)
    outer(found, torch.zeros(1))  # raises for unknown settings before any training
    return lambda theta: outer(found, theta, healing=healing)


def measure(run: GossipRun) -> dict[str, Any]:
    """Run one training: nats per held-out byte (mean of the replicas, and of their average), bytes and seconds."""
    torch.set_num_threads(1)
    base, numbers = parts(run.what)
    size = replace(run.size, learning_rate=numbers.get(RATE, run.size.learning_rate))
    make = maker(run.what, run.acceptance, healing=run.healing)
    replica_batch = ReplicaBatch(size, run.seed, make, read_text(run.text), together=base == PARALLEL)
    began = time.process_time()
    gossip_s = 0.0
    curve: list[tuple[float, float]] = []

    def sent() -> float:
        """Bytes a parameter that a replica has sent so far; in parallel fp32 gradients by a ring, each step."""
        if base == PARALLEL:
            return 4.0 * 2 * (size.replicas - 1) / size.replicas * replica_batch.steps
        return replica_batch.nbytes / (replica_batch.parameters * size.replicas)

    total = size.inner_steps * size.rounds
    steps = size.inner_steps
    round_index = 0
    while replica_batch.steps < total:
        looks = replica_batch.steps * LOOKS // total
        replica_batch.learn(min(steps, total - replica_batch.steps))
        round_index += 1
        before = time.process_time()
        replica_batch.meet(round_index)
        gossip_s += time.process_time() - before
        if replica_batch.steps * LOOKS // total > looks:
            curve.append((sent(), replica_batch.validate([])[1]))
    nats, merged = replica_batch.validate()
    spread = replica_batch.spread
    per_round = sent() / size.rounds
    per_step = sent() / replica_batch.steps
    return {
        "what": run.what,
        "seed": run.seed,
        "nats": nats,
        "merged": merged,
        "rounds": round_index,
        "bytes_per_parameter_round": per_round,
        "bytes_per_parameter_step": per_step,
        "spread": spread,
        "curve": curve,
        "cpu_s": time.process_time() - began,
        "gossip_cpu_s": gossip_s,
    }


def _rows(found: Sequence[dict[str, Any]], whats: Sequence[str]) -> list[dict[str, Any]]:
    """A row of each method of which there are runs, those of `whats` first."""
    named = dict.fromkeys([*whats, *(row["what"] for row in found)])
    return table(found, [what for what in named if any(row["what"] == what for row in found)])


def run(
    preset: str = "quick",
    whats: Sequence[str] = DEFAULT,
    seeds: int | None = None,
    jobs: int = 1,
    text: str | None = None,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    *,
    changes: Mapping[str, Any] | None = None,
    resume: bool = False,
    healing: bool = True,
    acceptance: str = "",
) -> dict[str, Any]:
    """{"methods": [a row each], "runs": [...], "preset", "size"}; `changes` overrides fields of the preset's Size.

    With `out`, also writes OUT/gossip.json and gossip.html after each run. With `resume`, runs already there, of the
    same size and text, are not repeated. `healing`: packets of D carry fragments of slow weights. `acceptance`:
    gossip.acceptance, "": its default. Raises UsageError.
    """
    if preset not in PRESETS:
        raise UsageError(f"unknown preset {preset!r}: use one of {', '.join(PRESETS)}")
    compression.build()
    for what in whats:
        maker(what, acceptance)
    size, count = PRESETS[preset]
    size = replace(size, **(changes or {}))
    check_optimizer(size.optimizer)
    same: dict[str, Any] = {"size": asdict(size), "text": text, "healing": healing, "acceptance": acceptance}
    before = measured_before(out / RESULTS, **same) if resume and out is not None else {}
    found = list(before.get("runs", []))
    done = {(row["what"], row["seed"]) for row in found}
    order = [GossipRun(what, seed, size, text, healing, acceptance) for seed in range(seeds or count) for what in whats]
    began = time.perf_counter() - before.get("seconds", 0.0)

    def result() -> dict[str, Any]:
        seconds = time.perf_counter() - began
        return {"methods": _rows(found, whats), "preset": preset, "seconds": seconds, **same, "runs": found}

    for row in in_processes(measure, [one for one in order if (one.what, one.seed) not in done], jobs):
        found.append(row)
        say(f"{row['what']}, seed {row['seed']}: {row['nats']:.4f} nats, {row['cpu_s']:.0f} CPU s")
        if out is not None:
            _write(out, result())
    return result()


def measured_before(results: Path, **same: object) -> dict[str, Any]:
    """Content of `results` if every value of `same` matches it, else {}."""
    try:
        found: dict[str, Any] = json.loads(results.read_text())
    except (OSError, ValueError):
        return {}
    return found if all(found.get(key) == value for key, value in same.items()) else {}


def _write(out: Path, result: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULTS).write_text(json.dumps(result, indent=1))
    (out / "gossip.html").write_text(page(result))


def in_processes(measure: Callable[[Any], dict[str, Any]], todo: Sequence[Any], jobs: int) -> Iterator[dict[str, Any]]:
    """Results of `measure` for each of `todo`, in order, from `jobs` processes."""
    if jobs <= 1:
        yield from map(measure, todo)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(measure, todo)


def table(runs: Sequence[dict[str, Any]], whats: Sequence[str]) -> list[dict[str, Any]]:
    """A row a method: mean and spread over seeds, and the differences to noloco/fp32 and to dense averaging
    (sparseloco/fp32) of the same seed, each with its standard error; not a number where there is none."""
    pairs, dense = (
        {row["seed"]: row["nats"] for row in runs if row["what"] == base} for base in ("noloco/fp32", "sparseloco/fp32")
    )
    budget = _budget(runs)
    rows = []
    for what in whats:
        mine = [row for row in runs if row["what"] == what]
        nats = [row["nats"] for row in mine]
        over_pairs, error_pairs = _over(mine, pairs)
        over_dense, error_dense = _over(mine, dense)
        rows.append(
            {
                "method": what,
                "seeds": len(mine),
                "nats": statistics.fmean(nats),
                "spread": statistics.stdev(nats) if len(nats) > 1 else math.nan,
                "over fp32": over_pairs,
                "its error": error_pairs,
                "over dense": over_dense,
                "error": error_dense,
                "merged": statistics.fmean(row["merged"] for row in mine),
                "merged at equal bytes": statistics.fmean(_at(row["curve"], budget) for row in mine),
                "bytes/param/round": statistics.fmean(row["bytes_per_parameter_round"] for row in mine),
                "bytes/param/step": statistics.fmean(row["bytes_per_parameter_step"] for row in mine),
                "apart": statistics.fmean(row["spread"] for row in mine),
                "gossip CPU s": statistics.fmean(row["gossip_cpu_s"] for row in mine),
            }
        )
    return rows


def _over(mine: Sequence[dict[str, Any]], base: dict[int, float]) -> tuple[float, float]:
    """Mean difference from the run of the same seed in `base`, and its standard error; NaN with too few runs."""
    over = [row["nats"] - base[row["seed"]] for row in mine if row["seed"] in base]
    mean = statistics.fmean(over) if over else math.nan
    return mean, statistics.stdev(over) / math.sqrt(len(over)) if len(over) > 1 else math.nan


def _budget(runs: Sequence[dict[str, Any]]) -> float:
    """Bytes per parameter spent by every method that sends anything: the total of the one that sends least."""
    return min((row["curve"][-1][0] for row in runs if row["curve"] and row["curve"][-1][0] > 0.0), default=0.0)


def _at(curve: Sequence[tuple[float, float]], budget: float) -> float:
    """Nats of the replicas' average at `budget`: the last evaluation before it, or the first of all."""
    within = [nats for sent, nats in curve if sent <= budget * (1 + 1e-9)]
    return within[-1] if within else curve[0][1] if curve else math.nan

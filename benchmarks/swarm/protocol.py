"""`swarmnode bench protocol`: a public score of pipelines over narrow lines, by the node's own code in virtual time.

Protocol NanoGPT trains 203.8 M parameters in eight stages of one layer of width 1,024, with 200 Mbit/s and 50 ms
between two, and scores steps to a loss times steady seconds a step. Its published rows stand beside ours.

    seconds a step    the daemon's own coroutines in virtual time (swarmsim): a machine a stage, declared tensors whose
                      bytes are counted, lines shared by what goes there and back; a step is TOKENS tokens
    steps             of bench boundary's small model in as many stages, over those of bf16 to the same held-out loss
    score             both multiplied, over bf16's at the same line
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.method.boundary import BASE, BoundaryRun, Pipeline
from benchmarks.method.gossip import in_processes
from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.geography import Address
from swarmnode.base.errors import UsageError
from swarmnode.run.manifest import (
    DataSpec,
    GossipSpec,
    InnerSpec,
    LimitsSpec,
    Manifest,
    ModelSpec,
    PipelineSpec,
    boundary_codes,
    boundary_nbytes,
)
from swarmnode.run.manifest.recipe import PRESETS
from swarmsim.life import simulate
from swarmsim.network import Weather
from swarmsim.scenario import RecoveryBounds, Scenario

STAGES = 8
CONTEXT = 1024
BATCH = 512  # samples of a step: 524,288 tokens, by which bf16's bytes take 86 of the published 100.475 s
TOKENS = BATCH * CONTEXT
MICROBATCH = 4
IN_FLIGHT = 128  # microbatches: a step
ONE_WAY_S = 0.05
FLOPS = 1e14  # guess: a data centre's card, so that lines are the limit, as in the published rows
CODES = {"bf16": BASE, "int8": "int8", "int4": "rd4", "int4_int2": "rd4:rd2"}
"""Settings of bench boundary by pipeline.boundary."""
PUBLISHED = (
    {"row": "published, dense bf16", "steps": 2925, "s/step": 100.475},
    {"row": "published, rank 160", "steps": 9125, "s/step": 19.889},
)
LOOKS = 40  # of a run, at its held-out loss


def run(
    boundaries: Sequence[str],
    mbps: Sequence[float],
    *,
    steps: int,
    learned_steps: int,
    width: int,
    seeds: int,
    jobs: int,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """{"rows": a row for each of `mbps` and `boundaries`, bf16 among them, "published": ...}. Raises UsageError."""
    unknown = [one for one in boundaries if one not in CODES]
    if unknown:
        raise UsageError(f"{unknown[0]!r}: boundaries are {', '.join(CODES)}")
    kinds = list(dict.fromkeys([BASE, *boundaries]))
    ratios = steps_over_base(kinds, learned_steps, width, seeds, jobs, say) if learned_steps else {}
    rows = []
    for line in mbps:
        dense_s = math.nan
        for kind in kinds:
            seconds = seconds_a_step(kind, line, steps)
            dense_s = seconds if kind == BASE else dense_s
            over = 1.0 if kind == BASE else ratios.get(kind, math.nan)
            rows.append(
                {
                    "Mbit/s": line,
                    "boundary": kind,
                    "bytes a token": _nbytes(kind),
                    "s/step": round(seconds, 2),
                    "of bf16": round(seconds / dense_s, 3),
                    "steps over bf16": round(over, 3),
                    "score over bf16": round(seconds / dense_s * over, 3),
                }
            )
            say(", ".join(f"{key} {value}" for key, value in rows[-1].items()))
    dense = PUBLISHED[0]
    published = [{**row, "score over bf16": round(_score(row) / _score(dense), 3)} for row in PUBLISHED]
    return {"rows": rows, "published": published}


def _score(row: Mapping[str, Any]) -> float:
    return float(row["steps"] * row["s/step"])


def _model() -> ModelSpec:
    """203.7 M parameters."""
    return replace(
        PRESETS["demo"].model,
        vocabulary=50_304,
        width=1024,
        heads=16,
        kv_heads=16,
        ffn=2730,
        layers=STAGES,
        context=CONTEXT,
    )


def _nbytes(kind: str) -> int:
    """Bytes of a token and boundary there and back."""
    return sum(boundary_nbytes(code, 1, _model().width) for code in boundary_codes(kind))


def _scenario(kind: str, mbps: float, steps: int) -> Scenario:
    rate = mbps * 1e6 / 8
    step_s = TOKENS * _nbytes(kind) / rate + 20.0  # of the busiest line, and arithmetic
    manifest = Manifest(
        model=_model(),
        data=DataSpec(tokenizer="tokenizer.json"),
        pipeline=PipelineSpec(
            stages=STAGES,
            boundary=kind,
            window_max=IN_FLIGHT,
            rebalance_period_s=0.0,
            validation_every_samples=1 << 30,
            audit_share=0.0,  # one replica a stage has nobody to ask
        ),
        inner=InnerSpec(inner_batch=BATCH, microbatch=MICROBATCH),
        gossip=GossipSpec(method="none"),
        limits=LimitsSpec(in_flight_max=IN_FLIGHT, microbatch_timeout_s=7200.0, hop_timeout_min_s=3600.0),
    )
    machine = MachineKind("card", STAGES, FLOPS, rate, rate, Address("local", ONE_WAY_S), memory_gb=80.0)
    return Scenario(
        "protocol",
        seconds=step_s * steps,
        join_s=1.0,
        state_share=0.001,
        memory_gbps=1000.0,
        noise=0.0,
        fleet=(machine,),
        manifest=manifest,
        weather=Weather(jitter=0.0),
        bounds=RecoveryBounds(window_s=1.0, throughput=0.0, training_s=1e6, served_s=1e6, spread=math.inf),
    )


def seconds_a_step(kind: str, mbps: float, steps: int) -> float:
    """Seconds that a steady pipeline takes for BATCH samples, over the second half of a life of about `steps` steps."""
    outcome = simulate(_scenario(kind, mbps, steps), 0)
    half = [point for point in outcome.curve if outcome.storm.at_s / 2 <= point.at_s <= outcome.storm.at_s]
    samples = half[-1].samples - half[0].samples
    return BATCH * (half[-1].at_s - half[0].at_s) / samples if samples else math.inf


def steps_over_base(
    kinds: Sequence[str],
    steps: int,
    width: int,
    seeds: int,
    jobs: int,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, float]:
    """Steps of each of `kinds` over those of bf16 to the same held-out loss, in the mean over `seeds`: the loss that
    the slower of both has at the end of `steps` steps at a constant rate."""
    order = [
        BoundaryRun(CODES[kind], STAGES, STAGES, width, 4, 128, steps, 0.006, seed, 1, None, cooldown=0.0)
        for seed in range(seeds)
        for kind in kinds
    ]
    curves: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for one, result in zip(order, in_processes(learned, order, jobs), strict=True):
        curve = curves[one.what, one.seed] = result["curve"]
        say(f"{one.what}, seed {one.seed}: {curve[-1][1]:.4f} nats after {curve[-1][0]} steps")
    found = {}
    for kind in kinds:
        ratios = [_ratio(curves[CODES[kind], seed], curves[BASE, seed]) for seed in range(seeds)]
        found[kind] = sum(ratios) / len(ratios)
    return found


def learned(run: BoundaryRun) -> dict[str, Any]:
    """{"curve": (step, nats of a held-out byte) of a run, LOOKS times}."""
    torch.set_num_threads(1)
    return {"curve": Pipeline(run).learn(max(1, run.steps // LOOKS))}


def _ratio(curve: Sequence[tuple[int, float]], base: Sequence[tuple[int, float]]) -> float:
    target = max(curve[-1][1], base[-1][1])
    return _reached(curve, target) / _reached(base, target)


def _reached(curve: Sequence[tuple[int, float]], target: float) -> float:
    """Steps until the loss is `target` for good, on the line between two looks."""
    at = next(k for k in range(len(curve), 0, -1) if k == 1 or curve[k - 2][1] > target) - 1
    before, high = curve[max(0, at - 1)]
    after, low = curve[at]
    return after if high <= low else before + (after - before) * (high - target) / (high - low)

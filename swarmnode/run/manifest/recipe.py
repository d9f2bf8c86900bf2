"""Fit model shape, learning rate, batch and warm-up to a model size and a fleet, each with its origin.

    rate       R (N / 1e6)^-e                   N parameters; Muon: times the root of a step's tokens over 2,048
    batch      0.58 D^0.571 tokens              D tokens of the run; the search may make it larger (plan/fitted.py)
    warm-up    the larger of 2 / (1 - beta2) inner steps and a hundredth of the run, at most a tenth

AdamW's rate passes through the value measured on the demo (1 M parameters, 1.4e-3), GPT-3's 125 M (6e-4; arXiv
2005.14165, table 2.1) and LLaMA's 7 B (3e-4; arXiv 2302.13971, table 2); Muon's near what was measured at 0.05 to 30 M
parameters (docs/learning.md). The batch is Step Law's (arXiv 2503.04715), which gives 12 samples for the demo, where 8
to 16 are best (measured); it depends on the samples and hardly on the model's size (arXiv 2410.21676). The warm-up in
steps: arXiv 1910.04209, section 5.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from swarmnode.base.errors import UsageError
from swarmnode.run.manifest.spec import (
    ADAPTERS,
    FINETUNE,
    PRETRAIN,
    GossipSpec,
    InnerSpec,
    LimitsSpec,
    Manifest,
    ModelSpec,
    PipelineSpec,
)

RATE_PARAMETERS = 1e6
RATE_EXPONENT = {"adamw": -0.17, "muon": -0.27}
# Measured from 512 to 8,192 tokens: docs/learning.md, Rates.
RATE_BATCH = 2048  # tokens
RATE_BATCHES_MAX = 4.0
RATES = {
    "adamw": {"learning_rate": 1.4e-3},
    "muon": {"learning_rate": 3e-3, "muon_learning_rate": 3e-3},
}
"""Rates at RATE_PARAMETERS, by inner.optimizer: measured on the demo's model, batches of 8, 7,500 samples."""
# Step Law, arXiv 2503.04715.
BATCH_TOKENS = 0.58
BATCH_EXPONENT = 0.571
WARMUP_SHARE = 0.01  # GPT-3 and LLaMA warm up over 0.1 to 1 % of a run
WARMUP_SHARE_MAX = 0.1  # guess
TOKENS_A_PARAMETER = 20  # arXiv 2203.15556, table 3
STEPS_OF_ROUND = 8  # measured: the demo's swarm, `swarmnode bench learning`
ROUNDS_LEAST = 64  # guess: each replica that dies takes up to a round's learning along
LAYERS_LEAST = 4  # guess
CONTEXTS = ((1_000_000_000, 2048), (100_000_000, 1024))  # by parameters: LLaMA, GPT-2
ASPECT = 64  # width over layers: GPT-3 125M, arXiv 2005.14165, table 2.1; LLaMA 7B has 128
HEAD_WIDTH = 64  # GPT-3 125M, arXiv 2005.14165, table 2.1
HEADS_LEAST = 4  # the demo
WIDTH_STEP = 32  # the demo
WIDE = 512
WIDE_STEP = 128
WIDTH_MAX = 1 << 13


DEMO = Manifest(limits=LimitsSpec(tape_bytes_max=60 << 20))
"""1.2 M parameters over bytes of the demo corpus: readable text in minutes on two CPU cores (measured). Four tapes of
13 MiB are kept (three of 18 without bfloat16 matrix products): a node stays below 450 MB, and a quarter of the forwards
are recomputed, with one tape three quarters (measured)."""

TINY = Manifest(
    name="tiny",
    model=ModelSpec(layers=4, width=32, heads=2, kv_heads=1, ffn=64, context=32),
    pipeline=PipelineSpec(stages=2, validation_samples=16),
    inner=InnerSpec(
        learning_rate=1e-2,
        muon_learning_rate=1e-2,
        warmup_samples=64,
        decay_samples=20_000,
        microbatch=4,
        inner_batch=8,
    ),
)
"""Some ten thousand parameters: for tests and first steps. Learning rate and rounds: guess."""


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """A manifest, and the origin of each fitted value by field name."""

    manifest: Manifest
    origins: dict[str, str]


def parameters_of(model: ModelSpec) -> int:
    """Parameters of a model: token table, layers, last norm, head. Experts count whether active or not."""
    heads = model.heads * model.head_dim
    keys = model.kv_heads * model.head_dim
    layer = 2 * model.width * (heads + keys) + 2 * model.width
    layer += (heads + 2 * keys) * model.qkv_bias + model.width * model.output_bias
    layer += {"none": 0, "head": 2 * model.head_dim, "whole": heads + keys}[model.qk_norm]
    experts = model.experts * (3 * model.expert_ffn + 1) + 3 * model.shared_expert_ffn
    sparse = model.width * (experts + (1 if model.shared_expert_ffn else 0))
    dense = 3 * model.width * model.ffn
    layers = model.layers * layer + model.sparse_layers * sparse + (model.layers - model.sparse_layers) * dense
    return (1 if model.tied else 2) * model.vocabulary * model.width + layers + model.width


def law_batch(tokens: float) -> float:
    """Tokens of an inner step that suit a run of `tokens` best, by Step Law."""
    return float(BATCH_TOKENS * tokens**BATCH_EXPONENT)


def _shapes(start: ModelSpec, stages: int) -> Iterator[ModelSpec]:
    for width in range(WIDTH_STEP, WIDTH_MAX + 1, WIDTH_STEP):
        heads = max(HEADS_LEAST, width // HEAD_WIDTH)
        if width % heads or width // heads % 2 or (width > WIDE and width % WIDE_STEP):
            continue
        usual = max(LAYERS_LEAST, stages, round(width / ASPECT))
        for layers in range(usual, usual + usual // 2 + 1):
            kv_heads = heads // 2 if heads % 2 == 0 else heads
            ffn = 32 * math.ceil(width * 8 / 3 / 32)
            yield dataclasses.replace(start, layers=layers, width=width, heads=heads, kv_heads=kv_heads, ffn=ffn)


def model_of(parameters: int, start: ModelSpec, stages: int) -> ModelSpec:
    """The model nearest to `parameters` parameters, with the vocabulary and context of `start` and at least `stages`
    layers. Raises UsageError if none is within a quarter."""
    best = min(_shapes(start, stages), key=lambda model: abs(math.log(parameters_of(model) / parameters)))
    if not 0.75 <= parameters_of(best) / parameters <= 1.25:
        raise UsageError(
            f"--parameters {parameters}: the nearest model with {best.vocabulary} token ids and at least {stages}"
            f" layers has {parameters_of(best)}"
        )
    return best


def warmup_samples(inner: InnerSpec, batch: int, run: int) -> int:
    """Samples of the warm-up of a `run` with batches of `batch` samples."""
    return round(min(max(2.0 / (1.0 - inner.beta2) * batch, WARMUP_SHARE * run), WARMUP_SHARE_MAX * run))


def context_of(parameters: int, own: int) -> int:
    """Tokens of a sample that suit a model of so many parameters; `own` for a small one."""
    return next((context for least, context in CONTEXTS if parameters >= least), own)


def fit(start: Manifest, *, parameters: int | None = None, samples: int | None = None) -> Recipe:
    """`start` fitted to a model of `parameters` and a run of `samples`; None keeps the value of `start`. Raises
    UsageError if there is no such model."""
    origins: dict[str, str] = {}
    model = start.model
    if parameters is not None:
        model = model_of(parameters, model, start.pipeline.stages)
        shape = f"fitted: {parameters_of(model):_} parameters of {parameters:_} asked for"
        origins |= {f"model.{key}": shape for key in ("layers", "width", "heads", "kv_heads", "ffn")}
    run = samples or start.inner.decay_samples
    if samples is not None:
        origins["inner.decay_samples"] = "the requested length of the run"
    inner = _fit_inner(start.inner, model, run, origins)
    gossip = _fit_round(start.gossip, inner.inner_batch, run, origins)
    data = start.data
    if data.block_samples % inner.microbatch:
        data = dataclasses.replace(data, block_samples=8 * inner.microbatch)
        origins["data.block_samples"] = "fitted: 8 microbatches"
    return Recipe(dataclasses.replace(start, model=model, inner=inner, gossip=gossip, data=data), origins)


def _fit_inner(start: InnerSpec, model: ModelSpec, run: int, origins: dict[str, str]) -> InnerSpec:
    """Batch, rates, warm-up and cool-down for `model` and a `run` in samples."""
    batch = 1 << max(0, round(math.log2(law_batch(run * model.context) / model.context)))
    microbatch = min(batch, 1 << int(math.log2(start.microbatch)))
    origins["inner.inner_batch"] = f"fitted to {run:_} samples: Step Law, arXiv 2503.04715"
    if microbatch != start.microbatch:
        origins["inner.microbatch"] = "fitted: a divisor of inner.inner_batch"
    rates = _fit_rates(start.optimizer, parameters_of(model), batch, model.context, origins)
    steps = 2.0 / (1.0 - start.beta2)
    warmup = f"fitted: {steps:.0f} inner steps (arXiv 1910.04209) or 1 % of the run, at most 10 %"
    origins["inner.warmup_samples"] = warmup
    origins["inner.cooldown_samples"] = "fitted: a fifth of the run, arXiv 2405.18392"
    return dataclasses.replace(
        start,
        **rates,
        warmup_samples=warmup_samples(start, batch, run),
        decay_samples=run,
        cooldown_samples=max(1, run // 5),
        microbatch=microbatch,
        replica_batch_min=min(start.replica_batch_min, microbatch),
        inner_batch=batch,
        inner_batch_max=0,
    )


def _fit_rates(optimizer: str, count: int, batch: int, context: int, origins: dict[str, str]) -> dict[str, Any]:
    """The learning rates of `optimizer` for a model of `count` parameters, by key."""
    share = (count / RATE_PARAMETERS) ** RATE_EXPONENT[optimizer]
    through = "through the demo (measured), GPT-3 125M (arXiv 2005.14165) and LLaMA 7B (arXiv 2302.13971)"
    if optimizer == "muon":
        share *= math.sqrt(min(max(1.0, batch * context / RATE_BATCH), RATE_BATCHES_MAX))
        through = f"and batches of {batch}: measured at 0.05 to 30 M parameters (docs/learning.md)"
    rates: dict[str, Any] = {key: float(f"{rate * share:.1e}") for key, rate in RATES[optimizer].items()}
    origins |= {f"inner.{key}": f"fitted to {count:_} parameters {through}" for key in rates}
    return rates


def _fit_round(start: GossipSpec, batch: int, run: int, origins: dict[str, str]) -> GossipSpec:
    """The length of a round in a `run` with batches of `batch` samples."""
    steps = min(STEPS_OF_ROUND, max(1, run // (ROUNDS_LEAST * batch)))
    if steps == STEPS_OF_ROUND and start.round_samples >= STEPS_OF_ROUND * batch:
        return start
    why = "as the demo has"
    if steps < STEPS_OF_ROUND:
        why = f"a run of fewer than {ROUNDS_LEAST * STEPS_OF_ROUND} steps has shorter rounds"
    origins["gossip.round_samples"] = f"fitted: inner steps of a round: {steps}; {why}"
    return dataclasses.replace(start, round_samples=steps * batch)


def of_kind(start: Manifest, kind: str) -> Recipe:
    """`start` as a run of training.kind = `kind`, and the origins of the values that this changes."""
    if kind == PRETRAIN:
        return Recipe(start, {})
    training = dataclasses.replace(start.training, kind=kind)
    origins = {"training.kind": "asked for"}
    inner = dataclasses.replace(start.inner, optimizer="adamw")
    data = start.data
    origins["inner.optimizer"] = "models trained with AdamW gain nothing by another one, arXiv 2502.16982, section 3.5"
    if kind == ADAPTERS:
        inner = dataclasses.replace(inner, weight_decay=0.0)
        origins["inner.weight_decay"] = "peft's examples: A and B begin near zero"
    if kind == FINETUNE:
        data = dataclasses.replace(data, documents="masked")
        origins["data.documents"] = "each conversation by itself"
    return Recipe(dataclasses.replace(start, training=training, inner=inner, data=data), origins)


SMALL = fit(
    Manifest(name="small", model=ModelSpec(layers=6, width=512, heads=8, kv_heads=4, ffn=1376, context=256)),
    samples=2_000_000,
).manifest
"""17 M parameters: hours on CPUs, minutes on a GPU. As `fit` has it for that length."""

PRESETS = {"demo": DEMO, "tiny": TINY, "small": SMALL}

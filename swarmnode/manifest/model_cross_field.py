"""Conditions between the fields of the model."""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.manifest.check import CrossFieldCheck
from swarmnode.manifest.kind_compat import ADAPTERS, ties
from swarmnode.manifest.spec import Manifest, ModelSpec

BLENDED = ("llama3", "yarn")  # rope_scaling by how often a frequency turns in the original context


def _layers(name: str, goes_with: str, wanted: Callable[[ModelSpec], bool], otherwise: str) -> CrossFieldCheck:
    """model.`name` has layers of the model, and only if `wanted`."""

    def holds(m: Manifest) -> bool:
        layers: tuple[int, ...] = getattr(m.model, name)
        return not layers or (max(layers) < m.model.layers and wanted(m.model))

    def allowed(m: Manifest) -> str:
        return f"an empty list {otherwise}" if not wanted(m.model) else f"numbers below model.layers = {m.model.layers}"

    return CrossFieldCheck((f"model.{name}", "model.layers", f"model.{goes_with}"), holds, allowed)


def _of_experts(name: str, low: int, high: Callable[[ModelSpec], int], bound: str) -> CrossFieldCheck:
    """model.`name` is from `low` to `high` with experts, else 0."""

    def holds(m: Manifest) -> bool:
        value = getattr(m.model, name)
        return bool(low <= value <= high(m.model)) if m.model.experts else value == 0

    def allowed(m: Manifest) -> str:
        return f"{low} to {bound}{high(m.model):_}" if m.model.experts else "0 with model.experts = 0"

    return CrossFieldCheck((f"model.{name}", "model.experts"), holds, allowed)


def _in_subspace(model: ModelSpec) -> bool:
    """Whether all that a layer adds to the stream is a writer's product, and the token table may stay frozen."""
    plain = model.norm_placement == "pre" and not model.output_bias and not model.experts and not model.tied
    return plain and model.architecture == "decoder"


MODEL_ACROSS: tuple[CrossFieldCheck, ...] = (
    CrossFieldCheck(
        ("model.heads", "model.width", "model.head_width"),
        lambda m: m.model.head_width > 0 or m.model.width % m.model.heads == 0,
        lambda m: f"a divisor of model.width = {m.model.width}",
    ),
    CrossFieldCheck(
        ("model.kv_heads", "model.heads"),
        lambda m: m.model.heads % m.model.kv_heads == 0,
        lambda m: f"a divisor of model.heads = {m.model.heads}",
    ),
    CrossFieldCheck(
        ("model.width", "model.heads", "model.head_width"),
        lambda m: (
            m.model.head_width > 0 or m.model.width % m.model.heads != 0 or m.model.width // m.model.heads % 2 == 0
        ),
        lambda m: f"an even multiple of model.heads = {m.model.heads} (rotary embeddings turn pairs)",
    ),
    CrossFieldCheck(
        ("model.head_width",),
        lambda m: m.model.head_width % 2 == 0,
        lambda m: "an even number (rotary embeddings turn pairs)",
    ),
    CrossFieldCheck(
        ("model.rope_factor", "model.rope_scaling"),
        lambda m: m.model.rope_scaling != "none" or m.model.rope_factor == 1.0,
        lambda m: '1 with model.rope_scaling = "none"',
    ),
    CrossFieldCheck(
        ("model.rope_original_context", "model.rope_scaling"),
        lambda m: (m.model.rope_original_context > 0) == (m.model.rope_scaling in BLENDED),
        lambda m: (
            f'above 0 with model.rope_scaling = "{m.model.rope_scaling}"'
            if m.model.rope_scaling in BLENDED
            else f'0 with model.rope_scaling = "{m.model.rope_scaling}"'
        ),
    ),
    CrossFieldCheck(
        ("model.rope_high", "model.rope_low"),
        lambda m: m.model.rope_high > m.model.rope_low,
        lambda m: f"above model.rope_low = {m.model.rope_low:g}",
    ),
    CrossFieldCheck(
        ("model.rope_theta", "model.rope_scaling"),
        lambda m: m.model.rope_scaling != "yarn" or m.model.rope_theta > 1.0,
        lambda m: 'above 1 with model.rope_scaling = "yarn"',
    ),
    CrossFieldCheck(
        ("model.rope_attention_factor", "model.rope_scaling"),
        lambda m: m.model.rope_attention_factor == 0.0 or m.model.rope_scaling == "yarn",
        lambda m: f'0 with model.rope_scaling = "{m.model.rope_scaling}"',
    ),
    _layers("unrotated_layers", "layers", lambda model: True, ""),
    _layers("sliding_layers", "sliding_window", lambda m: m.sliding_window > 0, "with model.sliding_window = 0"),
    _layers("dense_layers", "experts", lambda m: m.experts > 0, "with model.experts = 0"),
    CrossFieldCheck(
        ("model.dense_layers", "model.experts"),
        lambda m: m.model.experts == 0 or m.model.sparse_layers > 0,
        lambda m: "not every layer; or model.experts = 0",
    ),
    _of_experts("experts_active", 1, lambda m: m.experts, "model.experts = "),
    _of_experts("expert_ffn", 1, lambda m: 1 << 22, ""),
    _of_experts("shared_expert_ffn", 0, lambda m: 1 << 22, ""),
    CrossFieldCheck(
        ("model.router_normalised", "model.experts"),
        lambda m: m.model.experts > 0 or not m.model.router_normalised,
        lambda m: "false with model.experts = 0",
    ),
    CrossFieldCheck(
        ("model.router_balance", "model.experts"),
        lambda m: m.model.experts > 0 or m.model.router_balance == 0.0,
        lambda m: "0 with model.experts = 0",
    ),
    CrossFieldCheck(
        ("model.tied", "pipeline.stages", "training.kind", "gossip.method", "training.experts_trained"),
        lambda m: not m.model.tied or ties(m),
        lambda m: (
            f"false with pipeline.stages = {m.pipeline.stages}, unless gossip.method is average or noloco and"
            f' training.experts_trained 0, or training.kind = "{ADAPTERS}"'
        ),
    ),
    CrossFieldCheck(
        (
            "pipeline.boundary",
            "model.norm_placement",
            "model.output_bias",
            "model.experts",
            "model.tied",
            "model.architecture",
        ),
        lambda m: m.pipeline.boundary != "subspace" or _in_subspace(m.model),
        lambda m: (
            'not "subspace" with model.norm_placement = "post", model.output_bias, model.experts, model.tied or another'
            " architecture: their layers leave it"
        ),
    ),
)

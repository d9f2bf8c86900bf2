"""Conditions between the fields of a manifest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.run.gossip_rules import with_property
from swarmnode.run.manifest import gossip_compat
from swarmnode.run.manifest.gossip_compat import rules_of
from swarmnode.run.manifest.kind_compat import (
    rank_max,
    targets_exist,
    ties,
)
from swarmnode.run.manifest.spec import ADAPTERS, BYTES_END, FINETUNE, OWN, PRETRAIN, Manifest, ModelSpec

BOUNDARY_BLOCK = 64  # numbers of a token's vector that share a step; as in the codecs of gossip
LOW_BITS = {"int4": 4, "int2": 2}  # codes of fewer bits than a byte
BLENDED = ("llama3", "yarn")  # rope_scaling by how often a frequency turns in the original context


@dataclass(frozen=True, slots=True)
class CrossFieldCheck:
    """A condition between the fields `names`; the error names the first. `allowed` describes valid values."""

    names: tuple[str, ...]
    holds: Callable[[Manifest], bool]
    allowed: Callable[[Manifest], str]


def _across(names: str, holds: Callable[[Manifest], bool], allowed: str | Callable[[Manifest], str]) -> CrossFieldCheck:
    """The condition between the fields `names`; `allowed` may be a template of the manifest `m`."""
    text = (lambda m: allowed.format(m=m)) if isinstance(allowed, str) else allowed
    return CrossFieldCheck(tuple(names.split()), holds, text)


def boundary_codes(boundary: str) -> tuple[str, str]:
    """The number formats of (activations, their gradients) in pipeline.boundary = `boundary`."""
    return ("int4", "int2") if boundary == "int4_int2" else (boundary, boundary)


def boundary_nbytes(code: str, tokens: int, width: int) -> int:
    """Bytes of `tokens` vectors of `width` numbers between stages (`boundary_width`), in one of `boundary_codes`."""
    tiles = -(-width // BOUNDARY_BLOCK)
    if code == "int8":
        return tokens * (width + 2 * tiles)
    if code in LOW_BITS:
        return tokens * tiles * (LOW_BITS[code] * BOUNDARY_BLOCK // 8 + 2)
    return tokens * width * {"bf16": 2, "fp32": 4, "subspace": 2}[code]


def boundary_width(m: Manifest) -> int:
    """Numbers per token between stages: k in a subspace, else all D."""
    return m.pipeline.boundary_rank if m.pipeline.boundary == "subspace" else m.model.width


def _boundary_nbytes(m: Manifest) -> int:
    """Most bytes of one microbatch's activations with its tokens."""
    tokens = m.inner.microbatch * (m.model.context + 1)
    return boundary_nbytes(boundary_codes(m.pipeline.boundary)[0], tokens, boundary_width(m)) + 4 * tokens


def _own_alone(m: Manifest, what: str) -> str:
    return f'"own" with gossip.method = {m.gossip.method!r}, which has {what}'


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
    _across(
        "model.heads model.width model.head_width",
        lambda m: m.model.head_width > 0 or m.model.width % m.model.heads == 0,
        "a divisor of model.width = {m.model.width}",
    ),
    _across(
        "model.kv_heads model.heads",
        lambda m: m.model.heads % m.model.kv_heads == 0,
        "a divisor of model.heads = {m.model.heads}",
    ),
    _across(
        "model.width model.heads model.head_width",
        lambda m: (
            m.model.head_width > 0 or m.model.width % m.model.heads != 0 or m.model.width // m.model.heads % 2 == 0
        ),
        "an even multiple of model.heads = {m.model.heads} (rotary embeddings turn pairs)",
    ),
    _across("model.head_width", lambda m: m.model.head_width % 2 == 0, "an even number (rotary embeddings turn pairs)"),
    _across(
        "model.rope_factor model.rope_scaling",
        lambda m: m.model.rope_scaling != "none" or m.model.rope_factor == 1.0,
        '1 with model.rope_scaling = "none"',
    ),
    _across(
        "model.rope_original_context model.rope_scaling",
        lambda m: (m.model.rope_original_context > 0) == (m.model.rope_scaling in BLENDED),
        lambda m: (
            f'above 0 with model.rope_scaling = "{m.model.rope_scaling}"'
            if m.model.rope_scaling in BLENDED
            else f'0 with model.rope_scaling = "{m.model.rope_scaling}"'
        ),
    ),
    _across(
        "model.rope_high model.rope_low",
        lambda m: m.model.rope_high > m.model.rope_low,
        "above model.rope_low = {m.model.rope_low:g}",
    ),
    _across(
        "model.rope_theta model.rope_scaling",
        lambda m: m.model.rope_scaling != "yarn" or m.model.rope_theta > 1.0,
        'above 1 with model.rope_scaling = "yarn"',
    ),
    _across(
        "model.rope_attention_factor model.rope_scaling",
        lambda m: m.model.rope_attention_factor == 0.0 or m.model.rope_scaling == "yarn",
        '0 with model.rope_scaling = "{m.model.rope_scaling}"',
    ),
    _layers("unrotated_layers", "layers", lambda model: True, ""),
    _layers("sliding_layers", "sliding_window", lambda m: m.sliding_window > 0, "with model.sliding_window = 0"),
    _layers("dense_layers", "experts", lambda m: m.experts > 0, "with model.experts = 0"),
    _across(
        "model.dense_layers model.experts",
        lambda m: m.model.experts == 0 or m.model.sparse_layers > 0,
        "not every layer; or model.experts = 0",
    ),
    _of_experts("experts_active", 1, lambda m: m.experts, "model.experts = "),
    _of_experts("expert_ffn", 1, lambda m: 1 << 22, ""),
    _of_experts("shared_expert_ffn", 0, lambda m: 1 << 22, ""),
    _across(
        "model.router_normalised model.experts",
        lambda m: m.model.experts > 0 or not m.model.router_normalised,
        "false with model.experts = 0",
    ),
    _across(
        "model.router_balance model.experts",
        lambda m: m.model.experts > 0 or m.model.router_balance == 0.0,
        "0 with model.experts = 0",
    ),
    _across(
        "model.tied pipeline.stages training.kind gossip.method",
        lambda m: not m.model.tied or ties(m),
        lambda m: (
            f"false with pipeline.stages = {m.pipeline.stages}, unless gossip.method is average or noloco,"
            f' or training.kind = "{ADAPTERS}"'
        ),
    ),
    _across(
        "pipeline.boundary model.norm_placement model.output_bias model.experts model.tied model.architecture",
        lambda m: m.pipeline.boundary != "subspace" or _in_subspace(m.model),
        'not "subspace" with model.norm_placement = "post", model.output_bias, model.experts, model.tied or'
        " another architecture: their layers leave it",
    ),
)

ACROSS: tuple[CrossFieldCheck, ...] = (
    *MODEL_ACROSS,
    _across(
        "model.vocabulary data.tokenizer",
        lambda m: m.data.tokenizer != "bytes" or m.model.vocabulary == 256,
        '256 with data.tokenizer = "bytes"',
    ),
    _across(
        "pipeline.stages model.layers",
        lambda m: m.pipeline.stages <= m.model.layers,
        "at most model.layers = {m.model.layers}",
    ),
    _across(
        "pipeline.boundary_rank pipeline.boundary model.width",
        lambda m: (
            1 <= m.pipeline.boundary_rank <= m.model.width
            if m.pipeline.boundary == "subspace"
            else m.pipeline.boundary_rank == 0
        ),
        lambda m: (
            f'1 to model.width = {m.model.width} with pipeline.boundary = "subspace"'
            if m.pipeline.boundary == "subspace"
            else f'0 with pipeline.boundary = "{m.pipeline.boundary}", or pipeline.boundary = "subspace"'
        ),
    ),
    _across(
        "gossip.method pipeline.boundary",
        lambda m: m.pipeline.boundary != "subspace" or rules_of(m.gossip).in_subspace,
        lambda m: f'{" or ".join(with_property("in_subspace"))} with pipeline.boundary = "subspace"',
    ),
    _across(
        "data.index data.source",
        lambda m: bool(m.data.index) == (m.data.source == "index"),
        lambda m: (
            'the SHA-256 of an index with data.source = "index"'
            if m.data.source == "index"
            else f'"" with data.source = "{m.data.source}"'
        ),
    ),
    _across(
        "data.locations data.source",
        lambda m: not m.data.locations or m.data.source == "index",
        'an empty list with data.source = "{m.data.source}"',
    ),
    _across(
        "base.locations base.index",
        lambda m: not m.base.locations or bool(m.base.index),
        'an empty list with base.index = ""',
    ),
    _across(
        "pipeline.boundary base.index",
        lambda m: m.pipeline.boundary != "subspace" or not m.base.index,
        'not "subspace" with a base.index: pretrained weights do not lie in one',
    ),
    _across(
        "data.end_token model.vocabulary",
        lambda m: m.data.end_token < m.model.vocabulary,
        "below model.vocabulary = {m.model.vocabulary}",
    ),
    _across(
        "data.end_token data.tokenizer",
        lambda m: m.data.tokenizer != "bytes" or m.data.source == "index" or m.data.end_token in (-1, BYTES_END),
        lambda m: f'-1 or {BYTES_END} with data.tokenizer = "bytes"',
    ),
    _across(
        "data.documents data.end_token data.tokenizer",
        lambda m: m.data.document_end is None or m.data.document_end >= 0,
        '"joined" unless data.end_token, which ends each document, is known',
    ),
    _across(
        "inner.microbatch inner.inner_batch",
        lambda m: m.inner.inner_batch % m.inner.microbatch == 0,
        "a divisor of inner.inner_batch = {m.inner.inner_batch}",
    ),
    _across(
        "inner.inner_batch_max inner.inner_batch",
        lambda m: m.inner.inner_batch_max == 0 or m.inner.inner_batch_max >= m.inner.inner_batch,
        "0, or at least inner.inner_batch = {m.inner.inner_batch}",
    ),
    _across(
        "data.block_samples inner.microbatch",
        lambda m: m.data.block_samples % m.inner.microbatch == 0,
        "a multiple of inner.microbatch = {m.inner.microbatch}",
    ),
    _across(
        "inner.decay_samples inner.warmup_samples inner.decay",
        lambda m: m.inner.decay == "constant" or m.inner.decay_samples > m.inner.warmup_samples,
        "more than inner.warmup_samples = {m.inner.warmup_samples}",
    ),
    _across(
        "inner.cooldown_samples inner.decay_samples inner.warmup_samples inner.decay",
        lambda m: m.inner.decay != "wsd" or m.inner.cooldown_samples <= m.inner.decay_samples - m.inner.warmup_samples,
        lambda m: (
            f"at most {max(1, m.inner.decay_samples - m.inner.warmup_samples)}, what inner.decay_samples leaves after"
            " warm-up"
        ),
    ),
    _across(
        "gossip.round_samples inner.inner_batch",
        lambda m: m.gossip.round_samples >= m.inner.inner_batch or gossip_compat.averages_gradients(m),
        "at least inner.inner_batch = {m.inner.inner_batch}",
    ),
    _across(
        "gossip.gamma gossip.beta gossip.codec",
        gossip_compat.sends_weights_alone,
        lambda m: (
            f'"own", or gossip.beta = {gossip_compat.constants(m.gossip).beta:g} with gossip.codec ='
            f" {m.gossip.codec!r}, which sends weights alone"
        ),
    ),
    _across(
        "gossip.alpha gossip.method",
        lambda m: m.gossip.alpha == OWN or rules_of(m.gossip).alpha is not None,
        lambda m: _own_alone(m, "no momentum"),
    ),
    _across(
        "gossip.beta gossip.method",
        lambda m: m.gossip.beta == OWN or rules_of(m.gossip).beta is not None,
        lambda m: _own_alone(m, "no outer learning rate"),
    ),
    _across(
        "gossip.gamma gossip.method",
        lambda m: m.gossip.gamma == OWN or rules_of(m.gossip).pull,
        lambda m: _own_alone(m, "no such pull"),
    ),
    _across(
        "gossip.codec gossip.method",
        lambda m: m.gossip.codec in rules_of(m.gossip).codecs,
        gossip_compat.allowed_codecs,
    ),
    _across(
        "gossip.group gossip.method",
        lambda m: m.gossip.group == 0 or rules_of(m.gossip).in_groups,
        "0 with gossip.method = {m.gossip.method!r}: slow weights are equal at members that get the same packets",
    ),
    _across(
        "gossip.method gossip.round_samples inner.inner_batch",
        lambda m: not gossip_compat.averages_gradients(m) or gossip_compat.step_rounds(m) > 0,
        'not "{m.gossip.method}" unless inner.inner_batch = {m.inner.inner_batch} is gossip.round_samples, or'
        " 2, 4, 8, ... of it",
    ),
    _across(
        "gossip.butterfly gossip.method",
        lambda m: not m.gossip.butterfly or gossip_compat.averages_gradients(m),
        lambda m: (
            f"false with gossip.method = {m.gossip.method!r}; true goes with "
            + " or ".join(with_property("averages_gradients"))
        ),
    ),
    _across(
        "gossip.delay gossip.butterfly gossip.method",
        lambda m: m.gossip.delay == 0 or m.gossip.butterfly,
        '0 unless gossip.butterfly = true, with gossip.method = "gradient"',
    ),
    _across(
        "gossip.delay inner.optimizer",
        lambda m: m.gossip.delay == 0 or m.inner.optimizer == "muon",
        '0 with inner.optimizer = "{m.inner.optimizer}": what late steps cost it was not measured; 1 takes "muon"',
    ),
    _across(
        "gossip.fragments gossip.method",
        lambda m: m.gossip.fragments == 1 or rules_of(m.gossip).in_fragments,
        lambda m: (
            f"1 with gossip.method = {m.gossip.method!r}; fragments go with "
            f"{' or '.join(with_property('in_fragments'))}"
        ),
    ),
    _across(
        "limits.hop_timeout_min_s limits.microbatch_timeout_s",
        lambda m: m.limits.hop_timeout_min_s <= m.limits.microbatch_timeout_s,
        "at most limits.microbatch_timeout_s = {m.limits.microbatch_timeout_s:g}",
    ),
    _across(
        "limits.record_ttl_s limits.announce_period_s",
        lambda m: m.limits.record_ttl_s >= 2 * m.limits.announce_period_s,
        "at least twice limits.announce_period_s = {m.limits.announce_period_s:g}",
    ),
    _across(
        "training.rank training.kind training.targets model.width model.heads model.kv_heads model.ffn",
        lambda m: m.training.kind != ADAPTERS or m.training.rank <= rank_max(m),
        lambda m: f"at most {rank_max(m)}, the shortest side of a matrix in training.targets",
    ),
    _across(
        "training.targets training.kind model.experts model.shared_expert_ffn",
        targets_exist,
        "a list with one of q_proj, k_proj, v_proj, o_proj: matrices of experts have no adapters",
    ),
    _across(
        "training.kind pipeline.boundary",
        lambda m: m.training.kind == PRETRAIN or m.pipeline.boundary != "subspace",
        '"pretrain" with pipeline.boundary = "subspace", which holds for a model trained within it',
    ),
    _across(
        "inner.optimizer training.kind",
        lambda m: m.training.kind != ADAPTERS or m.inner.optimizer == "adamw",
        '"adamw" with training.kind = "{m.training.kind}"',
    ),
    _across(
        "data.documents training.kind",
        lambda m: m.training.kind != FINETUNE or m.data.documents == "masked",
        '"masked" with training.kind = "finetune": each conversation by itself',
    ),
    _across(
        "limits.frame_bytes_max inner.microbatch model.context model.width pipeline.boundary",
        lambda m: m.limits.frame_bytes_max >= _boundary_nbytes(m),
        lambda m: f"at least {_boundary_nbytes(m):_}, the bytes of one microbatch between stages",
    ),
)

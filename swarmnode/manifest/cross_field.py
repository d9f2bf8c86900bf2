"""Conditions between the fields of a manifest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.gossip_rules import WEIGHTS, with_property
from swarmnode.manifest import gossip_compat
from swarmnode.manifest.kind_compat import (
    by_forward_passes,
    experts_fit,
    rank_max,
    targets_exist,
    ties,
    trains_experts_apart,
)
from swarmnode.manifest.spec import ADAPTERS, BYTES_END, FINETUNE, ONE_BYTE, PRETRAIN, Manifest, ModelSpec

PATHLESS = ("demo", "index")  # data sources that read no file named by the manifest
BOUNDARY_BLOCK = 64  # numbers of a token's vector that share a step; as in the codecs of gossip
BLENDED = ("llama3", "yarn")  # rope_scaling by how often a frequency turns in the original context


@dataclass(frozen=True, slots=True)
class CrossFieldCheck:
    """A condition between the fields `names`; the error names the first. `allowed` describes valid values."""

    names: tuple[str, ...]
    holds: Callable[[Manifest], bool]
    allowed: Callable[[Manifest], str]


def boundary_nbytes(kind: str, tokens: int, width: int) -> int:
    """Bytes of `tokens` vectors of `width` numbers between stages (`boundary_width`), in pipeline.boundary = `kind`."""
    if kind in ("int8", "fp8"):
        return tokens * (width + 2 * -(-width // BOUNDARY_BLOCK))
    return tokens * width * {"bf16": 2, "fp32": 4, "subspace": 2}[kind]


def boundary_width(m: Manifest) -> int:
    """Numbers per token between stages: k in a subspace, else all D."""
    return m.pipeline.boundary_rank if m.pipeline.boundary == "subspace" else m.model.width


def _boundary_nbytes(m: Manifest) -> int:
    """Most bytes of one microbatch's activations with its tokens."""
    tokens = m.inner.microbatch * (m.model.context + 1)
    return boundary_nbytes(m.pipeline.boundary, tokens, boundary_width(m)) + 4 * tokens


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

ACROSS: tuple[CrossFieldCheck, ...] = (
    *MODEL_ACROSS,
    CrossFieldCheck(
        ("model.vocabulary", "data.tokenizer"),
        lambda m: m.data.tokenizer != "bytes" or m.model.vocabulary == 256,
        lambda m: '256 with data.tokenizer = "bytes"',
    ),
    CrossFieldCheck(
        ("pipeline.stages", "model.layers"),
        lambda m: m.pipeline.stages <= m.model.layers,
        lambda m: f"at most model.layers = {m.model.layers}",
    ),
    CrossFieldCheck(
        ("pipeline.boundary_rank", "pipeline.boundary", "model.width"),
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
    CrossFieldCheck(
        ("gossip.method", "pipeline.boundary"),
        gossip_compat.keeps_subspace,
        lambda m: f'{" or ".join(with_property("in_subspace"))} with pipeline.boundary = "subspace"',
    ),
    CrossFieldCheck(
        ("data.paths", "data.source"),
        lambda m: bool(m.data.paths) == (m.data.source not in PATHLESS),
        lambda m: (
            f'at least one path with data.source = "{m.data.source}"'
            if m.data.source not in PATHLESS
            else f'an empty list with data.source = "{m.data.source}"'
        ),
    ),
    CrossFieldCheck(
        ("data.index", "data.source"),
        lambda m: bool(m.data.index) == (m.data.source == "index"),
        lambda m: (
            'the SHA-256 of an index with data.source = "index"'
            if m.data.source == "index"
            else f'"" with data.source = "{m.data.source}"'
        ),
    ),
    CrossFieldCheck(
        ("data.locations", "data.source"),
        lambda m: not m.data.locations or m.data.source == "index",
        lambda m: f'an empty list with data.source = "{m.data.source}"',
    ),
    CrossFieldCheck(
        ("base.locations", "base.index"),
        lambda m: not m.base.locations or bool(m.base.index),
        lambda m: 'an empty list with base.index = ""',
    ),
    CrossFieldCheck(
        ("pipeline.boundary", "base.index"),
        lambda m: m.pipeline.boundary != "subspace" or not m.base.index,
        lambda m: 'not "subspace" with a base.index: pretrained weights do not lie in one',
    ),
    CrossFieldCheck(
        ("data.end_token", "model.vocabulary"),
        lambda m: m.data.end_token < m.model.vocabulary,
        lambda m: f"below model.vocabulary = {m.model.vocabulary}",
    ),
    CrossFieldCheck(
        ("data.end_token", "data.tokenizer"),
        lambda m: m.data.tokenizer != "bytes" or m.data.source == "index" or m.data.end_token in (-1, BYTES_END),
        lambda m: f'-1 or {BYTES_END} with data.tokenizer = "bytes"',
    ),
    CrossFieldCheck(
        ("data.documents", "data.end_token", "data.tokenizer"),
        lambda m: m.data.document_end is None or m.data.document_end >= 0,
        lambda m: '"joined" unless data.end_token, which ends each document, is known',
    ),
    CrossFieldCheck(
        ("inner.microbatch", "inner.inner_batch"),
        lambda m: m.inner.inner_batch % m.inner.microbatch == 0,
        lambda m: f"a divisor of inner.inner_batch = {m.inner.inner_batch}",
    ),
    CrossFieldCheck(
        ("inner.inner_batch_max", "inner.inner_batch"),
        lambda m: m.inner.inner_batch_max == 0 or m.inner.inner_batch_max >= m.inner.inner_batch,
        lambda m: f"0, or at least inner.inner_batch = {m.inner.inner_batch}",
    ),
    CrossFieldCheck(
        ("inner.inner_batch_end", "inner.inner_batch", "inner.microbatch"),
        lambda m: (
            m.inner.inner_batch_end == 0
            or (m.inner.inner_batch_end >= m.inner.inner_batch and m.inner.inner_batch_end % m.inner.microbatch == 0)
        ),
        lambda m: (
            f"0, or a multiple of inner.microbatch = {m.inner.microbatch} that is at least inner.inner_batch ="
            f" {m.inner.inner_batch}"
        ),
    ),
    CrossFieldCheck(
        ("data.block_samples", "inner.microbatch"),
        lambda m: m.data.block_samples % m.inner.microbatch == 0,
        lambda m: f"a multiple of inner.microbatch = {m.inner.microbatch}",
    ),
    CrossFieldCheck(
        ("inner.decay_samples", "inner.warmup_samples", "inner.decay"),
        lambda m: m.inner.decay == "constant" or m.inner.decay_samples > m.inner.warmup_samples,
        lambda m: f"more than inner.warmup_samples = {m.inner.warmup_samples}",
    ),
    CrossFieldCheck(
        ("inner.cooldown_samples", "inner.decay_samples", "inner.warmup_samples", "inner.decay"),
        lambda m: m.inner.decay != "wsd" or m.inner.cooldown_samples <= m.inner.decay_samples - m.inner.warmup_samples,
        lambda m: (
            f"at most {max(1, m.inner.decay_samples - m.inner.warmup_samples)}, what inner.decay_samples leaves after"
            " warm-up"
        ),
    ),
    CrossFieldCheck(
        ("gossip.round_samples", "inner.inner_batch"),
        lambda m: m.gossip.round_samples >= m.inner.inner_batch,
        lambda m: f"at least inner.inner_batch = {m.inner.inner_batch}",
    ),
    CrossFieldCheck(
        ("gossip.round_samples", "inner.inner_batch_end"),
        lambda m: m.gossip.round_samples >= m.inner.inner_batch_end,
        lambda m: f"at least inner.inner_batch_end = {m.inner.inner_batch_end}",
    ),
    CrossFieldCheck(
        ("gossip.gamma", "gossip.beta", "gossip.codec"),
        gossip_compat.sends_weights_alone,
        lambda m: (
            f'"own", or gossip.beta = {gossip_compat.constants(m.gossip).beta:g} with gossip.codec ='
            f" {m.gossip.codec!r}, which sends weights alone"
        ),
    ),
    CrossFieldCheck(("gossip.alpha", "gossip.method"), gossip_compat.has_alpha, lambda m: _own_alone(m, "no momentum")),
    CrossFieldCheck(
        ("gossip.beta", "gossip.method"), gossip_compat.has_beta, lambda m: _own_alone(m, "no outer learning rate")
    ),
    CrossFieldCheck(
        ("gossip.gamma", "gossip.method"), gossip_compat.has_gamma, lambda m: _own_alone(m, "no such pull")
    ),
    CrossFieldCheck(("gossip.codec", "gossip.method"), gossip_compat.goes_together, gossip_compat.allowed_codecs),
    CrossFieldCheck(
        ("gossip.group", "gossip.method"),
        gossip_compat.meets_all,
        lambda m: (
            f"0 with gossip.method = {m.gossip.method!r}: slow weights are equal at members that get the same packets"
        ),
    ),
    CrossFieldCheck(
        ("gossip.method", "inner.optimizer", "training.experts_trained"),
        gossip_compat.has_gradients,
        lambda m: f'not "{m.gossip.method}" without inner.optimizer = "muon", or with training.experts_trained',
    ),
    CrossFieldCheck(
        ("gossip.fragments", "gossip.method"),
        gossip_compat.takes_fragments,
        lambda m: (
            f"1 with gossip.method = {m.gossip.method!r}; fragments go with "
            f"{' or '.join(with_property('in_fragments'))}"
        ),
    ),
    CrossFieldCheck(
        ("limits.hop_timeout_min_s", "limits.microbatch_timeout_s"),
        lambda m: m.limits.hop_timeout_min_s <= m.limits.microbatch_timeout_s,
        lambda m: f"at most limits.microbatch_timeout_s = {m.limits.microbatch_timeout_s:g}",
    ),
    CrossFieldCheck(
        ("limits.record_ttl_s", "limits.announce_period_s"),
        lambda m: m.limits.record_ttl_s >= 2 * m.limits.announce_period_s,
        lambda m: f"at least twice limits.announce_period_s = {m.limits.announce_period_s:g}",
    ),
    CrossFieldCheck(
        ("recovery.snapshot_rounds_max", "recovery.snapshot_rounds"),
        lambda m: m.recovery.snapshot_rounds_max == 0 or m.recovery.snapshot_rounds_max >= m.recovery.snapshot_rounds,
        lambda m: f"0, or at least recovery.snapshot_rounds = {m.recovery.snapshot_rounds}",
    ),
    CrossFieldCheck(
        (
            "training.rank",
            "training.kind",
            "training.targets",
            "model.width",
            "model.heads",
            "model.kv_heads",
            "model.ffn",
        ),
        lambda m: m.training.kind != ADAPTERS or m.training.rank <= rank_max(m),
        lambda m: f"at most {rank_max(m)}, the shortest side of a matrix in training.targets",
    ),
    CrossFieldCheck(
        ("training.targets", "training.kind", "model.experts", "model.shared_expert_ffn"),
        targets_exist,
        lambda m: "a list with one of q_proj, k_proj, v_proj, o_proj: matrices of experts have no adapters",
    ),
    CrossFieldCheck(
        ("training.kind", "pipeline.boundary"),
        lambda m: m.training.kind == PRETRAIN or m.pipeline.boundary != "subspace",
        lambda m: '"pretrain" with pipeline.boundary = "subspace", which holds for a model trained within it',
    ),
    CrossFieldCheck(
        ("inner.optimizer", "training.kind"),
        lambda m: m.training.kind not in (ADAPTERS, ONE_BYTE) or m.inner.optimizer == "adamw",
        lambda m: f'"adamw" with training.kind = "{m.training.kind}"',
    ),
    CrossFieldCheck(
        ("pipeline.stages", "training.kind"),
        lambda m: not by_forward_passes(m) or m.pipeline.stages == 1,
        lambda m: '1 with training.kind = "one_byte": each machine holds the whole model',
    ),
    CrossFieldCheck(
        ("inner.weight_decay", "training.kind"),
        lambda m: not by_forward_passes(m) or m.inner.weight_decay == 0.0,
        lambda m: '0.0 with training.kind = "one_byte": weights move by the shared bytes alone',
    ),
    CrossFieldCheck(
        ("inner.average_share", "training.kind"),
        lambda m: not by_forward_passes(m) or m.inner.average_share == 0.0,
        lambda m: '0.0 with training.kind = "one_byte": it would be one more copy of the weights',
    ),
    CrossFieldCheck(
        ("gossip.method", "gossip.fragments", "training.kind"),
        lambda m: not by_forward_passes(m) or (m.gossip.method == "average" and m.gossip.fragments == 1),
        lambda m: '"average" in one fragment with training.kind = "one_byte": the bytes are of all weights',
    ),
    CrossFieldCheck(
        ("gossip.group", "training.kind"),
        lambda m: not by_forward_passes(m) or m.gossip.group == 0,
        lambda m: '0 with training.kind = "one_byte": everybody hears everybody\'s bytes',
    ),
    CrossFieldCheck(
        ("gossip.acceptance", "training.kind"),
        lambda m: not by_forward_passes(m) or m.gossip.acceptance == "all",
        lambda m: '"all" with training.kind = "one_byte": bytes are clipped by their form',
    ),
    CrossFieldCheck(
        ("data.documents", "training.kind"),
        lambda m: m.training.kind != FINETUNE or m.data.documents == "masked",
        lambda m: '"masked" with training.kind = "finetune": each conversation by itself',
    ),
    CrossFieldCheck(
        ("training.experts_trained", "model.experts"),
        experts_fit,
        lambda m: f"0, or a part of model.experts = {m.model.experts} without a rest",
    ),
    CrossFieldCheck(
        ("training.experts_trained", "training.kind"),
        lambda m: not trains_experts_apart(m) or m.training.kind in (PRETRAIN, FINETUNE),
        lambda m: f'0 with training.kind = "{m.training.kind}", which does not train experts by gradients',
    ),
    CrossFieldCheck(
        ("training.experts_trained", "pipeline.boundary"),
        lambda m: not trains_experts_apart(m) or m.pipeline.boundary != "subspace",
        lambda m: '0 with pipeline.boundary = "subspace"',
    ),
    CrossFieldCheck(
        ("inner.optimizer", "training.experts_trained"),
        lambda m: not trains_experts_apart(m) or m.inner.optimizer == "muon",
        lambda m: '"muon" with training.experts_trained',
    ),
    CrossFieldCheck(
        ("gossip.method", "gossip.fragments", "training.experts_trained"),
        lambda m: not trains_experts_apart(m) or (m.gossip.method == "average" and m.gossip.fragments == 1),
        lambda m: '"average" in one fragment with training.experts_trained',
    ),
    CrossFieldCheck(
        ("gossip.codec", "training.experts_trained"),
        lambda m: not trains_experts_apart(m) or m.gossip.codec in WEIGHTS,
        lambda m: f"{' or '.join(WEIGHTS)} with training.experts_trained: others need weights like one's own",
    ),
    CrossFieldCheck(
        ("gossip.acceptance", "training.experts_trained"),
        lambda m: not trains_experts_apart(m) or m.gossip.acceptance != "guarded",
        lambda m: '"clipped" or "all" with training.experts_trained: nobody can judge experts that only others train',
    ),
    CrossFieldCheck(
        ("limits.frame_bytes_max", "inner.microbatch", "model.context", "model.width", "pipeline.boundary"),
        lambda m: m.limits.frame_bytes_max >= _boundary_nbytes(m),
        lambda m: f"at least {_boundary_nbytes(m):_}, the bytes of one microbatch between stages",
    ),
)

"""Conditions between the fields of a manifest."""

from __future__ import annotations

from swarmnode.gossip_rules import WEIGHTS
from swarmnode.manifest import gossip_compat, kind_compat
from swarmnode.manifest.check import CrossFieldCheck
from swarmnode.manifest.model_cross_field import MODEL_ACROSS
from swarmnode.manifest.spec import BYTES_END, Manifest

PATHLESS = ("demo", "index")  # data sources that read no file named by the manifest
BOUNDARY_BLOCK = 64  # numbers of a token's vector that share a step; as in the codecs of gossip


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
        lambda m: f'{" or ".join(gossip_compat.with_property("in_subspace"))} with pipeline.boundary = "subspace"',
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
        ("gossip.rounds", "inner.decay"),
        lambda m: m.gossip.rounds != "qsr" or m.inner.decay != "constant",
        lambda m: '"even" with inner.decay = "constant": rounds of "qsr" lengthen as the learning rate falls',
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
            f"{' or '.join(gossip_compat.with_property('in_fragments'))}"
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
        kind_compat.rank_fits,
        lambda m: f"at most {kind_compat.rank_max(m)}, the shortest side of a matrix in training.targets",
    ),
    CrossFieldCheck(
        ("training.targets", "training.kind", "model.experts", "model.shared_expert_ffn"),
        kind_compat.targets_exist,
        lambda m: "a list with one of q_proj, k_proj, v_proj, o_proj: matrices of experts have no adapters",
    ),
    CrossFieldCheck(
        ("training.kind", "pipeline.boundary"),
        kind_compat.boundary_fits,
        lambda m: '"pretrain" with pipeline.boundary = "subspace", which holds for a model trained within it',
    ),
    CrossFieldCheck(
        ("recovery.itinerary", "training.kind", "base.index"),
        kind_compat.itinerary_fits,
        lambda m: '"straight" in a run that begins with a trained model: its layers do not change places',
    ),
    CrossFieldCheck(
        ("inner.optimizer", "training.kind"),
        kind_compat.optimizer_fits,
        lambda m: f'"adamw" with training.kind = "{m.training.kind}"',
    ),
    CrossFieldCheck(
        ("pipeline.stages", "training.kind"),
        kind_compat.stages_fit,
        lambda m: '1 with training.kind = "one_byte": each machine holds the whole model',
    ),
    CrossFieldCheck(
        ("inner.weight_decay", "training.kind"),
        kind_compat.decay_fits,
        lambda m: '0.0 with training.kind = "one_byte": weights move by the shared bytes alone',
    ),
    CrossFieldCheck(
        ("inner.average_share", "training.kind"),
        kind_compat.average_fits,
        lambda m: '0.0 with training.kind = "one_byte": it would be one more copy of the weights',
    ),
    CrossFieldCheck(
        ("gossip.method", "gossip.fragments", "training.kind"),
        kind_compat.method_fits,
        lambda m: '"average" in one fragment with training.kind = "one_byte": the bytes are of all weights',
    ),
    CrossFieldCheck(
        ("gossip.group", "training.kind"),
        kind_compat.group_fits,
        lambda m: '0 with training.kind = "one_byte": everybody hears everybody\'s bytes',
    ),
    CrossFieldCheck(
        ("gossip.acceptance", "training.kind"),
        kind_compat.acceptance_fits,
        lambda m: '"all" with training.kind = "one_byte": bytes are clipped by their form',
    ),
    CrossFieldCheck(
        ("data.documents", "training.kind"),
        kind_compat.documents_fit,
        lambda m: '"masked" with training.kind = "finetune": each conversation by itself',
    ),
    CrossFieldCheck(
        ("training.experts_trained", "model.experts"),
        kind_compat.experts_fit,
        lambda m: f"0, or a part of model.experts = {m.model.experts} without a rest",
    ),
    CrossFieldCheck(
        ("training.experts_trained", "training.kind"),
        kind_compat.experts_kind_fits,
        lambda m: f'0 with training.kind = "{m.training.kind}", which does not train experts by gradients',
    ),
    CrossFieldCheck(
        ("training.experts_trained", "pipeline.boundary"),
        kind_compat.experts_boundary_fits,
        lambda m: '0 with pipeline.boundary = "subspace"',
    ),
    CrossFieldCheck(
        ("inner.optimizer", "training.experts_trained"),
        kind_compat.experts_optimizer_fits,
        lambda m: '"muon" with training.experts_trained',
    ),
    CrossFieldCheck(
        ("gossip.method", "gossip.fragments", "training.experts_trained"),
        kind_compat.experts_method_fits,
        lambda m: '"average" in one fragment with training.experts_trained',
    ),
    CrossFieldCheck(
        ("gossip.codec", "training.experts_trained"),
        kind_compat.experts_codec_fits,
        lambda m: f"{' or '.join(WEIGHTS)} with training.experts_trained: others need weights like one's own",
    ),
    CrossFieldCheck(
        ("gossip.acceptance", "training.experts_trained"),
        kind_compat.experts_acceptance_fits,
        lambda m: '"clipped" or "all" with training.experts_trained: nobody can judge experts that only others train',
    ),
    CrossFieldCheck(
        ("limits.frame_bytes_max", "inner.microbatch", "model.context", "model.width", "pipeline.boundary"),
        lambda m: m.limits.frame_bytes_max >= _boundary_nbytes(m),
        lambda m: f"at least {_boundary_nbytes(m):_}, the bytes of one microbatch between stages",
    ),
)

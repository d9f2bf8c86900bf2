"""What must hold between the fields of a manifest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.manifest import meeting
from swarmnode.manifest.spec import Manifest


@dataclass(frozen=True, slots=True)
class Across:
    """What must hold between the fields `names`; the error names the first. `allowed` says what would do."""

    names: tuple[str, ...]
    holds: Callable[[Manifest], bool]
    allowed: Callable[[Manifest], str]


BOUNDARY_BLOCK = 64  # numbers of a token's vector that share a step; as in the codecs of gossip


def boundary_nbytes(kind: str, tokens: int, width: int) -> int:
    """Bytes of `tokens` vectors of `width` numbers between stages (`boundary_width`), in pipeline.boundary = `kind`."""
    if kind in ("int8", "fp8"):
        return tokens * (width + 2 * -(-width // BOUNDARY_BLOCK))
    return tokens * width * {"bf16": 2, "fp32": 4, "subspace": 2}[kind]


def boundary_width(m: Manifest) -> int:
    """Numbers that stand for a token between stages: k in a subspace, else all D."""
    return m.pipeline.boundary_rank if m.pipeline.boundary == "subspace" else m.model.width


def _boundary_nbytes(m: Manifest) -> int:
    """Bytes of one microbatch's activations at most, with its tokens."""
    tokens = m.inner.microbatch * (m.model.context + 1)
    return boundary_nbytes(m.pipeline.boundary, tokens, boundary_width(m)) + 4 * tokens


def _own_alone(m: Manifest, what: str) -> str:
    return f'"own" with gossip.method = {m.gossip.method!r}, which has {what}'


ACROSS: tuple[Across, ...] = (
    Across(
        ("model.heads", "model.width"),
        lambda m: m.model.width % m.model.heads == 0,
        lambda m: f"a divisor of model.width = {m.model.width}",
    ),
    Across(
        ("model.kv_heads", "model.heads"),
        lambda m: m.model.heads % m.model.kv_heads == 0,
        lambda m: f"a divisor of model.heads = {m.model.heads}",
    ),
    Across(
        ("model.width", "model.heads"),
        lambda m: m.model.width % m.model.heads != 0 or m.model.width // m.model.heads % 2 == 0,
        lambda m: f"an even multiple of model.heads = {m.model.heads} (rotary embeddings turn pairs)",
    ),
    Across(
        ("model.vocabulary", "data.tokenizer"),
        lambda m: m.data.tokenizer != "bytes" or m.model.vocabulary == 256,
        lambda m: '256 with data.tokenizer = "bytes"',
    ),
    Across(
        ("pipeline.stages", "model.layers"),
        lambda m: m.pipeline.stages <= m.model.layers,
        lambda m: f"at most model.layers = {m.model.layers}",
    ),
    Across(
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
    Across(
        ("gossip.method", "pipeline.boundary"),
        meeting.keeps_subspace,
        lambda m: f'{" or ".join(meeting.IN_SUBSPACE)} with pipeline.boundary = "subspace"',
    ),
    Across(
        ("data.paths", "data.source"),
        lambda m: bool(m.data.paths) == (m.data.source != "python-stdlib"),
        lambda m: (
            f'at least one path with data.source = "{m.data.source}"'
            if m.data.source != "python-stdlib"
            else 'an empty list with data.source = "python-stdlib"'
        ),
    ),
    Across(
        ("inner.microbatch", "inner.inner_batch"),
        lambda m: m.inner.inner_batch % m.inner.microbatch == 0,
        lambda m: f"a divisor of inner.inner_batch = {m.inner.inner_batch}",
    ),
    Across(
        ("inner.inner_batch_max", "inner.inner_batch"),
        lambda m: m.inner.inner_batch_max == 0 or m.inner.inner_batch_max >= m.inner.inner_batch,
        lambda m: f"0, or at least inner.inner_batch = {m.inner.inner_batch}",
    ),
    Across(
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
    Across(
        ("data.block_samples", "inner.microbatch"),
        lambda m: m.data.block_samples % m.inner.microbatch == 0,
        lambda m: f"a multiple of inner.microbatch = {m.inner.microbatch}",
    ),
    Across(
        ("inner.decay_samples", "inner.warmup_samples", "inner.decay"),
        lambda m: m.inner.decay == "constant" or m.inner.decay_samples > m.inner.warmup_samples,
        lambda m: f"more than inner.warmup_samples = {m.inner.warmup_samples}",
    ),
    Across(
        ("inner.cooldown_samples", "inner.decay_samples", "inner.warmup_samples", "inner.decay"),
        lambda m: m.inner.decay != "wsd" or m.inner.cooldown_samples <= m.inner.decay_samples - m.inner.warmup_samples,
        lambda m: (
            f"at most {max(1, m.inner.decay_samples - m.inner.warmup_samples)}, what inner.decay_samples leaves after"
            " warm-up"
        ),
    ),
    Across(
        ("gossip.round_samples", "inner.inner_batch"),
        lambda m: m.gossip.round_samples >= m.inner.inner_batch,
        lambda m: f"at least inner.inner_batch = {m.inner.inner_batch}",
    ),
    Across(
        ("gossip.round_samples", "inner.inner_batch_end"),
        lambda m: m.gossip.round_samples >= m.inner.inner_batch_end,
        lambda m: f"at least inner.inner_batch_end = {m.inner.inner_batch_end}",
    ),
    Across(
        ("gossip.rounds", "inner.decay"),
        lambda m: m.gossip.rounds != "qsr" or m.inner.decay != "constant",
        lambda m: '"even" with inner.decay = "constant": rounds of "qsr" lengthen as the learning rate falls',
    ),
    Across(
        ("gossip.gamma", "gossip.beta", "gossip.codec"),
        meeting.sends_weights_alone,
        lambda m: (
            f'"own", or gossip.beta = {meeting.constants(m.gossip).beta:g} with gossip.codec = {m.gossip.codec!r},'
            " which sends weights alone"
        ),
    ),
    Across(("gossip.alpha", "gossip.method"), meeting.has_alpha, lambda m: _own_alone(m, "no momentum")),
    Across(("gossip.beta", "gossip.method"), meeting.has_beta, lambda m: _own_alone(m, "no outer learning rate")),
    Across(("gossip.gamma", "gossip.method"), meeting.has_gamma, lambda m: _own_alone(m, "no such pull")),
    Across(("gossip.codec", "gossip.method"), meeting.goes_together, meeting.allowed_codecs),
    Across(
        ("gossip.group", "gossip.method"),
        meeting.meets_all,
        lambda m: f"0 with gossip.method = {m.gossip.method!r}: slow weights are equal at all who get the same packets",
    ),
    Across(
        ("gossip.fragments", "gossip.method"),
        meeting.takes_fragments,
        lambda m: f"1 with gossip.method = {m.gossip.method!r}; fragments go with {' or '.join(meeting.IN_FRAGMENTS)}",
    ),
    Across(
        ("limits.hop_timeout_min_s", "limits.microbatch_timeout_s"),
        lambda m: m.limits.hop_timeout_min_s <= m.limits.microbatch_timeout_s,
        lambda m: f"at most limits.microbatch_timeout_s = {m.limits.microbatch_timeout_s:g}",
    ),
    Across(
        ("limits.record_ttl_s", "limits.announce_period_s"),
        lambda m: m.limits.record_ttl_s >= 2 * m.limits.announce_period_s,
        lambda m: f"at least twice limits.announce_period_s = {m.limits.announce_period_s:g}",
    ),
    Across(
        ("recovery.snapshot_rounds_max", "recovery.snapshot_rounds"),
        lambda m: m.recovery.snapshot_rounds_max == 0 or m.recovery.snapshot_rounds_max >= m.recovery.snapshot_rounds,
        lambda m: f"0, or at least recovery.snapshot_rounds = {m.recovery.snapshot_rounds}",
    ),
    Across(
        ("limits.frame_bytes_max", "inner.microbatch", "model.context", "model.width", "pipeline.boundary"),
        lambda m: m.limits.frame_bytes_max >= _boundary_nbytes(m),
        lambda m: f"at least {_boundary_nbytes(m):_}, the bytes of one microbatch between stages",
    ),
)

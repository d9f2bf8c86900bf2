"""The fields that an owner can change in a run under way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from swarmnode.base.errors import ManifestError
from swarmnode.run.manifest.kind_compat import trains_both_ends
from swarmnode.run.manifest.signed import canonical, from_canonical
from swarmnode.run.manifest.spec import BY_NAME, Manifest

AMENDABLE = frozenset(
    {
        *(
            f"inner.{key}"
            for key in (
                "learning_rate",
                "muon_learning_rate",
                "muon_momentum",
                "decay",
                "decay_samples",
                "cooldown_samples",
                "learning_rate_min_ratio",
                "weight_decay",
                "clip_norm",
                "replica_rate",
                "inner_batch",
                "inner_batch_max",
            )
        ),
        *(f"gossip.{key}" for key in ("codec", "acceptance", "group", "round_seconds_min", "uplink_share")),
        *(f"pipeline.{key}" for key in ("stages", "audit_share", "validation_every_samples", "window_max")),
        *(f"checkpoint.{key}" for key in ("every_rounds", "keep")),
        *(f"limits.{key}" for key in ("microbatch_timeout_s", "exchange_timeout_s")),
        "access.mode",
        *(f"about.{key}" for key in ("by", "why", "page")),
    }
)
"""Fields that a node can take up between two rounds, with the weights that it has; `pipeline.stages` at a new start."""

WHY = {
    "model": "the weights would have another shape",
    "training": "the trained weights would be others",
    "base": "the run has begun from it",
    "data": "samples are numbered in the run's text, and others would be trained under the same numbers",
    "gossip": "rounds, and with them the ages of states and checkpoints, would be counted or averaged otherwise",
    "inner": "the optimizer's state, or the size of a microbatch, would not fit",
    "transport": "nodes of two transports do not reach each other",
    "evaluation": "checkpoints measured otherwise do not compare with those before",
    "pipeline": "stages would exchange other activations, and all had to change at once",
}


def amended(manifest: Manifest, values: Mapping[str, object]) -> Manifest:
    """`manifest` with `values` by field name. Raises ManifestError for a field that cannot change, and for values that
    are not allowed."""
    for name in values:
        if name not in BY_NAME:
            raise ManifestError(f"{name[:60]}: unknown field")
        if name not in AMENDABLE:
            why = WHY.get(BY_NAME[name].table, "nodes rely on it from the run's begin")
            raise ManifestError(f"{name} cannot change in a run under way: {why}; begin another run for it")
        if BY_NAME[name].check.accept(values[name]) is None:
            raise ManifestError(f"{name} = {str(values[name])[:60]}: allowed is {BY_NAME[name].check.allowed}")
    before = manifest
    for name, raw in values.items():
        field = BY_NAME[name]
        table = dataclasses.replace(getattr(manifest, field.table), **{field.key: field.check.accept(raw)})
        manifest = dataclasses.replace(manifest, **{field.table: table})
    if trains_both_ends(before) != trains_both_ends(manifest):
        raise ManifestError("pipeline.stages: a tied table that both ends train stays in several; begin another run")
    return from_canonical(canonical(manifest))  # conditions between fields hold

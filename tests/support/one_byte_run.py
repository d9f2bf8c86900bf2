"""A run of training.kind = "one_byte" on a tiny model."""

from __future__ import annotations

from dataclasses import replace

from swarmnode.manifest import Manifest, TrainingSpec


def by_bytes(run: Manifest, rate: float = 1e-3, **inner: object) -> Manifest:
    """`run` in one stage, trained by forward passes alone."""
    spec = {"weight_decay": 0.0, "average_share": 0.0, "decay": "constant", "learning_rate": rate, **inner}
    gossip = replace(run.gossip, method="average", group=0, fragments=1, acceptance="all")
    return replace(
        run,
        pipeline=replace(run.pipeline, stages=1),
        inner=replace(run.inner, optimizer="adamw", **spec),  # type: ignore[arg-type]
        gossip=gossip,
        training=TrainingSpec(kind="one_byte"),
    )

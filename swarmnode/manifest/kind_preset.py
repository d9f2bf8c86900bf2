"""Values that suit a kind of training, for `swarmnode init --from MODEL --kind KIND`."""

from __future__ import annotations

import dataclasses

from swarmnode.manifest.kind_compat import ADAPTERS, FINETUNE, ONE_BYTE, PRETRAIN
from swarmnode.manifest.recipe import Recipe
from swarmnode.manifest.spec import Manifest


def of_kind(start: Manifest, kind: str) -> Recipe:
    """`start` as a run of training.kind = `kind`, and the origins of the values that this changes."""
    if kind == PRETRAIN:
        return Recipe(start, {})
    training = dataclasses.replace(start.training, kind=kind)
    origins = {"training.kind": "asked for"}
    inner, data = dataclasses.replace(start.inner, optimizer="adamw"), start.data
    origins["inner.optimizer"] = "models trained with AdamW gain nothing by another one, arXiv 2502.16982, section 3.5"
    if kind == ADAPTERS:
        inner = dataclasses.replace(inner, weight_decay=0.0)
        origins["inner.weight_decay"] = "peft's examples: A and B begin near zero"
    if kind == FINETUNE:
        data = dataclasses.replace(data, documents="masked")
        origins["data.documents"] = "each conversation by itself"
    made = dataclasses.replace(start, training=training, inner=inner, data=data)
    return _of_one_byte(made, origins) if kind == ONE_BYTE else Recipe(made, origins)


def _of_one_byte(start: Manifest, origins: dict[str, str]) -> Recipe:
    """Values without which training by forward passes alone is refused (kind_compat.py)."""
    inner = dataclasses.replace(start.inner, weight_decay=0.0, average_share=0.0)
    pipeline = dataclasses.replace(start.pipeline, stages=1)
    gossip = dataclasses.replace(start.gossip, method="average", fragments=1, group=0, acceptance="all")
    origins = {
        **origins,
        "inner.optimizer": "has no effect: weights move by the shared bytes alone",
        "inner.weight_decay": "weights move by the shared bytes alone",
        "inner.average_share": "would be one more copy of the weights",
        "pipeline.stages": "each machine holds the whole model",
        "gossip.method": "has no effect: the shared bytes are applied, not averaged",
        "gossip.group": "everybody hears everybody's bytes",
        "gossip.acceptance": "bytes are clipped by their form",
    }
    return Recipe(dataclasses.replace(start, inner=inner, pipeline=pipeline, gossip=gossip), origins)

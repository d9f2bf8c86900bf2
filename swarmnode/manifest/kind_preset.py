"""Values that suit a kind of training, for `swarmnode init --from MODEL --kind KIND`."""

from __future__ import annotations

import dataclasses

from swarmnode.manifest.kind_compat import ADAPTERS, FINETUNE, PRETRAIN
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
    return Recipe(dataclasses.replace(start, training=training, inner=inner, data=data), origins)

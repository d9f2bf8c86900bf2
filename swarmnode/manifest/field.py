"""All fields of a manifest: meaning, allowed values, and the origin of the default.

This table drives validation and the commented template. Conditions between fields are in cross_field.py.
"""

from __future__ import annotations

from swarmnode.manifest.check import Field
from swarmnode.manifest.kind_field import KIND_FIELDS
from swarmnode.manifest.service_field import SERVICE_FIELDS
from swarmnode.manifest.training_field import TRAINING_FIELDS

TABLES = {
    "model": "The model: a decoder. Defaults: Llama's architecture, 1.0 M parameters; two CPU cores train it fast.",
    "pipeline": "The route of microbatches through the stages.",
    "base": "The pretrained model that the run starts from, named by content (`swarmnode init --from`).",
    "data": "The training text and its tokens.",
    "inner": "Inner steps: the optimizer of one replica, on its own accumulated gradient.",
    "gossip": "Rounds: the averaging of a stage's replicas (NoLoCo, arXiv 2506.10911).",
    "training": "The trained part of the model: all weights, or adapters beside frozen ones.",
    "checkpoint": "Where and how often the whole run is saved, so that it can be stopped and resumed.",
    "limits": "Bounds that every node keeps.",
    "recovery": "Recovery of a stage whose replicas all died.",
    "access": "Access to the run (docs/security.md).",
    "evaluation": "What the owner's archive measures on each checkpoint, beside the validation loss.",
}

FIELDS: tuple[Field, ...] = (*TRAINING_FIELDS, *KIND_FIELDS, *SERVICE_FIELDS)
BY_NAME = {field.name: field for field in FIELDS}

__all__ = ["BY_NAME", "FIELDS", "TABLES", "Field"]

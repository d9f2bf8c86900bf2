"""Every field of a manifest, once: what it means, what is allowed, where its default comes from.

This table drives validation and the commented template. What must hold between fields is in across.py.
"""

from __future__ import annotations

from swarmnode.manifest.check import Field
from swarmnode.manifest.service_field import SERVICE_FIELDS
from swarmnode.manifest.training_field import TRAINING_FIELDS

TABLES = {
    "model": "The model: a LLaMA-style decoder. Defaults: 1.0 M parameters, which two CPU cores train in minutes.",
    "pipeline": "How microbatches travel through the stages.",
    "data": "What text is read, and how it becomes tokens.",
    "inner": "Inner steps: the optimizer of one replica, on its own accumulated gradient.",
    "gossip": "Rounds: how the replicas of a stage meet (NoLoCo, arXiv 2506.10911).",
    "checkpoint": "Where and how often the whole run is saved, so that it can be stopped and go on.",
    "limits": "Bounds that every node keeps.",
    "recovery": "How a stage comes back when all its replicas died.",
    "access": "Who may take part (docs/security.md).",
}

FIELDS: tuple[Field, ...] = (*TRAINING_FIELDS, *SERVICE_FIELDS)
BY_NAME = {field.name: field for field in FIELDS}

__all__ = ["BY_NAME", "FIELDS", "TABLES", "Field"]

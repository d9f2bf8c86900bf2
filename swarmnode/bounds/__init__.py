"""Bounds for all incoming numbers, texts and lists: a table (table.py), and the check made from it."""

from __future__ import annotations

from google.protobuf.message import Message

from swarmnode.bounds.bound import Bound, Bounds
from swarmnode.bounds.table import FIELDS, QUEUE_MAX, SAMPLES_MAX, SPEED_MAX, STAGES_MAX, STRIDE_MAX

_BOUNDS = Bounds(FIELDS)


def check(message: Message) -> None:
    """Raises RemoteFault unless every set field of `message` is within its range in the table."""
    _BOUNDS.check(message)


__all__ = ["FIELDS", "QUEUE_MAX", "SAMPLES_MAX", "SPEED_MAX", "STAGES_MAX", "STRIDE_MAX", "Bound", "Bounds", "check"]

"""Bounds for all incoming numbers, texts and lists: a table (table.py), the check made from it, and the one place where
bytes of others become messages."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from swarmnode.base.bounds.bound import Bound, Bounds
from swarmnode.base.bounds.table import FIELDS, QUEUE_MAX, SAMPLES_MAX, SPEED_MAX, STAGES_MAX, STRIDE_MAX
from swarmnode.base.errors import RemoteFault

M = TypeVar("M", bound=Message)

_BOUNDS = Bounds(FIELDS)


check = _BOUNDS.check
"""Raises RemoteFault unless every set field of a message is within its range in the table."""


def parse(kind: type[M], raw: bytes, what: str) -> M:
    """The message of `kind` in `raw`, with the fields that this version knows and no others, at every depth: so what is
    checked is all that is kept and passed on. Ranges are not checked. Raises RemoteFault, which begins with `what`."""
    message = kind()
    try:
        message.ParseFromString(raw)
    except DecodeError:
        raise RemoteFault(f"{what} that does not parse") from None
    message.DiscardUnknownFields()
    return message


def opened(kind: type[M], raw: bytes, what: str) -> M:
    """`parse`, and every field within its range. Raises RemoteFault."""
    message = parse(kind, raw, what)
    check(message)
    return message


__all__ = [
    "FIELDS",
    "QUEUE_MAX",
    "SAMPLES_MAX",
    "SPEED_MAX",
    "STAGES_MAX",
    "STRIDE_MAX",
    "Bound",
    "Bounds",
    "check",
    "opened",
    "parse",
]

"""The parts that a machine's user lets a node take in a run."""

from __future__ import annotations

from enum import StrEnum


class NodeRole(StrEnum):
    """The part of a node in a run; its user decides."""

    ANY = "any"
    """It serves a stage; at the first one it feeds as well, once it has the run's text."""
    FEEDER = "feeder"
    """It only feeds: it reads text, starts microbatches and reports losses, without a stage."""
    REPLICA = "replica"
    """It only serves stages, and neither reads nor fetches text."""

"""The places of a run: its stages, and one after the last for nodes that only feed.

A record names its node's place where a stage would stand. A feeder's place is no stage of the manifest, so every check
of a stage refuses it, and it counts nowhere as a replica.
"""

from __future__ import annotations

from swarmnode.manifest import Manifest


def feeder_place(manifest: Manifest) -> int:
    """The place of nodes that only feed: the run's number of stages."""
    return manifest.pipeline.stages


def places(manifest: Manifest) -> range:
    """All places of the run, the feeders' last."""
    return range(manifest.pipeline.stages + 1)


def feeds_at(manifest: Manifest, place: int) -> bool:
    """Whether nodes at `place` may feed: at the first stage, or without one."""
    return place in (0, feeder_place(manifest))

"""Resources shared by nodes on this machine."""

from __future__ import annotations

import os

from swarmnode.machine.compute import ThreadCompute
from swarmnode.pipeline.microbatch_size import Host


def host_of(device: str, compute: ThreadCompute) -> Host:
    """The host of this node. If processors do the arithmetic, as many nodes as processors compute at once, one thread
    each; nodes that rest part of the time leave room for others."""
    if not device.startswith("cpu"):
        return Host()
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Host(lambda: processors / compute.load)

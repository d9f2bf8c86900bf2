"""What this machine's nodes share."""

from __future__ import annotations

import os

from swarmnode.node.compute import ThreadCompute
from swarmnode.pipeline.microbatch import Host


def host_of(device: str, compute: ThreadCompute) -> Host:
    """Where processors do the arithmetic, as many nodes as there are compute at the same time, one thread each; nodes
    that rest part of the time leave room for others."""
    if not device.startswith("cpu"):
        return Host()
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Host(lambda: processors / compute.load)

"""Memory that a replica may take on this machine: the least of what the device, the system, the container and the user
leave."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # cgroup v1 says "no limit" by a number near 2^63


@dataclass(frozen=True, slots=True)
class Free:
    """`nbytes` can be had; `bound` says what leaves no more."""

    nbytes: int
    bound: str


def free_memory(device: str, max_memory_nbytes: int | None = None) -> Free:
    """What `device` has free, or where that shares the machine's memory the least of: what the system has available,
    the address space this process may have, what its control groups leave, and `max_memory_nbytes` (the volunteer's
    --max-memory, for the whole process) less what it holds already."""
    from swarmnode.model.device import free_nbytes

    if (there := free_nbytes(device)) is not None:
        return Free(there, f"device {device}")
    process = psutil.Process().memory_info()
    found = [Free(int(psutil.virtual_memory().available), "what this machine has available")]
    if max_memory_nbytes is not None:
        found.append(Free(max(0, max_memory_nbytes - process.rss), "--max-memory"))
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY:
        found.append(Free(max(0, allowed - process.vms), "ulimit -v"))
    found += [Free(nbytes, f"the memory limit of {where}") for where, nbytes in of_groups(CGROUPS, own_group())]
    return min(found, key=lambda one: one.nbytes)


def own_group() -> str:
    """This process's control group by /proc/self/cgroup: of version 2, or of version 1's memory controller; "" when
    there is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    rows = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return next((row[2] for row in rows if row[1] == "" or "memory" in row[1].split(",")), "")


def of_groups(root: Path, group: str) -> Iterator[tuple[str, int]]:
    """(group, bytes left) of `group` and all above it that have a limit. Page cache that can be dropped counts as
    left."""
    parts = [part for part in group.split("/") if part]
    for depth in range(len(parts), -1, -1):
        for limit, usage, base in (
            ("memory.max", "memory.current", root),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", root / "memory"),
        ):
            place = base.joinpath(*parts[:depth])
            most, used = _number(place / limit), _number(place / usage)
            if most is not None and used is not None and most < UNLIMITED:
                yield str(place), max(0, most - used + _droppable(place / "memory.stat"))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return None


def _droppable(path: Path) -> int:
    try:
        rows = dict(line.split() for line in path.read_text().splitlines())
        return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0

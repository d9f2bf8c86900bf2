"""The stages of a run that this machine can serve, by its memory, and whether it may read the text. Pure."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from swarmnode.model.memory_budget import (
    CPU,
    ComputeMode,
    MemoryNeed,
    Passes,
    memory_need,
    need_together,
    passes_in,
    repeated_forwards,
)
from swarmnode.model.section import OPTIMIZER_STATES as STATES
from swarmnode.model.split import StageLayers, stages_of
from swarmnode.run.manifest import Manifest, ModelSpec
from swarmnode.train.pipeline.span import within

# Memory available to a replica on this machine, on its device and on the host: the least of what the device, the
# system, the container and the user allow.

CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # cgroup v1 expresses "no limit" by a number near 2^63


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """`nbytes` are available; `bound` names the limiting factor."""

    nbytes: int
    bound: str


@dataclass(frozen=True, slots=True)
class Shortage:
    """The memory that a replica lacks: `needed` bytes, `free` ones, and what limits those."""

    needed: int
    free: FreeMemory

    def __str__(self) -> str:
        return (
            f"needs {gigabytes(self.needed)} of memory ({self.needed} bytes), and {gigabytes(self.free.nbytes)}"
            f" ({self.free.nbytes} bytes) are free by {self.free.bound}"
        )


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Free memory of the host, and of the device where that has its own."""

    host: FreeMemory
    device: FreeMemory | None = None

    def shortage(self, need: MemoryNeed) -> Shortage | None:
        """The memory that `need` exceeds, the device's first; None if it fits."""
        if self.device is not None and need.device > self.device.nbytes:
            return Shortage(need.device, self.device)
        return Shortage(need.host, self.host) if need.host > self.host.nbytes else None


def gigabytes(nbytes: int) -> str:
    """`12.3 GB`."""
    return f"{nbytes / 1e9:,.1f} GB"


def machine_memory(device: str, max_memory_nbytes: int | None = None) -> MachineMemory:
    """Free memory for a replica on `device`."""
    from swarmnode.model.device import free_nbytes

    there = free_nbytes(device)
    card = None if there is None else FreeMemory(there, f"device {device}")
    return MachineMemory(free_memory(max_memory_nbytes), card)


def free_memory(max_memory_nbytes: int | None = None) -> FreeMemory:
    """Free memory of the host: the least of the system's available memory, this process's address space limit, its
    control groups' limits, and `max_memory_nbytes` (the volunteer's --max-memory, for the whole process) minus its
    current use."""
    process = psutil.Process().memory_info()
    limits = [FreeMemory(int(psutil.virtual_memory().available), "the memory available on this machine")]
    if max_memory_nbytes is not None:
        limits.append(FreeMemory(max(0, max_memory_nbytes - process.rss), "--max-memory"))
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY:
        limits.append(FreeMemory(max(0, allowed - process.vms), "ulimit -v"))
    limits += [FreeMemory(nbytes, f"the memory limit of {where}") for where, nbytes in of_groups(CGROUPS, own_group())]
    return min(limits, key=lambda one: one.nbytes)


def own_group() -> str:
    """This process's control group by /proc/self/cgroup: of version 2, or of version 1's memory controller; "" if there
    is none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    rows = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return next((row[2] for row in rows if row[1] == "" or "memory" in row[1].split(",")), "")


def of_groups(root: Path, group: str) -> Iterator[tuple[str, int]]:
    """(group, bytes left) of `group` and its ancestors that have a limit. Droppable page cache counts as free."""
    parts = [part for part in group.split("/") if part]
    for depth in range(len(parts), -1, -1):
        for limit, usage, base in (
            ("memory.max", "memory.current", root),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", root / "memory"),
        ):
            place = base.joinpath(*parts[:depth])
            most = _number(place / limit)
            used = _number(place / usage)
            if most is not None and used is not None and most < UNLIMITED:
                yield str(place), max(0, most - used + _droppable(place / "memory.stat"))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" means no limit
        return None


def _droppable(path: Path) -> int:
    try:
        rows = dict(line.split() for line in path.read_text().splitlines())
        return int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True, slots=True)
class StageFit:
    """`unable`: stages for which this machine has too little memory. `needed`: bytes for a replica of each stage,
    compared with `memory`, if it computes microbatches in its `passes`. `repeated`: forwards that a backward of each
    stage then does again. `no_files`: the run's text is in files, and this machine opens none. `mode`: the way of
    computing of `needed`."""

    unable: frozenset[int]
    needed: tuple[MemoryNeed, ...]
    memory: MachineMemory
    no_files: bool
    mode: ComputeMode
    passes: tuple[Passes, ...] = ()
    repeated: tuple[int, ...] = ()

    def holds(self, block: range) -> bool:
        """Whether the machine's memory holds all stages of `block` at once, as each is served alone."""
        if not within(block, self.unable):
            return False
        return self.memory.shortage(need_together([self.needed[stage] for stage in block])) is None


def stage_fit(manifest: Manifest, memory: MachineMemory, *, has_data: bool, mode: ComputeMode = CPU) -> StageFit:
    """The stages that fit into `memory`, by formula (model/memory_budget.py); `has_data`: the user has named a folder
    of files."""
    parts = stages_of(manifest)
    free = None if memory.device is None else memory.device.nbytes
    first = first_alike(manifest.model, parts)
    each_of = {stage: passes_in(manifest, parts[stage], mode, free) for stage in dict.fromkeys(first)}
    need_of = {stage: memory_need(manifest, parts[stage], mode, each) for stage, each in each_of.items()}
    passes = tuple(each_of[stage] for stage in first)
    needed = tuple(need_of[stage] for stage in first)
    samples = manifest.inner.microbatch
    again = tuple(repeated_forwards(one, samples, last=part.has_head) for part, one in zip(parts, passes, strict=True))
    unable = {stage for stage, need in enumerate(needed) if memory.shortage(need) is not None}
    return StageFit(frozenset(unable), needed, memory, manifest.data.names_files and not has_data, mode, passes, again)


def first_alike(model: ModelSpec, parts: Sequence[StageLayers]) -> list[int]:
    """For each stage the first one that needs as much memory: it has as many layers of each kind at the same places
    and the same ends, and so has the stage after it, whose state it may keep."""
    if model.architecture != "decoder":
        return [part.stage for part in parts]
    kinds = [
        (tuple((model.is_sparse(i), model.window(i)) for i in part.layers), part.has_embedding, part.has_head)
        for part in parts
    ]
    firsts: dict[object, int] = {}
    return [firsts.setdefault((kinds[i], kinds[(i + 1) % len(kinds)]), i) for i in range(len(kinds))]


def best_fit(
    manifest: Manifest,
    memory: MachineMemory,
    *,
    has_data: bool,
    mode: ComputeMode = CPU,
    states: Sequence[str] = STATES,
    stage: int | None = None,
) -> StageFit:
    """The fit with the first of the optimizer `states` with which most stages fit, or `stage` does; of several the one
    with the fewest forwards done again."""
    wanted = range(manifest.pipeline.stages) if stage is None else (stage,)
    fits = [
        stage_fit(manifest, memory, has_data=has_data, mode=replace(mode, optimizer_state=state))
        for state in (states if mode.separate else states[:1])
    ]

    def lacks(fit: StageFit) -> tuple[int, int]:
        return sum(one in fit.unable for one in wanted), sum(fit.repeated[one] for one in wanted)

    return min(fits, key=lacks)


def states_of(optimizer_state: str) -> Sequence[str]:
    """The values of `--optimizer-state` to try, in order."""
    return STATES if optimizer_state == "auto" else (optimizer_state,)

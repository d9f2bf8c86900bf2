"""The stages of a run that this machine can serve, by its memory, and whether it may read the text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarmnode.machine.free_memory import MachineMemory
from swarmnode.manifest import Manifest
from swarmnode.model.memory_budget import CPU, ComputeMode, MemoryNeed, memory_need
from swarmnode.model.section import OPTIMIZER_STATES as STATES
from swarmnode.model.split import split


@dataclass(frozen=True, slots=True)
class StageFit:
    """`unable`: stages for which this machine has too little memory. `needed`: bytes for a replica of each stage,
    compared with `memory`. `no_files`: the run's text is in files, and this machine opens none. `mode`: the way of
    computing of `needed`."""

    unable: frozenset[int]
    needed: tuple[MemoryNeed, ...]
    memory: MachineMemory
    no_files: bool
    mode: ComputeMode


def stage_fit(manifest: Manifest, memory: MachineMemory, *, has_data: bool, mode: ComputeMode = CPU) -> StageFit:
    """The stages that fit into `memory`, by formula (model/memory_budget.py); `has_data`: the user has named a folder
    of files."""
    parts = split(manifest.model, manifest.pipeline.stages)
    needed = tuple(memory_need(manifest, part, mode) for part in parts)
    unable = {stage for stage, need in enumerate(needed) if memory.shortage(need) is not None}
    return StageFit(frozenset(unable), needed, memory, manifest.data.names_files and not has_data, mode)


def best_fit(
    manifest: Manifest,
    memory: MachineMemory,
    *,
    has_data: bool,
    mode: ComputeMode = CPU,
    states: Sequence[str] = STATES,
    stage: int | None = None,
) -> StageFit:
    """The fit with the first of the optimizer `states` with which most stages fit, or `stage` does."""
    wanted = range(manifest.pipeline.stages) if stage is None else (stage,)
    fits = [
        stage_fit(manifest, memory, has_data=has_data, mode=replace(mode, optimizer_state=state))
        for state in (states if mode.separate else states[:1])
    ]
    return min(fits, key=lambda fit: sum(one in fit.unable for one in wanted))


def states_of(optimizer_state: str) -> Sequence[str]:
    """The values of `--optimizer-state` to try, in order."""
    return STATES if optimizer_state == "auto" else (optimizer_state,)

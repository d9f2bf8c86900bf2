"""The stages of a run that this machine can serve, by its memory, and whether it may read the text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarmnode.machine.free_memory import MachineMemory
from swarmnode.manifest import Manifest, ModelSpec
from swarmnode.model.memory_budget import CPU, ComputeMode, MemoryNeed, memory_need, passes_in
from swarmnode.model.memory_estimate import Passes, repeated_forwards
from swarmnode.model.section import OPTIMIZER_STATES as STATES
from swarmnode.model.split import StageLayers, stages_of


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


def stage_fit(manifest: Manifest, memory: MachineMemory, *, has_data: bool, mode: ComputeMode = CPU) -> StageFit:
    """The stages that fit into `memory`, by formula (model/memory_budget.py); `has_data`: the user has named a folder
    of files."""
    parts = stages_of(manifest)
    free = None if memory.device is None else memory.device.nbytes
    first = first_alike(manifest.model, parts)
    each_of = {stage: passes_in(manifest, parts[stage], mode, free) for stage in dict.fromkeys(first)}
    need_of = {stage: memory_need(manifest, parts[stage], mode, each) for stage, each in each_of.items()}
    passes, needed = tuple(each_of[stage] for stage in first), tuple(need_of[stage] for stage in first)
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

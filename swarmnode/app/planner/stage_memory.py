"""The stages that the machines of a fleet can serve, by their memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from swarmnode.app.machine.stage_fit import FreeMemory, MachineMemory, StageFit, best_fit
from swarmnode.app.planner.fleet import MachineKind
from swarmnode.base.ids import stage_name
from swarmnode.model.memory_budget import CARD, CPU, TAPES
from swarmnode.run.manifest import LimitsSpec, Manifest
from swarmnode.train.pipeline.span import block_around

CONTEXT_NBYTES = 700_000_000  # guess: CUDA's context and kernels on a card
SYSTEM_NBYTES = 3_000_000_000  # guess: operating system, Python and PyTorch's libraries on the host of a card
BESIDE_NBYTES = 700_000_000  # as app/machine/checkup.py demands of any machine: a node without a replica, and p2pd
ADVICE = (
    'use more stages, pipeline.memory_weight = 1, a smaller microbatch, pipeline.weight_prediction = "off", or larger '
    "machines"
)


def memory_of(kind: MachineKind) -> MachineMemory:
    """The memory of a machine that a replica may use."""
    whole = int(kind.memory_gb * 1e9)
    if not kind.host_gb:
        return MachineMemory(FreeMemory(max(0, whole - BESIDE_NBYTES), "memory_gb"))
    host = int(kind.host_gb * 1e9)
    card = FreeMemory(max(0, whole - CONTEXT_NBYTES), "memory_gb")
    return MachineMemory(FreeMemory(max(0, host - SYSTEM_NBYTES), "host_gb"), card)


def fit_of(manifest: Manifest, kind: MachineKind) -> StageFit:
    """The stages of the run that a machine of `kind` can serve."""
    # The length of rounds, timeouts and large batches need no memory: one entry for all.
    inner = manifest.inner
    slots = manifest.limits.in_flight_max
    batch = min(inner.inner_batch, inner.microbatch * TAPES)
    same = replace(
        manifest,
        gossip=replace(manifest.gossip, round_samples=1),
        inner=replace(inner, inner_batch=batch, inner_batch_max=0),
        limits=LimitsSpec(in_flight_max=slots, tape_bytes_max=manifest.limits.tape_bytes_max),
    )
    return _fit(same, memory_of(kind), bool(kind.host_gb))


@functools.lru_cache(maxsize=1024)
def blocks_of(manifest: Manifest, kind: MachineKind | None) -> tuple[range, ...]:
    """By stage, the stages that a machine of `kind` serves where it serves that one; none where it cannot. `kind` None:
    a machine with all the memory that there can be."""
    stages = manifest.pipeline.stages
    most = manifest.pipeline.span_max
    if kind is None:
        return tuple(block_around(stage, stages, most, lambda block: True) for stage in range(stages))
    fit = fit_of(manifest, kind)
    return tuple(
        range(0) if stage in fit.unable else block_around(stage, stages, most, fit.holds) for stage in range(stages)
    )


def repeated(manifest: Manifest, kind: MachineKind, stage: int) -> int:
    """Forwards that a machine of `kind` does again in each backward of `stage`, whose graphs its memory does not
    hold."""
    return fit_of(manifest, kind).repeated[stage]


@functools.lru_cache(maxsize=256)
def _fit(manifest: Manifest, memory: MachineMemory, card: bool) -> StageFit:
    return best_fit(manifest, memory, has_data=True, mode=CARD if card else CPU)


def able(manifest: Manifest, fleet: Sequence[MachineKind]) -> tuple[MachineKind, ...]:
    """The kinds of machine that can serve a stage."""
    return tuple(kind for kind in fleet if len(fit_of(manifest, kind).unable) < manifest.pipeline.stages)


def shortages(manifest: Manifest, fleet: Sequence[MachineKind]) -> list[str]:
    """A line for each kind of machine that can serve no stage: the bytes that the smallest stage needs there."""
    said = []
    for kind in fleet:
        fit = fit_of(manifest, kind)
        if len(fit.unable) == len(fit.needed):
            short = [fit.memory.shortage(need) for need in fit.needed]
            least = min((one for one in short if one is not None), key=lambda one: one.needed - one.free.nbytes)
            said.append(f"{kind.count} machines {kind.name!r} can serve no stage: the smallest {least}")
    return said


def tightest(manifest: Manifest, fleet: Sequence[MachineKind]) -> tuple[int, str] | None:
    """(bytes lacking, what to say) of the stage that lacks most on the machine that fits it best; None if each stage
    fits some machine."""
    fits = [fit_of(manifest, kind) for kind in fleet]
    worst: tuple[int, str] | None = None
    for stage in range(manifest.pipeline.stages):
        if all(stage in fit.unable for fit in fits):
            short = [fit.memory.shortage(fit.needed[stage]) for fit in fits]
            least = min((one for one in short if one is not None), key=lambda one: one.needed - one.free.nbytes)
            lacking = least.needed - least.free.nbytes
            if worst is None or lacking > worst[0]:
                worst = lacking, f"{stage_name(stage)} fits no machine of the fleet: it {least}"
    return worst

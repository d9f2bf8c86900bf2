"""The memory of Llama 3's stages by formula: on the cards and hosts that volunteers have, which stages fit.

    swarmnode bench memory

The formula is that of `join`, `doctor` and `plan` (model/memory_budget.py). Tests hold it against the books of a
pretend device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swarmnode.app.planner.fleet import MachineKind
from swarmnode.app.planner.geography import Address
from swarmnode.app.planner.stage_memory import fit_of
from swarmnode.model.memory_budget import MemoryNeed
from swarmnode.model.split import stages_of
from swarmnode.run.manifest import GossipSpec, InnerSpec, Manifest, ModelSpec, PipelineSpec

VOCABULARY = 128_256
CONTEXT = 2048
MODELS = {
    "1B": ModelSpec(layers=16, width=2048, heads=32, kv_heads=8, ffn=8192, context=CONTEXT, vocabulary=VOCABULARY),
    "8B": ModelSpec(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, context=CONTEXT, vocabulary=VOCABULARY),
    "70B": ModelSpec(layers=80, width=8192, heads=64, kv_heads=8, ffn=28672, context=CONTEXT, vocabulary=VOCABULARY),
}
CUTS = (("1B", 2), ("8B", 8), ("8B", 16), ("8B", 32), ("70B", 80))
CARDS_GB = (8.0, 12.0, 16.0, 24.0, 48.0)
HOSTS_GB = (16.0, 32.0)


def llama3(size: str, stages: int, *, boundary: str = "bf16", microbatch: int = 4) -> Manifest:
    """The run of a Llama 3 model in `stages` stages, otherwise as large runs are: no running mean, batches of many
    microbatches, packets of half a byte a parameter between two replicas."""
    rank = 64 if boundary == "subspace" else 0
    return Manifest(
        name=f"llama3-{size.lower()}",
        model=MODELS[size],
        pipeline=PipelineSpec(stages=stages, boundary=boundary, boundary_rank=rank),
        inner=InnerSpec(microbatch=microbatch, inner_batch=1024, average_share=0.0),
        gossip=GossipSpec(group=2, round_samples=4096),
    )


@dataclass(frozen=True, slots=True)
class FitRow:
    """The stages that fit: `served` of `stages` stages on a card of `card_gb` beside a host of `host_gb`, with the
    optimizer's moments kept as `optimizer_state` says; `need` of an inner stage there."""

    size: str
    stages: int
    boundary: str
    microbatch: int
    card_gb: float
    host_gb: float
    served: int
    optimizer_state: str
    parameters: int
    need: MemoryNeed


def fit_rows(boundary: str = "bf16", microbatch: int = 4) -> Iterator[FitRow]:
    """Each model and cut on each card and host."""
    for size, stages in CUTS:
        manifest = llama3(size, stages, boundary=boundary, microbatch=microbatch)
        inner = stages_of(manifest)[min(1, stages // 2)]
        for card_gb in CARDS_GB:
            for host_gb in HOSTS_GB:
                kind = MachineKind("card", 1, 1.0, 1.0, 1.0, Address("eu", 0.0), memory_gb=card_gb, host_gb=host_gb)
                fit = fit_of(manifest, kind)
                yield FitRow(
                    size,
                    stages,
                    boundary,
                    microbatch,
                    card_gb,
                    host_gb,
                    stages - len(fit.unable),
                    fit.mode.optimizer_state,
                    inner.parameters,
                    fit.needed[inner.stage],
                )


def page(boundary: str, microbatch: int) -> str:
    """A table to paste."""
    lines = ["| model | stages | card | host | stages that fit | moments | an inner stage needs | bytes a parameter |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in fit_rows(boundary, microbatch):
        need = f"{row.need.device / 1e9:.1f} + {row.need.host / 1e9:.1f} GB"
        each = f"{row.need.device / row.parameters:.1f} + {row.need.host / row.parameters:.1f}"
        lines.append(
            f"| {row.size} | {row.stages} | {row.card_gb:g} GB | {row.host_gb:g} GB | {row.served} of {row.stages}"
            f" | {row.optimizer_state} | {need} | {each} |"
        )
    return "\n".join(lines)

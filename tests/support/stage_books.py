"""The life of a true stage on the pretend device: the bytes it takes there, beside the formula's.

Prints a table of all of them:

    python -m tests.support.stage_books
"""

import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.micro.memory import llama3
from swarmnode.model import stage as layers_module
from swarmnode.model import stage as stage_module
from swarmnode.model import subspace as subspace_module
from swarmnode.model.memory_budget import CARD, memory_need
from swarmnode.model.stage import StageReplica
from swarmnode.model.stage_input import InputReader, StageInput
from swarmnode.run.manifest import Manifest, boundary_width
from swarmnode.train.gossip.outer import outer
from tests.support.pretend_device import NAME, Books, books


@dataclass(frozen=True, slots=True)
class StageBooks:
    """Bytes on the device: between pieces of work, and at the peak of the life; `formula`: of memory_budget.py."""

    parameters: int
    steady: int
    peak: int
    formula: int
    ledger: Books


def live(monkeypatch: pytest.MonkeyPatch, manifest: Manifest, stage: int, state: str = "8bit") -> StageBooks:
    """Two microbatches, of which the second one's gradient comes after a step, and another step."""
    model = manifest.model
    inner = manifest.inner
    shape = (inner.microbatch, model.context, boundary_width(manifest))
    with books(monkeypatch) as ledger, monkeypatch.context() as patch:
        for module in (layers_module, subspace_module):
            patch.setattr(module, "initial", lambda model, seed, name, shape: torch.empty(shape))
        patch.setattr(InputReader, "read", lambda reader, x, tokens: x)
        patch.setattr(InputReader, "targets", lambda reader, tokens: tokens)
        patch.setattr(stage_module, "encode_boundary", lambda tensor, kind: tensor.detach().to("cpu", torch.bfloat16))
        patch.setattr(stage_module, "decode_boundary", lambda wire, *rest: wire)
        replica = StageReplica(manifest, stage, NAME, autocast=True, optimizer_state=state)
        slow = outer(manifest.gossip, replica.theta.data)
        replica.stash.refresh()
        steady = ledger.device.now
        ids = torch.zeros(shape[:2], dtype=torch.int64)
        x = ids if replica.part.has_embedding else torch.zeros(shape, dtype=torch.bfloat16)
        tokens = ids if manifest.pipeline.boundary == "subspace" else None
        kept: Any = StageInput(x, ids.numel(), tokens)
        if replica.part.has_head:
            replica.loss(kept, ids, inner.microbatch, train=True)  # type: ignore[arg-type]
            replica.step(1)
        else:
            gradient: Any = torch.zeros(shape, dtype=torch.bfloat16)
            _, first = replica.forward(kept, keep=True)
            _, second = replica.forward(kept, keep=True, graph=False)
            replica.backward(first, gradient, inner.microbatch)  # type: ignore[arg-type]
            del first
            replica.step(1)
            replica.backward(second, gradient, inner.microbatch)  # type: ignore[arg-type]
            del second
            replica.step(2)
        found = StageBooks(
            replica.parameters,
            steady,
            ledger.device.peak,
            memory_need(manifest, replica.part, replace(CARD, optimizer_state=state)).device,
            ledger,
        )
        del replica, slow
    return found


STAGES = (("1B", 2), ("8B", 8), ("8B", 16), ("8B", 32), ("70B", 80))


def main() -> None:
    """Print the books of first, inner and last stages."""
    chosen = SimpleNamespace(boundaries=sys.argv[1:] or ["bf16", "subspace"])
    print("model stages stage boundary   params      steady        peak     formula  of peak")
    for boundary in chosen.boundaries:
        for size, stages in STAGES:
            for stage in sorted({0, stages // 2, stages - 1}):
                monkeypatch = pytest.MonkeyPatch()
                found = live(monkeypatch, llama3(size, stages, boundary=boundary), stage)
                print(
                    f"{size:>5} {stages:6} {stage:5} {boundary:8} {found.parameters / 1e9:6.3f} G"
                    f" {found.steady / 1e9:8.2f} GB {found.peak / 1e9:8.2f} GB {found.formula / 1e9:8.2f} GB"
                    f" {found.formula / found.peak:7.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""Cost of coded activations: the stages of one pipeline in one process, on real text, exchange only bytes.

`swarmnode bench boundary` trains the same model from the same seeds with each `pipeline.boundary`. A number after
"subspace" is its rank k (of width 96).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from swarmnode.bench.method.replica_batch import read_text
from swarmnode.ids import digest64
from swarmnode.manifest import InnerSpec, Manifest, ModelSpec, PipelineSpec
from swarmnode.model.stage import StageReplica
from swarmnode.ports import Tape, WireTensor

KINDS = ("fp32", "bf16", "int8", "fp8", "subspace 48", "subspace 24", "subspace 12")
MODEL = ModelSpec(layers=4, width=96, heads=4, kv_heads=2, ffn=256, context=64, vocabulary=256)
STAGES, STEPS, SEEDS = 4, 300, 3
BATCH, HELD_OUT = 8, 256


def manifest(kind: str, seed: int, steps: int) -> Manifest:
    boundary, _, rank = kind.partition(" ")
    pipeline = PipelineSpec(stages=STAGES, boundary=boundary, boundary_rank=int(rank or 0))
    inner = InnerSpec(microbatch=BATCH, inner_batch=BATCH, warmup_samples=20 * BATCH, decay_samples=steps * BATCH)
    return Manifest(seed=seed, model=MODEL, pipeline=pipeline, inner=inner)


class StageChain:
    """The stages in sequence; `nbytes` counts the bytes between them."""

    def __init__(self, run: Manifest) -> None:
        self.stages = [StageReplica(run, stage) for stage in range(STAGES)]
        self.nbytes = 0
        self.samples = 0

    def run_microbatch(self, tokens: WireTensor, *, train: bool) -> float:
        """Nats per token of a microbatch. With `train`, also runs backward and an inner step of every stage."""
        x, tapes = tokens, list[Tape | None]()
        for stage in self.stages[:-1]:
            x, tape = stage.forward(x, keep=train, tokens=tokens)
            self.nbytes += x.nbytes
            tapes.append(tape)
        found = self.stages[-1].loss(x, tokens, tokens.shape[0], train=train)
        gradient = found.gradient
        for stage, tape in zip(reversed(self.stages[:-1]), reversed(tapes), strict=True):
            if gradient is not None and tape is not None:
                self.nbytes += gradient.nbytes
                gradient = stage.backward(tape, gradient, tokens.shape[0])
        if train:
            self.samples += tokens.shape[0]
            for stage in self.stages:
                stage.step(self.samples)
        return found.loss_sum / found.tokens


def measure(kind: str, seed: int, steps: int = STEPS) -> dict[str, float]:
    """Run one training: nats per held-out byte, bytes per token and boundary in both directions, and CPU seconds."""
    line, (train, held) = StageChain(manifest(kind, seed, steps)), read_text()
    draw, began = np.random.Generator(np.random.Philox(key=digest64("boundary", seed))), time.process_time()
    for _ in range(steps):
        line.run_microbatch(_batch(train, draw), train=True)
    spent, sent = time.process_time() - began, line.nbytes / (steps * BATCH * MODEL.context * (STAGES - 1))
    draw = np.random.Generator(np.random.Philox(key=7))
    nats = statistics.fmean(line.run_microbatch(_batch(held, draw), train=False) for _ in range(HELD_OUT // BATCH))
    return {"nats": nats, "bytes": sent, "cpu_s": spent}


def _batch(text: np.ndarray[tuple[int], np.dtype[np.uint8]], draw: np.random.Generator) -> WireTensor:
    length = MODEL.context + 1
    starts = draw.integers(0, len(text) - length, BATCH)
    return WireTensor("u16", (BATCH, length), np.stack([text[s : s + length] for s in starts]).astype("<u2").tobytes())


def run(
    kinds: Sequence[str] = KINDS, seeds: int = SEEDS, steps: int = STEPS, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """{"boundaries": [a row each]}: means over seeds, and the difference from the first kind on the same seeds."""
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {}
    for kind in kinds:
        found[kind] = [measure(kind, seed, steps) for seed in range(seeds)]
        say(f"{kind}: " + ", ".join(f"{row['nats']:.4f}" for row in found[kind]))
    rows = []
    for kind, mine in found.items():
        over = [row["nats"] - base["nats"] for row, base in zip(mine, found[kinds[0]], strict=True)]
        rows.append(
            {
                "boundary": kind,
                "nats": statistics.fmean(row["nats"] for row in mine),
                f"over {kinds[0]}": statistics.fmean(over),
                "spread": statistics.stdev(over) if len(over) > 1 else 0.0,
                "bytes/token and boundary": statistics.fmean(row["bytes"] for row in mine),
                "CPU s": statistics.fmean(row["cpu_s"] for row in mine),
            }
        )
    return {"stages": STAGES, "seeds": seeds, "steps": steps, "boundaries": rows}

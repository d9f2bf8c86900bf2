"""What the model tests share: a tiny manifest, batches of tokens, and microbatches carried along stages by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from swarmnode.manifest import InnerSpec, Manifest, ModelSpec, PipelineSpec
from swarmnode.model.section import section_shapes
from swarmnode.model.stage import StageReplica
from swarmnode.model.tensor import encode
from swarmnode.ports import Tape, WireTensor

TINY = ModelSpec(layers=5, width=32, heads=4, kv_heads=2, ffn=48, context=16, vocabulary=50)


def manifest(
    model: ModelSpec = TINY, stages: int = 3, boundary: str = "fp32", rank: int = 0, **inner: object
) -> Manifest:
    spec = replace(InnerSpec(microbatch=4, inner_batch=8, warmup_samples=8), **inner)  # type: ignore[arg-type]
    pipeline = PipelineSpec(stages=stages, boundary=boundary, boundary_rank=rank)
    return Manifest(seed=7, model=model, pipeline=pipeline, inner=spec)


def stages_of(run: Manifest, dtype: torch.dtype = torch.float32, **options: bool) -> list[StageReplica]:
    return [StageReplica(run, stage, dtype=dtype, **options) for stage in range(run.pipeline.stages)]


def seconds(stage: StageReplica) -> dict[str, Tensor]:
    """Its second moments by parameter."""
    shapes = section_shapes(stage.manifest, stage.part)["exp_avg_sq"]
    pieces = torch.split(stage.exp_avg_sq, [math.prod(shape) for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def token_batch(model: ModelSpec = TINY, samples: int = 4, seed: int = 0) -> Tensor:
    """Token ids [B, T + 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.vocabulary, (samples, model.context + 1), generator=generator)


def token_wire(tokens: Tensor) -> WireTensor:
    return encode(tokens.to(torch.uint16))


def ascend(stages: list[StageReplica], tokens: Tensor) -> tuple[WireTensor, list[Tape]]:
    """Forward through all stages but the last: (what the last one reads, tapes)."""
    x, tapes = token_wire(tokens), []
    for stage in stages[:-1]:
        x, tape = stage.forward(x, keep=True, tokens=token_wire(tokens))
        assert tape is not None
        tapes.append(tape)
    return x, tapes


def train_on(stages: list[StageReplica], tokens: Tensor) -> float:
    """One microbatch all the way down and back. Returns the summed loss."""
    x, tapes = ascend(stages, tokens)
    samples = tokens.shape[0]
    result = stages[-1].loss(x, token_wire(tokens), samples, train=True)
    gradient = result.gradient
    for stage, tape in zip(stages[-2::-1], tapes[::-1], strict=True):
        assert gradient is not None
        gradient = stage.backward(tape, gradient, samples)
    assert gradient is None
    return result.loss_sum

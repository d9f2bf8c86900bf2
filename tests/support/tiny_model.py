"""What the model tests share: a tiny manifest, batches of tokens, and microbatches carried along stages by hand."""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.base.ports import Tape, WireTensor
from swarmnode.model.decoder import Decoder
from swarmnode.model.section import section_shapes
from swarmnode.model.split import initial, parameter_shapes, split
from swarmnode.model.stage import StageReplica
from swarmnode.model.tensor import encode
from swarmnode.run.manifest import InnerSpec, Manifest, ModelSpec, PipelineSpec

TINY = ModelSpec(layers=5, width=32, heads=4, kv_heads=2, ffn=48, context=16, vocabulary=50)


def manifest(
    model: ModelSpec = TINY, stages: int = 3, boundary: str = "fp32", rank: int = 0, **inner: object
) -> Manifest:
    spec = replace(InnerSpec(microbatch=4, inner_batch=8, warmup_samples=8), **inner)  # type: ignore[arg-type]
    pipeline = PipelineSpec(stages=stages, boundary=boundary, boundary_rank=rank)
    return Manifest(seed=7, model=model, pipeline=pipeline, inner=spec)


def stages_of(run: Manifest, dtype: torch.dtype = torch.float32, **options: Any) -> list[StageReplica]:
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


def token_wire(tokens: Tensor | WireTensor) -> WireTensor:
    return tokens if isinstance(tokens, WireTensor) else encode(tokens.to(torch.uint16))


def ascend(stages: list[StageReplica], tokens: Tensor | WireTensor) -> tuple[WireTensor, list[Tape]]:
    """Forward through all stages but the last: (what the last one reads, tapes)."""
    x = token_wire(tokens)
    tapes = []
    for stage in stages[:-1]:
        x, tape = stage.forward(x, keep=True, tokens=token_wire(tokens))
        assert tape is not None
        tapes.append(tape)
    return x, tapes


def train_on(stages: list[StageReplica], tokens: Tensor | WireTensor) -> float:
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


def plain_model(stages: list[StageReplica], dtype: torch.dtype) -> Decoder:
    """One module with all the stages' parameters (copied), trained by autograd alone."""
    run = stages[0].manifest
    net = Decoder(run.model, split(run.model, 1)[0]).to(dtype)
    net.load_state_dict({name: value for stage in stages for name, value in stage.named(stage.theta).items()})
    return net


def mean_loss(net: Decoder, tokens: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


FAMILIES = {
    "llama": TINY,
    "llama3": replace(TINY, rope_scaling="llama3", rope_factor=8.0, rope_original_context=8, rope_theta=100.0),
    "linear": replace(TINY, rope_scaling="linear", rope_factor=4.0),
    "yarn": replace(TINY, rope_scaling="yarn", rope_factor=4.0, rope_original_context=64, rope_high=32.0),
    "tied": replace(TINY, tied=True),
    "smollm3": replace(TINY, tied=True, unrotated_layers=(1, 3)),
    "qwen2": replace(TINY, qkv_bias=True, sliding_window=5, sliding_layers=(2, 4)),
    "qwen3": replace(TINY, qk_norm="head", head_width=12),
    "mistral": replace(TINY, sliding_window=6, head_width=16),
    "olmo2": replace(TINY, qk_norm="whole", norm_placement="post"),
    "olmoe": replace(TINY, qk_norm="whole", experts=6, experts_active=2, expert_ffn=20, router_balance=0.01),
    "qwen3_moe": replace(
        TINY, qk_norm="head", experts=5, experts_active=2, expert_ffn=20, router_normalised=True, dense_layers=(0, 3)
    ),
    "mixtral": replace(TINY, experts=4, experts_active=2, expert_ffn=24, router_normalised=True, router_balance=0.02),
    "qwen2_moe": replace(
        TINY, qkv_bias=True, experts=4, experts_active=2, expert_ffn=24, shared_expert_ffn=16, router_balance=0.001
    ),
    "biases": replace(TINY, qkv_bias=True, output_bias=True),
}
"""TINY with what each family of models has of its own."""


def randomised(model: ModelSpec, seed: int = 7) -> dict[str, Tensor]:
    """Weights of the whole model, with norms and biases that are not all alike."""
    shapes = parameter_shapes(model, split(model, 1)[0])
    chance = torch.Generator().manual_seed(seed)
    found = {name: initial(model, seed, name, shape) for name, shape in shapes.items()}
    for value in found.values():
        if value.dim() == 1:
            value.add_(torch.randn(value.shape, generator=chance), alpha=0.1)
    return found

"""The trained and the frozen parameters of a stage, by training.kind: names, shapes, sizes and initial values.

Everything that keeps, sends or saves weights asks here. With adapters, a target matrix W [out, in] of each layer gets

    y = W x + s B A x        s = alpha / rank        (LoRA, arXiv 2106.09685, section 4.1)

    NAME.lora_A  [rank, in]   drawn from the seed, uniform's deviation 1 / sqrt(3 in) as peft has it
    NAME.lora_B  [out, rank]  zero: the model begins as its base

W and all other parameters are frozen. The flat buffers theta and grad, moments, rounds, snapshots, backups and
checkpoints hold adapters alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.model.architecture import Shapes
from swarmnode.model.split import StageLayers, initial, parameter_shapes
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.spec import ADAPTERS

WEIGHT = ".weight"
LORA_A = ".lora_A"
LORA_B = ".lora_B"
ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
NF4_BLOCK = 64  # QLoRA, arXiv 2305.14314, section 3


def has_adapters(manifest: Manifest) -> bool:
    """Whether only adapters are trained."""
    return manifest.training.kind == ADAPTERS


def scale(manifest: Manifest) -> float:
    """s: the factor of B A."""
    return manifest.training.alpha / manifest.training.rank


def is_target(manifest: Manifest, name: str, shape: tuple[int, ...]) -> bool:
    """Whether the parameter `name` of the model has an adapter."""
    if not has_adapters(manifest) or len(shape) != 2 or ".layers." not in name or not name.endswith(WEIGHT):
        return False
    if ".experts." in name:  # each has few tokens; transformers stacks them, and peft then finds none
        return False
    return name.removesuffix(WEIGHT).rpartition(".")[2] in manifest.training.targets


def trained_shapes(manifest: Manifest, part: StageLayers) -> Shapes:
    """Names and shapes of the parameters of `part` that the run trains, in the order of the flat buffer."""
    every = parameter_shapes(manifest.model, part)
    if not has_adapters(manifest):
        return every
    rank = manifest.training.rank
    matrices: Shapes = {}
    for name, shape in every.items():
        if is_target(manifest, name, shape):
            out, width = shape
            stem = name.removesuffix(WEIGHT)
            matrices[stem + LORA_A] = (rank, width)
            matrices[stem + LORA_B] = (out, rank)
    return matrices


def frozen_shapes(manifest: Manifest, part: StageLayers) -> Shapes:
    """Names and shapes of the parameters of `part` that stay as the base has them."""
    return parameter_shapes(manifest.model, part) if has_adapters(manifest) else {}


def trained_count(manifest: Manifest, part: StageLayers) -> int:
    """Elements of theta."""
    return sum(map(math.prod, trained_shapes(manifest, part).values())) if has_adapters(manifest) else part.parameters


def frozen_nbytes(manifest: Manifest, part: StageLayers) -> int:
    """Bytes of the frozen parameters of `part` in memory, in training.base_format."""
    return sum(_nbytes(manifest, name, shape) for name, shape in frozen_shapes(manifest, part).items())


def frozen_format(manifest: Manifest, name: str, shape: tuple[int, ...]) -> str:
    """The number format of the frozen parameter `name`: vectors and routers are fp32, int8 and nf4 are for matrices of
    layers, and nf4 for those whose rows are whole blocks."""
    wanted = manifest.training.base_format
    if len(shape) < 2 or wanted == "fp32" or name.endswith(ROUTERS):
        return "fp32"
    return wanted if ".layers." in name and (wanted != "nf4" or shape[-1] % NF4_BLOCK == 0) else "bf16"


def _nbytes(manifest: Manifest, name: str, shape: tuple[int, ...]) -> int:
    count = math.prod(shape)
    match frozen_format(manifest, name, shape):
        case "fp32":
            return 4 * count
        case "int8":
            return count + 4 * shape[0]
        case "nf4":
            return count // 2 + 2 * (count // NF4_BLOCK)
        case _:
            return 2 * count


def initial_adapter(manifest: Manifest, name: str, shape: tuple[int, ...]) -> Tensor:
    """The initial float32 value of the adapter parameter `name`. It depends only on (seed, name, shape) and the model's
    width, and is equal on every machine."""
    if not name.endswith(LORA_A):
        return torch.zeros(shape)
    drawn = initial(manifest.model, manifest.seed, name, shape)
    return drawn.mul_(math.sqrt(5 * manifest.model.width / (6 * shape[1])))  # from deviation sqrt(2 / 5 D)


@dataclass(frozen=True, slots=True)
class AdapterGraph:
    """The change by adapters in the memory of a forward: `width` more numbers of each token, and only `parameters` are
    cast."""

    width: int
    parameters: int


def adapter_graph(manifest: Manifest, part: StageLayers) -> AdapterGraph | None:
    """None if all weights are trained. Each adapter keeps A x."""
    if not has_adapters(manifest):
        return None
    shapes = trained_shapes(manifest, part)
    width = sum(shape[1] for name, shape in shapes.items() if name.endswith(LORA_B))
    return AdapterGraph(width, sum(map(math.prod, shapes.values())))

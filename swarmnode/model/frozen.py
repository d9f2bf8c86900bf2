"""Frozen weights in few bytes, and the layers that hold them: a model's modules with adapters in place of gradients.

    fp32, bf16   as they are
    int8         W = q s, s = max|row| / 127 for each row                               (arXiv 2208.07339, section 2)
    nf4          W = c[q] a, a = max|block| for each 64 of a row, two codes c[q] a byte        (arXiv 2305.14314, eq. 4)

Coding is exact arithmetic and rounding, the same on every machine: replicas of a stage have equal bases, to the bit.
The dense matrix is made for each product and dropped, in backward as in forward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnode.model.adapter import (
    LORA_A,
    LORA_B,
    NF4_BLOCK,
    WEIGHT,
    frozen_format,
    frozen_shapes,
    has_adapters,
    is_target,
    scale,
)
from swarmnode.model.split import StageLayers, initial, parameter_shapes, split
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.location import hub_model

NF4_CODES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 values of a normal float: quantiles of the bell (QLoRA, arXiv 2305.14314, appendix E)."""

SCALE_LEAST = 2.0**-100  # of a row or block of zeros

BaseWeights = Callable[[str, tuple[int, ...]], Tensor]
"""The base's parameter of a name and shape, float32 on the CPU."""


class FrozenWeight(nn.Module):
    """A frozen matrix [out, in] in one of the formats; `dense` restores it."""

    codes: Tensor
    scales: Tensor | None

    def __init__(self, shape: tuple[int, ...], kind: str, device: torch.device, dtype: torch.dtype) -> None:
        """Zeros. `dtype` is that of fp32, float64 in tests."""
        super().__init__()
        self.kind = kind
        self.shape = shape
        scales: Tensor | None = None
        match kind:
            case "fp32" | "bf16":
                codes = torch.zeros(shape, dtype=dtype if kind == "fp32" else torch.bfloat16, device=device)
            case "int8":
                codes = torch.zeros(shape, dtype=torch.int8, device=device)
                scales = torch.zeros(shape[0], 1, device=device)
            case "nf4":
                codes = torch.zeros(shape[0], shape[1] // 2, dtype=torch.uint8, device=device)
                scales = torch.zeros(shape[0], shape[1] // NF4_BLOCK, dtype=torch.bfloat16, device=device)
            case _:
                raise AssertionError(f"format {kind}")
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self._given: tuple[Tensor, dict[int, int]] | None = None  # a coded matrix that is not whole yet, and its pieces

    @staticmethod
    def of(weight: Tensor, kind: str) -> FrozenWeight:
        """The float32 `weight` on the CPU in the format `kind`."""
        frozen = FrozenWeight(tuple(weight.shape), kind, weight.device, torch.float32)
        frozen.place(0, weight.reshape(-1))
        return frozen

    @torch.no_grad()
    def place(self, first: int, values: Tensor) -> None:
        """Write `values` [n], on the CPU, from element `first` on. A coded matrix is coded once all of it was given."""
        if self.scales is None:
            self.codes.view(-1)[first : first + values.numel()].copy_(values)
            return
        weight, pieces = self._given or (torch.zeros(self.shape), {})
        weight.view(-1)[first : first + values.numel()].copy_(values)
        pieces[first] = values.numel()
        self._given = weight, pieces
        if sum(pieces.values()) < weight.numel():
            return
        self._given = None
        codes, scales = _int8(weight) if self.kind == "int8" else _nf4(weight)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix [out, in] in `dtype`; for `fp32` and `bf16` in that format already, shared memory."""
        codes = self.codes
        scales = self.scales
        if scales is None:
            return codes.to(dtype)
        if self.kind == "int8":
            return (codes.float() * scales).to(dtype)
        table = torch.tensor(NF4_CODES, device=codes.device)
        pairs = torch.stack((codes >> 4, codes & 15), -1)  # (out, in / 2, 2)
        values = table[pairs.int()].view(*scales.shape, NF4_BLOCK) * scales.float().unsqueeze(-1)
        return values.view(self.shape).to(dtype)

    def times(self, x: Tensor) -> Tensor:
        """x W^T, differentiable in x: [..., in] -> [..., out]."""
        return cast(Tensor, _Product.apply(x, self))  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes int8 [out, in], steps float32 [out, 1])."""
    steps = (weight.abs().amax(1, keepdim=True) / 127.0).clamp_(min=SCALE_LEAST)
    return (weight / steps).round_().to(torch.int8), steps


def _nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes uint8 [out, in / 2], the earlier one in the high bits; scales bfloat16 [out, in / 64])."""
    blocks = weight.view(weight.shape[0], -1, NF4_BLOCK)
    scales = blocks.abs().amax(2).clamp_(min=SCALE_LEAST).to(torch.bfloat16)
    codes = torch.tensor(NF4_CODES)
    nearest = torch.bucketize(blocks / scales.float().unsqueeze(2), (codes[1:] + codes[:-1]) / 2)
    pairs = nearest.to(torch.uint8).view(weight.shape[0], -1, 2)
    return (pairs[..., 0] << 4) | pairs[..., 1], scales


class _Product(torch.autograd.Function):
    """x W^T for a frozen W, of which only the coded form is kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: FrozenWeight) -> Tensor:
        ctx.weight = weight
        ctx.dtype = x.dtype
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        return F.linear(x, weight.dense(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (g,) = gradients
        return (g @ ctx.weight.dense(g.dtype)).to(ctx.dtype), None


class FrozenLinear(nn.Module):
    """y = W x (+ b), with W frozen."""

    bias: Tensor | None

    def __init__(self, base: FrozenWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("bias", bias, persistent=False)

    @property
    def weight(self) -> Tensor:
        """W [out, in], in its own format if that is one of floats."""
        held = self.base.codes
        return held if self.base.scales is None else self.base.dense(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base.times(x)
        return y if self.bias is None else y + self.bias


class AdaptedLinear(FrozenLinear):
    """y = W x + s B A x (+ b)."""

    lora_A: Tensor
    lora_B: Tensor

    def __init__(self, base: FrozenWeight, bias: Tensor | None, factor: float) -> None:
        super().__init__(base, bias)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.base.times(x) + self.factor * F.linear(F.linear(x, self.lora_A), self.lora_B)
        return y if self.bias is None else y + self.bias


class FrozenEmbedding(nn.Module):
    """Rows of a frozen token table, in `dtype`."""

    def __init__(self, base: FrozenWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.dtype = dtype

    @property
    def weight(self) -> Tensor:
        """The table [V, D], also the head of a tied model."""
        return self.base.codes

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.base.codes).to(self.dtype)


class FrozenParameters:
    """The frozen parameters of a stage by name, at their places in its `module`: the layers of `part`, given on the
    meta device, in which the adapters `trained` get their places, too. Zeros until they are written."""

    def __init__(
        self,
        module: nn.Module,
        manifest: Manifest,
        part: StageLayers,
        device: torch.device,
        dtype: torch.dtype,
        trained: Mapping[str, Tensor],
    ) -> None:
        self._held: dict[str, FrozenWeight | nn.Parameter] = {}
        self.shapes = frozen_shapes(manifest, part)
        for name, shape in self.shapes.items():
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            parent, _, child = path.rpartition(".")
            kind = frozen_format(manifest, name, shape)
            if not isinstance(owner, nn.Linear | nn.Embedding) or leaf != "weight":
                value = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)
                setattr(owner, leaf, value)
                self._held[name] = value
                continue
            weight = FrozenWeight(shape, kind, device, dtype)
            made: nn.Module = FrozenLinear(weight, None)
            if isinstance(owner, nn.Embedding):
                made = FrozenEmbedding(weight, dtype)
            elif is_target(manifest, name, shape):
                made = AdaptedLinear(weight, None, scale(manifest))
            setattr(module.get_submodule(parent), child, made)
            self._held[name] = weight
        for name, view in trained.items():
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, nn.Parameter(view))

    @torch.no_grad()
    def place(self, name: str, first: int, values: Tensor) -> None:
        """Write `values` [n], on the CPU, into the parameter `name` from its element `first` on."""
        held = self._held[name]
        if isinstance(held, FrozenWeight):
            held.place(first, values)
        else:
            held.view(-1)[first : first + values.numel()].copy_(values)

    def fill(self, base: BaseWeights) -> None:
        """Write the weights of `base`, one parameter after the other."""
        for name, shape in self.shapes.items():
            self.place(name, 0, base(name, shape).reshape(-1))


# The names that peft gives them.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."


def whole_weights(manifest: Manifest, trained: Mapping[str, Tensor], base: BaseWeights | None) -> dict[str, Tensor]:
    """All parameters of the model, float32 by name, from those that the run trains: with adapters, `base` (None: drawn
    from the seed) as the run holds it, in training.base_format, with their changes added."""
    if not has_adapters(manifest):
        return dict(trained)
    read = base or partial(initial, manifest.model, manifest.seed)
    shapes = parameter_shapes(manifest.model, split(manifest.model, 1)[0])
    weights = {}
    for name, shape in shapes.items():
        weight = held(manifest, name, read(name, shape))
        weights[name] = changed(manifest, name, weight, trained) if is_target(manifest, name, shape) else weight
    return weights


def held(manifest: Manifest, name: str, weight: Tensor) -> Tensor:
    """`weight` as nodes hold it while they train adapters: rounded to training.base_format."""
    kind = frozen_format(manifest, name, tuple(weight.shape))
    return FrozenWeight.of(weight, kind).dense(torch.float32)


def changed(manifest: Manifest, name: str, weight: Tensor, adapters: Mapping[str, Tensor]) -> Tensor:
    """The target `weight` [out, in] with its adapter's change added."""
    stem = name.removesuffix(WEIGHT)
    return weight + scale(manifest) * (adapters[stem + LORA_B].float() @ adapters[stem + LORA_A].float())


def peft_tensors(trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters by the names that peft gives them."""
    return {f"{PEFT_PREFIX}{name}.weight": tensor.contiguous() for name, tensor in trained.items()}


def published_base(manifest: Manifest) -> tuple[str, str]:
    """(name, revision) of the run's base model on the Hugging Face hub; empty where it is not known to lie there."""
    return next(filter(None, map(hub_model, manifest.base.locations)), ("", ""))


def peft_config(manifest: Manifest) -> bytes:
    """peft's adapter_config.json. It names the model that the adapters belong to where that lies on the hub, as peft's
    `AutoPeftModelForCausalLM` needs it."""
    spec = manifest.training
    base_model, revision = published_base(manifest)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "revision": revision or None,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(spec.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }
    return (json.dumps(config, indent=2) + "\n").encode()

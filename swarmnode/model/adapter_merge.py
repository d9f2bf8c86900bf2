"""Whole models of frozen weights and adapters: merged for transformers, or the adapters alone for peft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swarmnode.manifest import Manifest
from swarmnode.model.adapter import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    WEIGHT,
    frozen_format,
    has_adapters,
    is_target,
    scale,
)
from swarmnode.model.frozen import BaseWeights, FrozenWeight
from swarmnode.model.split import initial, parameter_shapes, split

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"  # peft's names
PEFT_PREFIX = "base_model.model."


def whole_weights(manifest: Manifest, trained: Mapping[str, Tensor], base: BaseWeights | None) -> dict[str, Tensor]:
    """All parameters of the model, float32 by name, from those that the run trains: with adapters, `base` (None: drawn
    from the seed) as the run holds it, in training.base_format, with their changes added."""
    if not has_adapters(manifest):
        return dict(trained)
    read = base or partial(initial, manifest.model, manifest.seed)
    shapes = parameter_shapes(manifest.model, split(manifest.model, 1)[0])
    found = {}
    for name, shape in shapes.items():
        weight = held(manifest, name, read(name, shape))
        found[name] = changed(manifest, name, weight, trained) if is_target(manifest, name, shape) else weight
    return found


def held(manifest: Manifest, name: str, weight: Tensor) -> Tensor:
    """`weight` as nodes hold it while they train adapters: rounded to training.base_format."""
    kind = frozen_format(manifest, name, tuple(weight.shape))
    return FrozenWeight.of(weight, kind).dense(torch.float32)


def changed(manifest: Manifest, name: str, weight: Tensor, adapters: Mapping[str, Tensor]) -> Tensor:
    """The target `weight` [out, in] with its adapter's change added."""
    stem = name.removesuffix(WEIGHT)
    found = weight + scale(manifest) * (adapters[stem + LORA_B].float() @ adapters[stem + LORA_A].float())
    if stem + MAGNITUDE in adapters:
        found = found * (lengths(weight, adapters[stem + MAGNITUDE]) / _norms(found)).unsqueeze(1)
    return found


def lengths(weight: Tensor, magnitude: Tensor) -> Tensor:
    """The lengths m of rows [out] that a magnitude stands for."""
    return _norms(weight) + magnitude.float()


def _norms(weight: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64).float()
    return norms


def peft_tensors(manifest: Manifest, trained: Mapping[str, Tensor], base: BaseWeights | None) -> dict[str, Tensor]:
    """The adapters by the names that peft gives them."""
    read = base or partial(initial, manifest.model, manifest.seed)
    shapes = parameter_shapes(manifest.model, split(manifest.model, 1)[0])
    found = {}
    for name, tensor in trained.items():
        stem, _, kind = name.rpartition(".")
        match "." + kind:
            case ".magnitude":
                weight = held(manifest, stem + WEIGHT, read(stem + WEIGHT, shapes[stem + WEIGHT]))
                found[f"{PEFT_PREFIX}{stem}.lora_magnitude_vector"] = lengths(weight, tensor)
            case _:
                found[f"{PEFT_PREFIX}{name}.weight"] = tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


def peft_config(manifest: Manifest, base_model: str) -> bytes:
    """peft's adapter_config.json; `base_model` names or locates the model that the adapters belong to."""
    spec = manifest.training
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(spec.targets),
        "use_dora": spec.method == "dora",
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }
    return (json.dumps(config, indent=2) + "\n").encode()

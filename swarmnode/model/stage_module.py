"""The layers of a stage as a module over flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from swarmnode.manifest import Manifest
from swarmnode.model.adapter import has_adapters, initial_adapter
from swarmnode.model.decoder import Decoder
from swarmnode.model.frozen import FrozenParameters
from swarmnode.model.initial import initial
from swarmnode.model.split import StageLayers

Draw = Callable[[str, tuple[int, ...]], Tensor]


def drawing(manifest: Manifest) -> Draw | None:
    """The function that draws a trained parameter, by its name and shape; None if a base model has its values."""
    if has_adapters(manifest):
        return partial(initial_adapter, manifest)
    return None if manifest.base.index else partial(initial, manifest.model, manifest.seed)


def stage_module(
    manifest: Manifest, part: StageLayers, device: torch.device, dtype: torch.dtype, trained: Mapping[str, Tensor]
) -> tuple[Decoder, FrozenParameters | None]:
    """(the layers of `part`, with `trained` as its parameters; the frozen ones beside adapters)."""
    with torch.device("meta"):
        module = Decoder(manifest.model, part)
    frozen = None
    if has_adapters(manifest):
        frozen = FrozenParameters(module, manifest, part, device, dtype, trained)
        if not manifest.base.index:
            frozen.fill(partial(initial, manifest.model, manifest.seed))
    else:
        module.load_state_dict(trained, assign=True)
    for name in ("cos", "sin"):
        module.register_buffer(name, module.get_buffer(name).to(device, dtype), persistent=False)
    return module, frozen


def attach_gradients(module: Decoder, gradients: Mapping[str, Tensor], frozen: str | None) -> list[torch.nn.Parameter]:
    """Let the gradients of `module` add up in `gradients`, by parameter name; others, and `frozen`, are not trained.
    Returns those that begin to be trained."""
    begun = []
    for name, parameter in module.named_parameters():
        wanted = name != frozen and name in gradients
        if wanted and not parameter.requires_grad:
            begun.append(parameter)
        parameter.grad = gradients.get(name)
        parameter.requires_grad_(wanted)
    return begun

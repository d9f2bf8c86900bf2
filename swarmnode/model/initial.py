"""Initial values of parameters, bit-identical on every machine."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swarmnode.ids import seeded
from swarmnode.manifest import ModelSpec
from swarmnode.model.split import is_writer

INIT_CHUNK_ELEMENTS = 1 << 22  # 32 MiB of random bytes at a time


def initial(model: ModelSpec, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """The initial float32 value of parameter `name`: ones for norms, zeros for biases; else a bell with standard
    deviation sqrt(2 / 5D) [SmallInit, arXiv 1910.05895], divided by sqrt(2 · layers) for the projections that write
    into the stream [GPT-2]. GPT-2's own 0.02 suits D = 1000: the demo's model (D = 128) after 130 steps has 1.945 nats
    with it, 1.727 with this [measured, whole model, bf16 autocast, the demo corpus].

    It depends only on (seed, name, shape), so any node can initialise its stage alone. The bell is the sum of four
    uniform 16-bit integers (within ±3.46 standard deviations), times one rounded constant. It is bit-identical on every
    machine, unlike torch's own normal_, whose vectorised form differs between processors.
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)
    std = math.sqrt(2 / (5 * model.width))
    if is_writer(name):
        std /= math.sqrt(2 * model.layers)
    scale = std / math.sqrt(4 * (2**32 - 1) / 12)
    value = torch.empty(math.prod(shape))
    chance = seeded("init", seed, name)
    for start in range(0, value.numel(), INIT_CHUNK_ELEMENTS):
        chunk = value[start : start + INIT_CHUNK_ELEMENTS]
        raw = torch.frombuffer(bytearray(chance.randbytes(8 * chunk.numel())), dtype=torch.int16).view(-1, 4)
        chunk.copy_(raw.sum(1, dtype=torch.int32)).add_(2.0).mul_(scale)  # exact up to the product: |sum| < 2^18
    return value.view(shape)

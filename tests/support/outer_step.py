"""Outer steps in float64."""

from typing import ClassVar

import torch

from swarmnode_methods.dense import Dense
from swarmnode_methods.noloco import NoLoCo


class Fp64(Dense):
    """Every bit of float64, so that invariants can be held to 1e-12."""

    name: ClassVar[str] = "fp64"
    dtype = torch.float64
    dtype_name = "f64"
    itemsize = 8


def random(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def momentum(replica: NoLoCo) -> torch.Tensor:
    """Zeros where none is kept, as no step reads it."""
    return replica.momentum if replica.alpha else torch.zeros_like(replica.phi)


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).mean(0)

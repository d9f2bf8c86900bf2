"""Activations between stages in a few numbers a token, and nothing lost: the stream is kept in a frozen subspace.

    X = E[tokens] + Z U^T       E [V, D] the token table, frozen; U [D, k] orthonormal, frozen, the same everywhere
    writers (o_proj, down_proj; W [D, in]) stay in the span of U:  W = U U^T W, so all they add to X does
    there   Z = (X - E[tokens]) U, k numbers a token instead of D; the next stage makes X of it again
    back    dL/dZ = dL/dX U, again k numbers: a writer's gradient is U U^T dL/dW whatever lies outside the span

[Protocol Models, arXiv 2506.01260; there U is moved by Grassmann steps now and then, here it never is.] AdamW divides
each element by a number of its own, which would turn a writer out of the span. So a writer's second moment is shared
along D (optimizer.py): all of a column is divided alike. Weight decay keeps the span. A pipeline that sends Z trains
exactly as one that sends X, up to rounding (1e-10 in float64: tests).

What it costs is freedom: writers of rank k and a table that does not learn. `swarmnode bench boundary` measures that.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from swarmnode.ids import seeded
from swarmnode.manifest import Manifest
from swarmnode.model.llama import initial
from swarmnode.model.split import TABLE, is_writer

DIGEST_BYTES = 8
DIGEST_GRID = 2.0**16  # U is compared to 1.5e-5: coarse beside rounding (1e-15), fine beside its elements (1 / sqrt D)
STRAY_MAX = 0.01  # guess: of a writer's norm, outside the span; rounding leaves 1e-6, another U nearly all


def basis(width: int, rank: int, seed: int) -> Tensor:
    """U, float64 [D, k] on the CPU, orthonormal. Machines may round differently: compare digests before training."""
    assert 1 <= rank <= width, f"rank {rank} of width {width}"
    chance = seeded("subspace", seed, width, rank).randbytes(2 * width * rank)
    raw = torch.frombuffer(bytearray(chance), dtype=torch.int16)
    found: Tensor = torch.linalg.qr(raw.view(width, rank).double() + 0.5)[0]
    return found


class Subspace:
    """U and E of one run."""

    def __init__(self, basis: Tensor, table: Tensor) -> None:
        """`basis` [D, k] and `table` [V, D]; both are used in the table's dtype."""
        self.table = table
        self.basis = basis.to(table.device, table.dtype)

    @staticmethod
    def of(manifest: Manifest, device: torch.device, dtype: torch.dtype) -> Subspace:
        """The one of a run with pipeline.boundary = "subspace", made from its seed."""
        model, seed = manifest.model, manifest.seed
        table = initial(model, seed, TABLE, (model.vocabulary, model.width)).to(device, dtype)
        return Subspace(basis(model.width, manifest.pipeline.boundary_rank, seed), table)

    @functools.cached_property
    def digest(self) -> bytes:
        """The same wherever E is to the bit and U to DIGEST_GRID; hashing E takes a second a gigabyte."""
        grid = (self.basis.double() * DIGEST_GRID).round().to(torch.int32)
        found = hashlib.sha256()
        for one in (grid, self.table):
            found.update(one.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return found.digest()[:DIGEST_BYTES]

    def down(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Z [B, T, k] of activations [B, T, D] over token ids [B, T]; differentiable."""
        return (x - self.table[tokens]) @ self.basis

    def up(self, z: Tensor, tokens: Tensor) -> Tensor:
        """Activations [B, T, D] of Z [B, T, k]; differentiable."""
        return self.table[tokens] + z @ self.basis.T

    def project(self, weight: Tensor) -> Tensor:
        """The part of a writer [D, in], or of its gradient, that lies in the span."""
        return self.basis @ (self.basis.T @ weight)

    @torch.no_grad()
    def project_(self, named: Mapping[str, Tensor]) -> None:
        """Put the writers among `named` (weights, gradients or their means) into the span, in place."""
        for name, weight in named.items():
            if is_writer(name):
                weight.copy_(self.project(weight))

    @torch.no_grad()
    def constrain_(self, named: Mapping[str, Tensor]) -> None:
        """Put the writers among a stage's weights into the span and the frozen table into its place."""
        self.project_(named)
        if TABLE in named:
            named[TABLE].copy_(self.table)

    @torch.no_grad()
    def stray(self, named: Mapping[str, Tensor]) -> str | None:
        """The first of a stage's weights that is not of this run: another table, or a writer out of the span."""
        for name, weight in named.items():
            base = self.table if name == TABLE else self.project(weight) if is_writer(name) else weight
            if float(torch.linalg.vector_norm(weight - base)) > STRAY_MAX * float(torch.linalg.vector_norm(weight)):
                return name
        return None

"""Lossless activations of few numbers per token: the stream is kept in a frozen subspace.

    X = E[tokens] + Z U^T       E [V, D] the token table, frozen; U [D, k] orthonormal, frozen, the same everywhere
    writers (o_proj, down_proj; W [D, in]) stay in the span of U:  W = U U^T W, so all they add to X does
    forward   Z = (X - E[tokens]) U, k numbers a token instead of D; the next stage restores X
    backward  dL/dZ = dL/dX U, again k numbers: a writer's gradient is U U^T dL/dW whatever lies outside the span

[Protocol Models, arXiv 2506.01260; there Grassmann steps move U now and then, here it is fixed.] AdamW divides each
element by its own number, which would move a writer out of the span. So a writer's second moment is shared along D
(optimizer.py): a whole column is divided alike. Weight decay keeps the span. A pipeline that sends Z trains exactly as
one that sends X, up to rounding (1e-10 in float64: tests).

The cost is less freedom: writers of rank k and a frozen table. docs/methods.md has it measured.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from swarmnode.base.ids import seeded
from swarmnode.model.architecture import Shapes
from swarmnode.model.moments import MomentSection
from swarmnode.model.split import TABLE, initial, is_writer
from swarmnode.run.manifest import Manifest

DIGEST_BYTES = 8
# U is compared to 1.5e-5: coarse compared with rounding (1e-15), fine compared with its elements (1 / sqrt D)
DIGEST_GRID = 2.0**16
STRAY_MAX = 1e-3  # share of a writer's norm outside the span: in logarithms midway of rounding's 1e-6 and another U's 1


def basis(width: int, rank: int, seed: int) -> Tensor:
    """U, float64 [D, k] on the CPU, orthonormal. Machines may round differently: compare digests before training."""
    assert 1 <= rank <= width, f"rank {rank} of width {width}"
    chance = seeded("subspace", seed, width, rank).randbytes(2 * width * rank)
    raw = torch.frombuffer(bytearray(chance), dtype=torch.int16)
    columns: Tensor = torch.linalg.qr(raw.view(width, rank).double() + 0.5)[0]
    return columns


class Subspace:
    """U and E of one run."""

    def __init__(self, basis: Tensor, table: Tensor) -> None:
        """`basis` [D, k] and `table` [V, D]; both are used in the table's dtype."""
        self.table = table
        self.basis = basis.to(table.device, table.dtype)
        self._elsewhere: dict[torch.device, Tensor] = {}  # U where slow weights lie

    @staticmethod
    def of(manifest: Manifest, device: torch.device, dtype: torch.dtype) -> Subspace:
        """The subspace of a run with pipeline.boundary = "subspace", made from its seed."""
        model = manifest.model
        seed = manifest.seed
        table = initial(model, seed, TABLE, (model.vocabulary, model.width)).to(device, dtype)
        return Subspace(basis(model.width, manifest.pipeline.boundary_rank, seed), table)

    @functools.cached_property
    def digest(self) -> bytes:
        """Digest that is equal if E is equal to the bit and U to DIGEST_GRID; hashing E takes a second per gigabyte."""
        grid = (self.basis.double() * DIGEST_GRID).round().to(torch.int32)
        hasher = hashlib.sha256()
        for one in (grid, self.table):
            hasher.update(one.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return hasher.digest()[:DIGEST_BYTES]

    def down(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Z [B, T, k] of activations [B, T, D] over token ids [B, T]; differentiable."""
        return (x - self.table[tokens]) @ self.basis

    def up(self, z: Tensor, tokens: Tensor) -> Tensor:
        """Activations [B, T, D] of Z [B, T, k]; differentiable."""
        return self.table[tokens] + z @ self.basis.T

    def project(self, weight: Tensor) -> Tensor:
        """The part of a writer [D, in], or of its gradient, that lies in the span."""
        basis = self._basis_beside(weight)
        return basis @ (basis.T @ weight)

    def _basis_beside(self, weight: Tensor) -> Tensor:
        """U on the device of `weight`."""
        if weight.device == self.basis.device:
            return self.basis
        if weight.device not in self._elsewhere:
            self._elsewhere[weight.device] = self.basis.to(weight.device)
        return self._elsewhere[weight.device]

    @torch.no_grad()
    def project_(self, named: Mapping[str, Tensor]) -> None:
        """Project the writers among `named` (weights, gradients or their means) into the span, in place."""
        for name, weight in named.items():
            if is_writer(name):
                weight.copy_(self.project(weight))

    @torch.no_grad()
    def project_moments(self, firsts: MomentSection, shapes: Shapes) -> None:
        """Project first moments [P] of parameters with `shapes`, so that steps keep writers in the span."""
        at = 0
        for name, shape in shapes.items():
            end = at + math.prod(shape)
            if is_writer(name) and (moments := firsts.read(at, end)) is not None:
                firsts.write(at, self.project(moments.view(shape)).flatten())
            at = end

    @torch.no_grad()
    def constrain_(self, named: Mapping[str, Tensor]) -> None:
        """Project the writers among a stage's weights into the span and reset the frozen table."""
        self.project_(named)
        if TABLE in named:
            named[TABLE].copy_(self.table)

    @torch.no_grad()
    def stray(self, named: Iterable[tuple[str, Tensor]]) -> str | None:
        """The name of the first weight that cannot be of this run, because of another table or a writer out of the
        span; else None."""
        for name, tensor in named:
            weight = tensor.to(self.table)
            base = self.table if name == TABLE else self.project(weight) if is_writer(name) else weight
            if float(torch.linalg.vector_norm(weight - base)) > STRAY_MAX * float(torch.linalg.vector_norm(weight)):
                return name
        return None

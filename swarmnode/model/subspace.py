"""Activations between stages in a few numbers a token, and nothing lost: the stream is kept in a frozen subspace.

    X = E[tokens] + Z U^T       E [V, D] the token table, frozen; U [D, k] orthonormal, frozen, the same everywhere
    writers (o_proj, down_proj; W [D, in]) stay in the span of U:  W = U U^T W, so all they add to X does
    there   Z = (X - E[tokens]) U, k numbers a token instead of D; the next stage makes X of it again
    back    dL/dX U, again k numbers: a writer's gradient is U U^T dL/dW whatever lies outside the span

[Protocol Models, arXiv 2506.01260; there U is moved by Grassmann steps now and then, here it never is.] AdamW divides
each element by a number of its own, which would turn a writer out of the span. So a writer's second moment is shared
along D, v [1, in] <- beta2 v + (1 - beta2) mean_D(g^2): all of a column is divided alike. Weight decay keeps the span.
Compressed and uncompressed training are then the same arithmetic up to rounding (1e-10 in float64: tests).

What it costs is freedom: writers of rank k and a table that does not learn. `swarmnode bench boundary` measures that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from swarmnode.ids import seeded
from swarmnode.manifest import InnerSpec

WRITERS = ("o_proj.weight", "down_proj.weight")
TABLE = "model.embed_tokens.weight"


def is_writer(name: str) -> bool:
    """Whether the parameter `name` adds to the stream."""
    return name.endswith(WRITERS)


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

    def digest(self) -> bytes:
        """SHA-256 of U and E: equal where both are to the bit."""
        found = hashlib.sha256()
        for one in (self.basis, self.table):
            found.update(one.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return found.digest()

    def down(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Z [B, T, k] of activations [B, T, D] over token ids [B, T]."""
        return (x - self.table[tokens]) @ self.basis

    def up(self, z: Tensor, tokens: Tensor) -> Tensor:
        """Activations [B, T, D] of Z [B, T, k]."""
        return z @ self.basis.T + self.table[tokens]

    def gradient_down(self, dx: Tensor) -> Tensor:
        """What of dL/dX [B, T, D] the stage before needs: [B, T, k]."""
        return dx @ self.basis

    def gradient_up(self, dz: Tensor) -> Tensor:
        """A gradient [B, T, D] that does to the stage before what dL/dX would."""
        return dz @ self.basis.T

    def project(self, weight: Tensor) -> Tensor:
        """The part of a writer [D, in], or of its gradient, that lies in the span."""
        return self.basis @ (self.basis.T @ weight)

    @torch.no_grad()
    def constrain(self, named: Mapping[str, Tensor]) -> None:
        """Put the writers among a stage's parameters into the span and the frozen table into its place."""
        for name, weight in named.items():
            if is_writer(name):
                weight.copy_(self.project(weight))
            elif name == TABLE:
                weight.copy_(self.table)


class SubspaceAdamW:
    """AdamW [arXiv 1711.05101] that leaves the table alone and writers in the span of U."""

    def __init__(self, subspace: Subspace, named: Mapping[str, Tensor], inner: InnerSpec) -> None:
        self._subspace, self._inner = subspace, inner
        self._named = {name: weight for name, weight in named.items() if name != TABLE}
        self.exp_avg = {name: torch.zeros_like(weight) for name, weight in self._named.items()}
        self.exp_avg_sq = {
            name: torch.zeros_like(weight[:1] if is_writer(name) else weight) for name, weight in self._named.items()
        }
        self.steps = 0

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """Update the parameters in place by `gradients`, by name; that of the table is not looked at."""
        self.steps += 1
        beta1, beta2 = self._inner.beta1, self._inner.beta2
        corrected = (1.0 - beta1**self.steps, 1.0 - beta2**self.steps)
        for name, weight in self._named.items():
            gradient, square = gradients[name], gradients[name].square()
            if is_writer(name):
                gradient = self._subspace.project(gradient)
                square = gradient.square().mean(0, keepdim=True)
            mean = self.exp_avg[name].lerp_(gradient, 1.0 - beta1)
            variance = self.exp_avg_sq[name].lerp_(square, 1.0 - beta2)
            if weight.dim() > 1:
                weight.mul_(1.0 - learning_rate * self._inner.weight_decay)
            scale = (variance / corrected[1]).sqrt_().add_(self._inner.eps)
            weight.sub_(mean / scale, alpha=learning_rate / corrected[0])

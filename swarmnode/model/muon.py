"""Muon: momentum steps of unit singular values for the hidden matrices, AdamW for everything else.

    m <- momentum * m + (1 - momentum) * g
    u  = (1 - momentum) * g + momentum * m                       Nesterov
    W <- W - rate * (0.2 * sqrt(max(D_out, D_in)) * orthogonalize(u) + weight_decay * W)

[Jordan et al., "Muon", 2024, kellerjordan.github.io/posts/muon; the factor and the decay: arXiv 2502.16982, eq. 4, with
which an element's step is about as large as AdamW's.] Embedding, head and norms take AdamW's step. A matrix has one
moment. Under averaging over replicas Muon keeps more of what it learns than AdamW (arXiv 2505.23725).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.manifest import InnerSpec
from swarmnode.model.optimizer import FlatAdamW, Span
from swarmnode.model.subspace import Subspace

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration (Jordan et al., 2024): the steepest slope at zero that still keeps singular values within
0.7 to 1.2."""

STEPS = 5  # Jordan et al., 2024
NORM_EPS = 1e-7  # Jordan et al., 2024: added to the norm that matrices are divided by; a zero matrix stays zero
RMS = 0.2  # arXiv 2502.16982, section 2.2: the usual root mean square of an element of AdamW's step


@torch.no_grad()
def orthogonalize(matrices: Tensor, steps: int = STEPS) -> Tensor:
    """U V^T of each matrix U S V^T in `matrices` [K, m, n], approximately: singular values end between 0.7 and 1.2.

    The matrices are iterated as one batch and multiply in the dtype they are given in.
    """
    a, b, c = COEFFICIENTS
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + NORM_EPS)
    for _ in range(steps):
        gram = x @ x.mT  # (K, m, m), m the smaller side
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


@dataclass(frozen=True, slots=True)
class Matrix:
    """A hidden matrix [D_out, D_in] in the flat buffer, from element `first` on. `writer`: it stays in the subspace."""

    first: int
    shape: tuple[int, ...]
    writer: bool = False

    def view(self, flat: Tensor) -> Tensor:
        """Its part of `flat` [N], as a matrix."""
        return flat[self.first : self.first + math.prod(self.shape)].view(self.shape)


class FlatMuon:
    """Muon on `theta` by `grad`, both [N]: `matrices` take its steps, `spans` those of AdamW (`FlatAdamW`).

    `exp_avg` [N] holds Muon's momentum of matrices; `exp_avg_sq` [Q] is of `spans` alone. Matrices of one shape, or of
    one turned by a right angle, are orthogonalised as one batch, in bfloat16 with `autocast`.
    """

    def __init__(
        self,
        theta: Tensor,
        grad: Tensor,
        inner: InnerSpec,
        matrices: Sequence[Matrix],
        spans: Sequence[Span],
        *,
        subspace: Subspace | None = None,
        autocast: bool = False,
    ) -> None:
        self._adamw = FlatAdamW(theta, grad, inner, spans)
        self.exp_avg, self.exp_avg_sq = self._adamw.exp_avg, self._adamw.exp_avg_sq
        self._inner = inner
        self._subspace = subspace
        self._dtype = torch.bfloat16 if autocast else theta.dtype
        self._weights = [matrix.view(theta) for matrix in matrices]
        self._gradients = [matrix.view(grad) for matrix in matrices]
        self._moments = [matrix.view(self.exp_avg) for matrix in matrices]
        self._writers = {index for index, matrix in enumerate(matrices) if matrix.writer}
        self._batches: dict[tuple[int, ...], list[int]] = {}
        for index, matrix in enumerate(matrices):
            self._batches.setdefault(tuple(sorted(matrix.shape)), []).append(index)

    def clip_mean(self, samples: int, clip_norm: float) -> float:
        """See `FlatAdamW.clip_mean`."""
        return self._adamw.clip_mean(samples, clip_norm)

    @torch.no_grad()
    def step(self, steps_before: int, learning_rate: float) -> None:
        """Update theta in place as step number `steps_before` + 1. `learning_rate` is AdamW's; Muon's is in the ratio
        of the manifest's two peaks to it."""
        self._adamw.step(steps_before, learning_rate)
        if not self._weights:
            return
        inner = self._inner
        rate = learning_rate * inner.muon_learning_rate / inner.learning_rate
        torch._foreach_lerp_(self._moments, self._gradients, 1.0 - inner.muon_momentum)
        torch._foreach_mul_(self._weights, 1.0 - rate * inner.weight_decay)
        for index, turned in self.orthogonalized():
            weight = self._weights[index]
            step = (turned if weight.shape == turned.shape else turned.T).to(weight.dtype)
            if index in self._writers and self._subspace is not None:
                step = self._subspace.project(step)  # rounding of the iterations leaves the span
            weight.add_(step, alpha=-rate * RMS * math.sqrt(max(weight.shape)))

    def orthogonalized(self) -> Iterator[tuple[int, Tensor]]:
        """What each matrix is to move along by the gradient and the momentum of now, by its number, the shorter side
        first."""
        for indices in self._batches.values():
            sides = torch.stack([self._nesterov(index) for index in indices])
            yield from zip(indices, orthogonalize(sides), strict=True)

    def _nesterov(self, index: int) -> Tensor:
        """What matrix `index` is to move along, the shorter side first."""
        ahead = torch.lerp(self._gradients[index], self._moments[index], self._inner.muon_momentum).to(self._dtype)
        return ahead if ahead.shape[0] <= ahead.shape[1] else ahead.T

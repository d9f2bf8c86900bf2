"""Muon's orthogonalisation: the nearest semi-orthogonal matrix of a momentum, by Newton-Schulz iterations."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration (Jordan et al., "Muon", 2024, kellerjordan.github.io/posts/muon): the steepest slope at zero
that still keeps singular values within 0.7 to 1.2."""

STEPS = 5  # Jordan et al., 2024
NORM_EPS = 1e-7  # Jordan et al., 2024: of the norm that matrices are divided by; a zero matrix stays zero


@torch.no_grad()
def orthogonalize(matrices: Tensor, steps: int = STEPS) -> Tensor:
    """U V^T of each matrix U S V^T in `matrices` [..., m, n], approximately: singular values end between 0.7 and 1.2.

    Matrices of one shape are iterated as one batch. They multiply in the dtype they are given in.
    """
    a, b, c = COEFFICIENTS
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + NORM_EPS)
    for _ in range(steps):
        gram = x @ x.mT  # (..., m, m), m the smaller side
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT

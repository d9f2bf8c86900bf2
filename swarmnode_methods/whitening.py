"""Whitening of a gradient's matrices by Muon's momentum, so that a codec's error is small where the gradient is small.

    C    =  B B^T / mean eigenvalue + RIDGE I           B: the momentum before the step, [short, long]
    L    =  Cholesky factor of C
    send C(L^-1 G);  what is read is L times that

Muon makes all singular values of its step alike, so white noise drowns the weak ones. Through L it has the covariance
C. Whitening is linear: means, shares and error feedback are those of whitened packets. All members have the momentum,
in their states too, and it forgets: a member with another one reads means that are turned a little, and is back as its
momentum comes back. [Measured, RIDGE too: docs/learning.md.]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

RIDGE = 0.1


def factor(momentum: Tensor) -> Tensor | None:
    """L [short, short] of a matrix's `momentum`; None where there is none yet, or no matrix, or numbers that are not
    finite: members with the same momentum all whiten, or none does."""
    if momentum.dim() != 2 or min(momentum.shape) < 2:
        return None
    sides = _short_first(momentum.float())
    gram = sides @ sides.T
    mean = float(gram.trace()) / len(gram)
    if mean == 0.0:
        return None
    gram.div_(mean).diagonal().add_(RIDGE)
    found, failed = torch.linalg.cholesky_ex(gram)
    return None if int(failed) else found


def whiten(views: Iterable[Tensor], factors: Sequence[Tensor | None]) -> None:
    """L^-1 G in place of each of `views` that has a factor."""
    for view, lower in zip(views, factors, strict=True):
        if lower is not None:
            turned = torch.linalg.solve_triangular(lower, _short_first(view.to(lower.dtype)), upper=False)
            view.copy_(turned if turned.shape == view.shape else turned.T)


def unwhiten(views: Iterable[Tensor], factors: Sequence[Tensor | None]) -> None:
    """The inverse."""
    for view, lower in zip(views, factors, strict=True):
        if lower is not None:
            turned = lower @ _short_first(view.to(lower.dtype))
            view.copy_(turned if turned.shape == view.shape else turned.T)


def _short_first(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T

"""Clip gradients from a later stage to their usual norm before they are used.

    n_i = |g_i| / sqrt(weight),   limit = FACTOR median(n of the last KEPT),   g <- g min(1, limit / n)

with `weight` the samples that the counted targets amount to; if no target counts, g becomes zero.

A replica of a later stage that answers with a gradient ten thousand times too long moves a stage no further than two
normal ones, until its answers are audited (pipeline/auditor.py). The median is taken over clipped norms, so that less
than half of false answers cannot raise it. Source: adaptive clipping by a running quantile (AutoClip, arXiv 2007.14469,
there of the whole gradient's norm).
"""

from __future__ import annotations

import statistics
from collections import deque

import torch
from torch import Tensor

FACTOR = 2.0
"""Measured on the demo's model: of 504 honest gradients of 8 samples none is longer than 1.4 medians, of 1,784 of one
sample .6 % are longer than 1.5 and .1 % than 2. See `swarmnode_clipped_gradients_total`."""
KEPT = 64  # guess: microbatches
FIRST = 8  # guess: nothing is clipped before so many


class IncomingNorms:
    """The running norm of the gradients that one replica gets back."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=KEPT)
        self.clips = 0  # gradients clipped so far

    def factor(self, gradient: Tensor, weight: float, *, learn: bool = True) -> float:
        """The factor, 0 to 1, that clips `gradient`, of `weight` samples, to the usual norm. With `learn` its norm is
        remembered."""
        if weight == 0.0:
            self.clips += learn and bool(gradient.any())
            return 0.0
        each = float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) / weight**0.5
        limit = FACTOR * statistics.median(self._norms) if len(self._norms) >= FIRST else float("inf")
        too_long = 0.0 < limit < each
        if learn:
            self._norms.append(limit if too_long else each)
            self.clips += too_long
        return limit / each if too_long else 1.0

    def forget(self) -> None:
        """Forget the usual norm, because the weights were replaced."""
        self._norms.clear()

"""Gradients that come back from a later stage, clipped to what is usual before anything is computed from them.

    n_i = |g_i| / sqrt(samples),   limit = FACTOR median(n of the last KEPT),   g <- g min(1, limit / n)

A later stage's replica that answers with a gradient ten thousand times too long moves a stage no further than a usual
one would until its answers are checked (pipeline/auditor.py). The median is of clipped norms, so that less than half of
false answers cannot raise it. Source: adaptive clipping by a running quantile (AutoClip, arXiv 2007.14469, there of the
whole gradient's norm).
"""

from __future__ import annotations

import statistics
from collections import deque

import torch
from torch import Tensor

FACTOR = 4.0  # guess: see `swarmnode_clipped_gradients_total`; honest norms of one stage rarely double within KEPT
KEPT = 64  # guess: microbatches
FIRST = 8  # guess: before so many nothing is clipped


class IncomingNorms:
    """The running norm of the gradients that come back to one replica."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=KEPT)
        self.clips = 0  # gradients that were too long so far

    def clipped(self, gradient: Tensor, samples: int, *, learn: bool = True) -> Tensor:
        """`gradient` of `samples` samples, no longer than is usual. With `learn` its norm is remembered."""
        each = float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) / samples**0.5
        limit = FACTOR * statistics.median(self._norms) if len(self._norms) >= FIRST else float("inf")
        too_long = 0.0 < limit < each
        if learn:
            self._norms.append(limit if too_long else each)
            self.clips += too_long
        return gradient * (limit / each) if too_long else gradient

    def forget(self) -> None:
        """The weights were replaced: what was usual need not be any more."""
        self._norms.clear()

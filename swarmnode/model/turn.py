"""Rows that take turns: an inner step moves every F-th row of each matrix, and F steps move all.

    step k      S  =  rows k mod F, k mod F + F, ...        of a matrix [D_out, D_in]; of other parameters elements
    Muon        M[S] <- mu^F M[S] + (1 - mu^F) G[S]         G: what was gathered since the rows' last turn
                U    =  orthogonalize((1 - mu^F) G[S] + mu^F M[S])
                W[S] <- W[S] - rate(F) (0.2 sqrt(max(|S|, D_in)) U + decay W[S])
    AdamW       the same elements, with beta1^F and beta2^F
    rate(F)     rate (1 + log2 F)

[Dion2, arXiv 2512.16928: rows of the momentum, orthogonalised by themselves, which is what rows save in bytes and
arithmetic. Powers of F keep the memory of a moment as long as it is with all rows in each step. The rate is measured: 3
times that of all rows was best for F = 4, 4 times for 8 and 5 times for 16, docs/learning.md.]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Turn:
    """The rows `first`, `first` + `of`, ... of each matrix; of `of` 1 all."""

    first: int
    of: int

    @staticmethod
    def at(step: int, of: int) -> Turn:
        """The turn of inner step number `step`."""
        return Turn(step % of, of)

    def rows(self, matrix: Tensor) -> Tensor:
        """The view of the rows of `matrix` [D_out, ...], or the elements of a vector, whose turn it is."""
        return matrix[self.first :: self.of]

    def elements(self, start: int, part: Tensor) -> Tensor:
        """The view of those of `part`, which begins at element `start` of its parameter."""
        return part[(self.first - start) % self.of :: self.of]

    def kept(self, decay: float) -> float:
        """The decay of a moment between two turns of a row, by the `decay` of a step."""
        return float(decay**self.of)

    @property
    def rate(self) -> float:
        """The rate over that of a step of all rows."""
        return 1.0 + math.log2(self.of)


WHOLE = Turn(0, 1)

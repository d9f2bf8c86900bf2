"""Rows that take turns: an inner step moves every F-th row of each matrix, and each has its turn in F steps on average.

    step k      S  =  rows s, s + F, ...       of a matrix [D_out, D_in], s drawn from k and the number of the matrix
                      elements k mod F, k mod F + F, ...                                    of other parameters
    Muon        M[S] <- m M[S] + (1 - m) G[S],  m = mu^(2 F - 1)    G: what was gathered since the rows' last turn
                U    =  orthogonalize((1 - m) G[S] + m M[S])
                W[S] <- W[S] - rate(F) (0.2 sqrt(max(|S|, D_in)) U + decay W[S])
    AdamW       the same elements, with beta1^F and beta2^F
    rate(F)     rate (1 + log2 F)

[Dion2, arXiv 2512.16928: rows of the momentum, orthogonalised by themselves, which is what rows save in bytes and
arithmetic. Powers of F keep the memory of AdamW's moments as long as it is with all rows in each step; Muon's is better
shorter, as what was gathered is a mean already. Measured, as the rate is: 3 times that of all rows was best for F = 4,
4 times for 8 and 5 times for 16. So is that s is drawn anew in each step: by s = k mod F a run learns much less,
docs/learning.md.]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from swarmnode.base.ids import digest64


@dataclass(frozen=True, slots=True)
class Turn:
    """The rows whose turn it is in inner step number `step`: of each matrix every `of`-th."""

    step: int
    of: int

    def first(self, number: int) -> int:
        """The first of the rows of matrix `number` of a stage: drawn, the same at all replicas."""
        return digest64("rows", self.step, number) % self.of if self.of > 1 else 0

    def rows(self, matrix: Tensor, number: int) -> Tensor:
        """The view of those rows of `matrix` [D_out, D_in], number `number` of its stage."""
        return matrix[self.first(number) :: self.of]

    def elements(self, start: int, part: Tensor) -> Tensor:
        """The view of those of `part`, which begins at element `start` of its parameter."""
        return part[(self.step - start) % self.of :: self.of]

    def kept(self, decay: float) -> float:
        """The decay of AdamW's moments between two turns of an element, by the `decay` of a step."""
        return float(decay**self.of)

    def momentum(self, momentum: float) -> float:
        """Muon's momentum between two turns of a row, by that of a step."""
        return float(momentum ** (2 * self.of - 1))

    @property
    def rate(self) -> float:
        """The rate over that of a step of all rows."""
        return 1.0 + math.log2(self.of)


WHOLE = Turn(0, 1)

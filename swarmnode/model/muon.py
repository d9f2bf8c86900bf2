"""Muon: momentum steps with unit singular values for the hidden matrices, AdamW for all other parameters.

    m <- momentum * m + (1 - momentum) * g
    u  = (1 - momentum) * g + momentum * m                       Nesterov
    W <- W - rate * (0.2 * sqrt(max(D_out, D_in)) * orthogonalize(u) + weight_decay * W)

[Jordan et al., "Muon", 2024, kellerjordan.github.io/posts/muon; the factor and the decay: arXiv 2502.16982, eq. 4,
which makes an element's step about as large as AdamW's.] Embedding, head and norms take AdamW's step. A matrix has one
moment. When replicas are averaged, Muon keeps more of its progress than AdamW (arXiv 2505.23725).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swarmnode.model.moments import Moments, made
from swarmnode.model.optimizer import FlatAdamW, Span
from swarmnode.model.turn import WHOLE, Turn
from swarmnode.run.manifest import InnerSpec

if TYPE_CHECKING:
    from swarmnode.model.subspace import Subspace

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Jordan et al., 2024): the steepest slope at zero that still keeps singular
values within 0.7 to 1.2."""

STEPS = 4
"""Iterations. Jordan takes five, and divides by the Frobenius norm. A closer norm saves one, as the preconditioning of
Turbo-Muon does (arXiv 2512.04632) [measured: docs/methods.md]."""

GRAM_RATIO = 2  # sides' ratio from which iterating on the Gram matrix pays [measured: from 1.5; at 2.75 a third less]
NORM_EPS = 1e-7  # Jordan et al., 2024: added to the norm that matrices are divided by; a zero matrix stays zero
BATCH_ELEMENTS = 1 << 26  # guess: elements orthogonalised at once; more fill an accelerator no better
BATCH_ELEMENTS_CPU = 1 << 20  # measured: 10 M parameters in float32, 241 ms in batches of 2, 281 all at once
RMS = 0.2  # arXiv 2502.16982, section 2.2: the usual root mean square of an element of AdamW's step


@torch.no_grad()
def orthogonalize(matrices: Tensor, steps: int = STEPS) -> Tensor:
    """U V^T of each matrix U S V^T in `matrices` [K, m, n], approximately: singular values end between 0.7 and 1.2, but
    those below a hundredth of the largest, which may end smaller.

    The matrices are iterated as one batch and multiplied in their given dtype. Wide ones in float32 are iterated by
    their Gram matrix (Zhang et al., "Gram Newton-Schulz", 2026, tridao.me/blog/2026/gram-newton-schulz).
    """
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + NORM_EPS)  # so that no square of an element is lost
    gram = x @ x.mT  # (K, m, m), m the smaller side
    # The root of the Gram matrix's norm bounds the largest singular value, closer than the matrix's own norm does.
    bound = torch.linalg.matrix_norm(gram, keepdim=True) + NORM_EPS
    x.div_(bound.sqrt())
    gram.div_(bound)
    # In bfloat16 the Gram matrix's small eigenvalues turn negative, and grow.
    by_gram = x.dtype is torch.float32 and x.shape[-1] >= GRAM_RATIO * x.shape[-2]
    x = _by_gram(x, gram, steps) if by_gram else _iterated(x, gram, steps)
    return x if wide else x.mT


def _iterated(x: Tensor, gram: Tensor, steps: int) -> Tensor:
    """`x` [K, m, n] after `steps` iterations, given its Gram matrix x x^T [K, m, m]."""
    a, b, c = COEFFICIENTS
    for step in range(steps):
        if step:
            gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _by_gram(x: Tensor, gram: Tensor, steps: int) -> Tensor:
    """The same as `_iterated`. The polynomials of all iterations are of one symmetric matrix and commute, so that only
    their product meets `x`."""
    a, b, c = COEFFICIENTS
    product = None
    for step in range(steps):
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        product = polynomial if product is None else polynomial @ product
        if step < steps - 1:
            gram = polynomial @ gram
            gram = polynomial @ gram
    return x if product is None else product @ x


@dataclass(frozen=True, slots=True)
class MuonMatrix:
    """A hidden matrix [D_out, D_in] in flat buffers, from element `first` on. `writer`: it stays in the subspace."""

    first: int
    shape: tuple[int, ...]
    writer: bool = False

    def view(self, flat: Tensor) -> Tensor:
        """The matrix in weights, gradients or moments `flat` [P]."""
        return flat[self.first : self.first + math.prod(self.shape)].view(self.shape)


class FlatMuon:
    """Muon on `theta` [P] by `grad` [P]: `matrices` take its steps, `spans` those of AdamW (`FlatAdamW`).

    `exp_avg` [P] holds Muon's momentum of matrices; `exp_avg_sq` [Q] is only of `spans`; `state` as in FlatAdamW.
    Matrices of one shape, or its transpose, are orthogonalised as one batch, in bfloat16 with `autocast`.
    """

    def __init__(
        self,
        theta: Tensor,
        grad: Tensor,
        inner: InnerSpec,
        matrices: Sequence[MuonMatrix],
        spans: Sequence[Span],
        *,
        subspace: Subspace | None = None,
        autocast: bool = False,
        state: str = "device",
    ) -> None:
        self.adamw = FlatAdamW(theta, grad, inner, spans, state=state)
        self.exp_avg = self.adamw.exp_avg
        self.exp_avg_sq = self.adamw.exp_avg_sq
        self.matrices = matrices
        self._theta = theta
        self._inner = inner
        self._subspace = subspace
        self._dtype = torch.bfloat16 if autocast else theta.dtype
        self._weights = [matrix.view(theta) for matrix in matrices]
        self._gradients = [matrix.view(grad) for matrix in matrices]
        flats = [one.view(self.exp_avg).view(-1) if state == "device" else None for one in matrices]
        self._moments = [
            made(state, math.prod(one.shape), theta, signed=True, flat=flat)
            for one, flat in zip(matrices, flats, strict=True)
        ]
        self._writers = {index for index, matrix in enumerate(matrices) if matrix.writer}
        self._left: set[int] = set()  # matrices that the step under way has not moved
        self._untaken: set[int] = set()  # matrices whose moment has not taken the gradient
        self._at_once = BATCH_ELEMENTS_CPU if theta.device.type == "cpu" else BATCH_ELEMENTS
        self._turn = WHOLE  # of the step under way

    def use(self, grad: Tensor) -> None:
        """Step by `grad` [P] from now on."""
        self.adamw.use(grad)
        self._gradients = [matrix.view(grad) for matrix in self.matrices]

    def pieces(self) -> tuple[list[tuple[int, Moments]], list[tuple[int, Moments]]]:
        """First and second moments, like FlatAdamW.pieces; matrices have no second one."""
        firsts, seconds = self.adamw.pieces()
        firsts += ((matrix.first, kept) for matrix, kept in zip(self.matrices, self._moments, strict=True))
        return sorted(firsts, key=lambda piece: piece[0]), seconds

    def views(self, flat: Tensor, turn: Turn) -> list[Tensor]:
        """See `FlatAdamW.views`; of matrices rows [n, D_in]."""
        return self.adamw.views(flat, turn) + [
            turn.rows(matrix.view(flat), number) for number, matrix in enumerate(self.matrices)
        ]

    def clip_mean(self, weight: float, clip_norm: float) -> float:
        """See `FlatAdamW.clip_mean`."""
        return self.adamw.clip_mean(weight, clip_norm)

    @torch.no_grad()
    def step(self, steps_before: int, learning_rate: float, turn: Turn = WHOLE) -> None:
        """Update the rows of theta whose `turn` it is in place, as step number `steps_before` + 1. `learning_rate` is
        AdamW's; Muon's follows by the ratio of the manifest's two peaks."""
        self.adamw.step(steps_before, learning_rate, turn)
        self._turn = turn
        moved = {index: turn.rows(weight, index) for index, weight in enumerate(self._weights)}
        moved = {index: rows for index, rows in moved.items() if len(rows)}
        if not moved:
            return
        self._left = set(moved)
        self._untaken = set(moved)
        torch._foreach_mul_([*moved.values()], 1.0 - self._rate(learning_rate) * self._inner.weight_decay)
        self._move(self.orthogonalized(), self._rate(learning_rate))

    @torch.no_grad()
    def finish(self, steps_before: int, learning_rate: float) -> None:
        """The rest of a `step` that memory ran out in, with the same arguments: one matrix at a time. Each is moved as
        a whole or not at all."""
        for index in sorted(self._left):
            turned = orthogonalize(self._nesterov(index).unsqueeze(0))[0]
            self._move([(index, turned)], self._rate(learning_rate))

    def _rate(self, learning_rate: float) -> float:
        return learning_rate * self._turn.rate * self._inner.muon_learning_rate / self._inner.learning_rate

    def _move(self, directions: Iterable[tuple[int, Tensor]], rate: float) -> None:
        for index, turned in directions:
            weight = self._turn.rows(self._weights[index], index)
            step = (turned if weight.shape == turned.shape else turned.T).to(weight.dtype)
            if index in self._writers and self._subspace is not None:
                step = self._subspace.project(step)  # rounding in the iterations leaves the span
            weight.add_(step, alpha=-rate * RMS * math.sqrt(max(weight.shape)))
            self._left.discard(index)

    def orthogonalized(self) -> Iterator[tuple[int, Tensor]]:
        """The current direction of each matrix's step, from gradient and momentum, with its number, the shorter side
        first."""
        for indices in self._batches():
            sides = torch.stack([self._nesterov(index) for index in indices])
            yield from zip(indices, orthogonalize(sides), strict=True)

    def _batches(self) -> list[list[int]]:
        """The numbers of the matrices with rows in this turn, those of one shape together."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for index, weight in enumerate(self._weights):
            if len(rows := self._turn.rows(weight, index)):
                by_shape.setdefault(tuple(sorted(rows.shape)), []).append(index)
        return [
            indices[first : first + most]
            for shape, indices in by_shape.items()
            for most in [max(1, self._at_once // math.prod(shape))]
            for first in range(0, len(indices), most)
        ]

    def _nesterov(self, index: int) -> Tensor:
        """The direction of matrix `index`'s step before orthogonalising, the shorter side first; its moment takes the
        gradient, once a step."""
        kept = self._moments[index]
        shape = self._gradients[index].shape
        turn = self._turn
        gradient = turn.rows(self._gradients[index], index)
        momentum = turn.momentum(self._inner.muon_momentum)
        moment = kept.read(0, len(kept))
        rows = turn.rows(moment.view(shape), index)
        if index in self._untaken:
            rows.lerp_(gradient, 1.0 - momentum)
            kept.put(0, moment)
            self._untaken.discard(index)
        ahead = torch.lerp(gradient, rows, momentum).to(self._dtype)
        return ahead if ahead.shape[0] <= ahead.shape[1] else ahead.T

"""Inner optimizers of many replicas at once: AdamW and Muon over the rows of one tensor [R, P].

Both serve only this bench; nodes use swarmnode/model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.base.errors import UsageError
from swarmnode.model.muon import orthogonalize
from swarmnode.model.turn import WHOLE, Turn

ADAMW = "adamw"
MUON = "muon"
OPTIMIZERS = (ADAMW, MUON)
# LLaMA, arXiv 2302.13971, section 2.
BETA2 = 0.95
WEIGHT_DECAY = 0.1
EPS = 1e-8  # PyTorch's own
SCALE = 0.2  # of Muon's updates, so that their root mean square is AdamW's: Liu et al., arXiv 2502.16982, section 2.2


@dataclass(frozen=True, slots=True)
class MatrixRows:
    """An [rows, columns] part of a replica's parameters: its `first` element, and elements from a row to the next one
    (more than `columns` where several matrices lie side by side)."""

    first: int
    rows: int
    columns: int
    stride: int

    def turn(self, turn: Turn, number: int) -> MatrixRows:
        """Its rows whose `turn` it is, as of matrix `number`."""
        first = turn.first(number)
        rows = len(range(first, self.rows, turn.of))
        return MatrixRows(self.first + first * self.stride, rows, self.columns, self.stride * turn.of)

    def of(self, flats: Tensor) -> Tensor:
        """The view [R, rows, columns] of `flats` [R, P]."""
        shape = (len(flats), self.rows, self.columns)
        strides = (flats.stride(0), self.stride, 1)
        return flats.as_strided(shape, strides, flats.storage_offset() + self.first)


class BatchOptimizer:
    """Updates `theta` [R, P] in place: Muon for `matrices` where there are any, AdamW for all other elements.

    Muon [Jordan et al., 2024, kellerjordan.github.io/posts/muon; scale and decay: arXiv 2502.16982]:

        M <- momentum M + (1 - momentum) G ;   U = orthogonalize((1 - momentum) G + momentum M)       (Nesterov)
        W <- (1 - rate decay) W - rate SCALE sqrt(max(m, n)) U
    """

    def __init__(
        self,
        theta: Tensor,
        matrices: Sequence[MatrixRows],
        *,
        beta1: float,
        momentum: float,
        nesterov: bool = True,
    ) -> None:
        """Without `nesterov` U is of M alone."""
        self._nesterov = nesterov
        self.theta = theta.detach()
        self.beta1 = beta1
        self.momentum = momentum
        self.exp_avg = torch.zeros_like(self.theta)
        self.exp_avg_sq = torch.zeros_like(self.theta)
        self.steps = 0
        self._matrices = matrices
        self._elsewhere = outside(matrices, self.theta.shape[1])

    @torch.no_grad()
    def step(self, gradient: Tensor, rate: float, rate_elsewhere: float, turn: Turn = WHOLE) -> None:
        """Take one step along `gradient` [R, P], which is overwritten, of the rows in `turn`. `rate` is for Muon's
        matrices, `rate_elsewhere` for AdamW."""
        self.steps += 1
        rate *= turn.rate
        momentum = turn.momentum(self.momentum)
        for (short, long), matrices in self._in_turn(turn).items():
            views = [[one.of(flat) for one in matrices] for flat in (self.theta, gradient, self.exp_avg)]
            weights, gradients, averages = ([x if x.shape[1] == short else x.mT for x in some] for some in views)
            # [R, matrices, short, long]
            g = torch.stack(gradients, 1)
            m = torch.stack(averages, 1)
            m.lerp_(g, 1.0 - momentum)
            ahead = g.lerp_(m, momentum) if self._nesterov else m
            update = orthogonalize(ahead.flatten(0, 1)).view_as(m)
            scale = rate * SCALE * math.sqrt(long)
            for i, (weight, average) in enumerate(zip(weights, averages, strict=True)):
                average.copy_(m[:, i])
                weight.mul_(1.0 - rate * WEIGHT_DECAY).sub_(update[:, i], alpha=scale)
        self._adamw(gradient, rate_elsewhere * turn.rate, turn)

    def _in_turn(self, turn: Turn) -> dict[tuple[int, int], list[MatrixRows]]:
        """The rows in `turn` of all matrices, by their sides, the shorter one first."""
        found: dict[tuple[int, int], list[MatrixRows]] = {}
        for number, one in enumerate(self._matrices):
            rows = one.turn(turn, number)
            found.setdefault((min(rows.rows, rows.columns), max(rows.rows, rows.columns)), []).append(rows)
        return found

    def views(self, flat: Tensor, turn: Turn) -> list[Tensor]:
        """The elements of `flat` [P] that a step of `turn` moves."""
        parts = [turn.elements(0, flat[first:last]) for first, last in self._elsewhere]
        return parts + [one.turn(turn, number).of(flat.unsqueeze(0))[0] for number, one in enumerate(self._matrices)]

    def _adamw(self, gradient: Tensor, rate: float, turn: Turn) -> None:
        flats = (self.theta, gradient, self.exp_avg, self.exp_avg_sq)
        views = [
            [turn.elements(0, row[first:last]) for row in flat for first, last in self._elsewhere] for flat in flats
        ]
        weights, gradients, exp_avgs, exp_avg_sqs = ([view.contiguous() for view in some] for some in views)
        step = torch.full((), float((self.steps - 1) // turn.of + 1))
        torch._fused_adamw_(
            weights,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step] * len(weights),
            lr=rate,
            beta1=turn.kept(self.beta1),
            beta2=turn.kept(BETA2),
            weight_decay=WEIGHT_DECAY,
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )
        for some, moved in zip((views[0], views[2], views[3]), (weights, exp_avgs, exp_avg_sqs), strict=True):
            for view, values in zip(some, moved, strict=True):
                if turn.of > 1:
                    view.copy_(values)


def outside(matrices: Sequence[MatrixRows], parameters: int) -> list[tuple[int, int]]:
    """[first, last) of the elements that no matrix has; matrices side by side leave nothing between them."""
    taken = sorted({(one.first, one.first + (one.rows - 1) * one.stride + one.columns) for one in matrices})
    found = []
    at = 0
    for first, last in taken:
        if first > at:
            found.append((at, first))
        at = max(at, last)
    return [*found, *([(at, parameters)] if at < parameters else [])]


def check_optimizer(name: str) -> None:
    """Raises UsageError for an unknown optimizer."""
    if name not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {name!r}: use one of {', '.join(OPTIMIZERS)}")

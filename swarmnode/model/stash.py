"""What the weights were when a tape was made: weight stashing (PipeDream, arXiv 1806.03377, section 3.3).

Between a microbatch's forward and its backward a replica may have stepped. Then its gradient is made with the weights
of the forward, of which a copy is kept as long as tapes need it. With forwards done again with today's weights the loss
was .15 nats higher where one step came between at most, .08 with two to four, and then no less when instead matrices of
today met activations of then [measured: demo, one replica a stage, after 6,400 samples, three seeds each].
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.model.memory import COPIES_MAX


@dataclass(slots=True, eq=False, weakref_slot=True)
class Weights:
    """Theta between two steps. Tapes made then hold it; the step that ends it makes the `copy` [N], if any do."""

    copy: Tensor | None = None


@contextlib.contextmanager
def instead(theta: Tensor, other: Tensor) -> Iterator[None]:
    """Meanwhile `theta` [N] is `other` [N]. Autograd need not know (`data`): tapes find it as it was."""
    mine, live = theta.clone(), theta.data
    live.copy_(other)
    try:
        yield
    finally:
        live.copy_(mine)


class Stash:
    """Copies of `theta` [N], in `dtype`, as they are needed and COPIES_MAX at most; older ones are as if they were
    today's."""

    def __init__(self, theta: Tensor, dtype: torch.dtype) -> None:
        self._theta = theta
        self._dtype = dtype
        self._newest: weakref.ref[Weights] | None = None  # today's, if any tape was made with them
        self._older: list[weakref.ref[Weights]] = []  # oldest first

    def today(self) -> Weights:
        """What a tape made now is to hold."""
        weights = self._newest() if self._newest is not None else None
        if weights is None:
            weights = Weights()
            self._newest = weakref.ref(weights)
        return weights

    def before_step(self) -> None:
        """Theta is about to be stepped."""
        held = self._held()
        if self._newest is not None and (weights := self._newest()) is not None:
            weights.copy = self._theta.to(self._dtype, copy=True)
            held.append(weights)
        for weights in held[:-COPIES_MAX]:
            weights.copy = None
        self._newest, self._older = None, [weakref.ref(weights) for weights in held[-COPIES_MAX:]]

    def clear(self) -> None:
        """Theta was loaded from elsewhere: nobody needs what it was."""
        for weights in self._held():
            weights.copy = None
        self._newest, self._older = None, []

    def back(self, weights: Weights | None) -> AbstractContextManager[None]:
        """Meanwhile theta is what `weights` were, if a copy is left."""
        if weights is None or weights.copy is None:
            return contextlib.nullcontext()
        return instead(self._theta, weights.copy)

    @property
    def nbytes(self) -> int:
        """Of all copies."""
        return sum(weights.copy.nbytes for weights in self._held() if weights.copy is not None)

    def _held(self) -> list[Weights]:
        """Older ones that a tape still needs."""
        return [weights for older in self._older if (weights := older()) is not None]

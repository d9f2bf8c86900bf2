"""Weight stashing: backward uses the weights of the forward (PipeDream, arXiv 1806.03377, section 3.3).

A replica may step between a microbatch's forward and its backward. The gradient is then computed with the weights of
the forward, of which a copy is kept as long as tapes need it. When forwards were instead recomputed with the current
weights, the loss was .15 nats higher with at most one step in between, .08 with two to four; it was no lower when
current matrices met old activations [measured: demo, one replica a stage, after 6,400 samples, three seeds each].

Weight prediction: where a step is expected before the backward, the forward uses the weights that the step should
leave, theta plus its last step (SpecTrain, arXiv 1809.02839, predicts them from the momentum). Half of the gradients
one step late cost 0.106 nat, with prediction 0.049 [measured: plain PyTorch, the demo's model, Muon, 1,792 samples].
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.model.memory_estimate import COPIES_MAX
from swarmnode.model.out_of_memory import tried


@dataclass(slots=True, eq=False, weakref_slot=True)
class WeightVersion:
    """Theta between two steps. Tapes made meanwhile hold it; the step that ends it makes the `copy` [N], if there are
    any."""

    copy: Tensor | None = None


@contextlib.contextmanager
def instead(theta: Tensor, other: Tensor) -> Iterator[None]:
    """Context in which `theta` [N] has the values of `other` [N]. Autograd does not notice (`data`): tapes find it
    restored."""
    mine, live = theta.clone(), theta.data
    live.copy_(other)
    try:
        yield
    finally:
        live.copy_(mine)


class WeightStash:
    """Copies of `theta` [N], in `dtype`, made on demand and COPIES_MAX at most. Backward with a dropped version uses
    the current weights."""

    def __init__(self, theta: Tensor, dtype: torch.dtype, predicts: bool = False) -> None:
        self._theta = theta
        self._dtype = dtype
        self._predicts = predicts and dtype == theta.dtype  # rounded weights lie further apart than steps are long
        self._asked = False
        self._newest: weakref.ref[WeightVersion] | None = None  # the current one, if any tape was made with it
        self._older: list[weakref.ref[WeightVersion]] = []  # oldest first
        self._before: Tensor | None = None  # theta before its last inner step, where a prediction was asked for
        self._last: Tensor | None = None  # that step itself, since theta has moved in a round
        self._ahead: weakref.ref[WeightVersion] | None = None  # the prediction, if any tape was made with it

    def today(self) -> WeightVersion:
        """The version that a tape made now must hold."""
        weights = self._newest() if self._newest is not None else None
        if weights is None:
            weights = WeightVersion()
            self._newest = weakref.ref(weights)
        return weights

    def ahead(self) -> WeightVersion:
        """The version that the next step should leave, for a tape that holds it; today's if that is not known."""
        self._asked = self._predicts
        weights = self._ahead() if self._ahead is not None else None
        if weights is None and (self._before is not None or self._last is not None):
            weights = WeightVersion(tried(self._one_step_on)[1])
            self._ahead = weakref.ref(weights)
            self._older.append(self._ahead)
        return self.today() if weights is None or weights.copy is None else weights

    def _one_step_on(self) -> Tensor:
        theta = self._theta.data
        if (before := self._before) is not None:
            return torch.lerp(before, theta, 2.0)
        assert self._last is not None
        return theta + self._last

    def before_step(self, *, inner: bool = True) -> None:
        """Call before each step of theta: an `inner` one, which predicts the next, or one of a round."""
        held, asked = self._held(), self._asked and inner
        if (before := self._before) is not None and not inner:
            _, self._last = tried(lambda: self._theta.data - before)
        elif inner:
            self._last = None
        self._before = self._ahead = None
        if self._newest is not None and (weights := self._newest()) is not None:
            _, weights.copy = tried(lambda: self._theta.to(self._dtype, copy=True))
            held += [weights] if weights.copy is not None else []  # without memory a backward uses current weights
            self._before = weights.copy if asked else None
        elif asked:
            _, self._before = tried(self._theta.data.clone)
        for weights in held[:-COPIES_MAX]:
            weights.copy = None
        self._newest, self._older = None, [weakref.ref(weights) for weights in held[-COPIES_MAX:]]

    def moved(self) -> None:
        """Do nothing: theta itself is read in each forward."""

    refresh = moved

    def clear(self) -> None:
        """Drop all copies, because theta was loaded from elsewhere."""
        for weights in self._held():
            weights.copy = None
        self._newest, self._older = None, []
        self._before = self._last = self._ahead = None

    def back(self, weights: WeightVersion | None) -> AbstractContextManager[None]:
        """Context in which theta has the values of `weights`, if a copy is left."""
        if weights is None or weights.copy is None:
            return contextlib.nullcontext()
        return instead(self._theta, weights.copy)

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        copies = [weights.copy for weights in self._held()]
        held = {id(copy): copy.nbytes for copy in (*copies, self._before, self._last) if copy is not None}
        return sum(held.values())

    def _held(self) -> list[WeightVersion]:
        """Older versions that a tape still needs."""
        return [weights for older in self._older if (weights := older()) is not None]

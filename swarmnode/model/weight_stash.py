"""Weight stashing: backward uses the weights of the forward (PipeDream, arXiv 1806.03377, section 3.3).

A replica may step between a microbatch's forward and its backward. The gradient is then computed with the weights of
the forward, of which a copy is kept as long as tapes need it. When forwards were instead recomputed with the current
weights, the loss was .15 nats higher with at most one step in between, .08 with two to four; it was no lower when
current matrices met old activations [measured: demo, one replica a stage, after 6,400 samples, three seeds each].

Weight prediction: where a step is expected before the backward, the forward uses the weights that the step should
leave, theta plus its last step (SpecTrain, arXiv 1809.02839, predicts them from the momentum). Half of the gradients
one step late cost 0.106 nat, with prediction 0.049 [measured: plain PyTorch, the demo's model, Muon, 1,792 samples].

WorkingCopy is the half-precision copy of a stage's weights that its products read: one for each version in use.

Autocast casts every matrix in every forward, and each graph keeps its own casts: 2 bytes a parameter and tape. Here the
casts are made once after a step, and all graphs of that version share them. So a backward that comes after a step finds
the weights of its forward in its graph, and a recomputed forward finds them in its version: the copy is the stash
[PipeDream, arXiv 1806.03377, section 3.3; fp32 master weights: arXiv 1710.03740].

Matrices inside layers and the head are copied in half precision, norms as they are. The token table is read in place.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarmnode.model.architecture import Shapes
from swarmnode.model.device import tried
from swarmnode.model.memory_budget import COPIES_MAX
from swarmnode.model.split import TABLE


@dataclass(slots=True, eq=False, weakref_slot=True)
class WorkingVersion:
    """A version of the weights as a tape holds it. `leaves`: the module's parameters of that version; None once
    dropped: then a backward uses the current weights."""

    leaves: Mapping[str, nn.Parameter] | None


class WorkingCopy:
    """The working copies of `theta` [P], laid out by `shapes`, in the parameters of `module`. Their gradients add up in
    `gradients`, in float32; parameters that have none there are not trained."""

    def __init__(
        self,
        module: nn.Module,
        shapes: Shapes,
        theta: Tensor,
        gradients: Mapping[str, Tensor],
        dtype: torch.dtype,
        watch: Callable[[nn.Parameter], None] = lambda leaf: None,
    ) -> None:
        """`watch` is called with each new parameter."""
        self._module = module
        self._watch = watch
        read_in_place = next(iter(shapes)) == TABLE  # a tied model's head, further on, is copied
        self._shapes = {name: shape for name, shape in shapes.items() if name != TABLE or not read_in_place}
        first = math.prod(shapes[TABLE]) if read_in_place else 0
        self._theta = theta.data[first:]
        self._gradients = gradients
        self._matrices = sum(math.prod(shape) for shape in self._shapes.values() if len(shape) > 1)
        self._dtype = dtype
        self._half, self._exact, self._leaves = self._made()
        self._held: weakref.ref[WorkingVersion] | None = None  # the current version, if a tape was made with it
        self._older: list[weakref.ref[WorkingVersion]] = []  # oldest first
        self._stale = True

    @staticmethod
    def possible(device: torch.device, *, autocast: bool) -> bool:
        """Whether a replica keeps a working copy: on an accelerator with autocast, where PyTorch adds gradients of half
        precision to float32 ones (2.10 and later)."""
        return autocast and device.type != "cpu" and hasattr(torch.Tensor, "grad_dtype")

    def _made(self) -> tuple[Tensor, Tensor, dict[str, nn.Parameter]]:
        half = torch.empty(self._matrices, dtype=self._dtype, device=self._theta.device)
        exact = torch.empty_like(self._theta[self._matrices :])
        leaves = dict[str, nn.Parameter]()
        at = 0
        for name, shape in self._shapes.items():
            end = at + math.prod(shape)
            flat = half[at:end] if at < self._matrices else exact[at - self._matrices : end - self._matrices]
            gradient = self._gradients.get(name)
            leaf = nn.Parameter(flat.view(shape), requires_grad=gradient is not None)
            if gradient is not None:
                leaf.grad_dtype = gradient.dtype
                leaf.grad = gradient
                self._watch(leaf)
            leaves[name] = leaf
            at = end
        return half, exact, leaves

    def _point_to(self, leaves: Mapping[str, nn.Parameter]) -> None:
        for name, leaf in leaves.items():
            owner, _, attribute = name.rpartition(".")
            self._module.get_submodule(owner)._parameters[attribute] = leaf

    def today(self) -> WorkingVersion:
        """The version that a tape made now must hold."""
        version = self._held() if self._held is not None else None
        if version is None:
            version = WorkingVersion(self._leaves)
            self._held = weakref.ref(version)
        return version

    ahead = today  # a copy in half precision cannot tell where a step leads

    def on_weights_written(self) -> None:
        """Call when theta has been or will be written, before the next forward."""
        self._stale = True

    def before_step(self, *, inner: bool = True) -> None:
        """Call before each step of theta."""
        self.on_weights_written()

    def clear(self) -> None:
        """Drop all versions, because theta was loaded from elsewhere."""
        for version in (*self._living(), *([self._held()] if self._held is not None else [])):
            if version is not None:
                version.leaves = None
        self._held = None
        self._older = []
        self._stale = True

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights anew if they have moved: in place, or beside a version that a tape still needs."""
        if not self._stale:
            return
        if self._held is not None and self._held() is not None:
            self._older = [weakref.ref(version) for version in self._living()] + [self._held]
            for dropped in self._older[:-COPIES_MAX]:
                if (version := dropped()) is not None:
                    version.leaves = None
            self._older = self._older[-COPIES_MAX:]
            self._half, self._exact, self._leaves = self._made()
        self._held = None
        self._stale = False
        self._half.copy_(self._theta[: self._matrices])
        self._exact.copy_(self._theta[self._matrices :])
        self._point_to(self._leaves)

    @contextlib.contextmanager
    def back(self, version: WorkingVersion | None) -> Iterator[None]:
        """Context in which forwards use the weights of `version`, if they are left."""
        if version is None or version.leaves is None:
            yield
            return
        stale = self._stale
        self._stale = False
        self._point_to(version.leaves)
        try:
            yield
        finally:
            self._point_to(self._leaves)
            self._stale = stale

    @property
    def nbytes(self) -> int:
        """Bytes of the older versions."""
        return len(self._living()) * (self._half.nbytes + self._exact.nbytes)

    def _living(self) -> list[WorkingVersion]:
        """Older versions that a tape still needs."""
        return [version for older in self._older if (version := older()) is not None and version.leaves is not None]


@dataclass(slots=True, eq=False, weakref_slot=True)
class WeightVersion:
    """Theta between two steps. Tapes made meanwhile hold it; the step that ends it makes the `copy` [N], if there are
    any."""

    copy: Tensor | None = None


@contextlib.contextmanager
def instead(theta: Tensor, other: Tensor) -> Iterator[None]:
    """Context in which `theta` [N] has the values of `other` [N]. Autograd does not notice (`data`): tapes find it
    restored."""
    mine = theta.clone()
    live = theta.data
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
        held = self._held()
        asked = self._asked and inner
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
        self._newest = None
        self._older = [weakref.ref(weights) for weights in held[-COPIES_MAX:]]

    def on_weights_written(self) -> None:
        """Do nothing: theta itself is read in each forward."""

    refresh = on_weights_written

    def clear(self) -> None:
        """Drop all copies, because theta was loaded from elsewhere."""
        for weights in self._held():
            weights.copy = None
        self._newest = None
        self._older = []
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

"""The half-precision copy of a stage's weights that its products read: one for each version of the weights in use.

Autocast casts every matrix in every forward, and each graph keeps its own casts: 2 bytes a parameter and tape. Here the
casts are made once after a step, and all graphs of that version share them. So a backward that comes after a step finds
the weights of its forward in its graph, and a recomputed forward finds them in its version: the copy is the stash
(weight_stash.py) [PipeDream, arXiv 1806.03377, section 3.3; fp32 master weights: arXiv 1710.03740].

Matrices inside layers and the head are copied in half precision, norms as they are. The token table is read in place.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarmnode.model.architecture import Shapes
from swarmnode.model.memory_estimate import COPIES_MAX
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
        self._theta, self._gradients = theta.data[first:], gradients
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
        leaves, at = dict[str, nn.Parameter](), 0
        for name, shape in self._shapes.items():
            end = at + math.prod(shape)
            flat = half[at:end] if at < self._matrices else exact[at - self._matrices : end - self._matrices]
            gradient = self._gradients.get(name)
            leaf = nn.Parameter(flat.view(shape), requires_grad=gradient is not None)
            if gradient is not None:
                leaf.grad_dtype, leaf.grad = gradient.dtype, gradient
                self._watch(leaf)
            leaves[name], at = leaf, end
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

    def moved(self) -> None:
        """Call when theta has been or will be written, before the next forward."""
        self._stale = True

    def before_step(self, *, inner: bool = True) -> None:
        """Call before each step of theta."""
        self.moved()

    def clear(self) -> None:
        """Drop all versions, because theta was loaded from elsewhere."""
        for version in (*self._living(), *([self._held()] if self._held is not None else [])):
            if version is not None:
                version.leaves = None
        self._held, self._older, self._stale = None, [], True

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
        self._held, self._stale = None, False
        self._half.copy_(self._theta[: self._matrices])
        self._exact.copy_(self._theta[self._matrices :])
        self._point_to(self._leaves)

    @contextlib.contextmanager
    def back(self, version: WorkingVersion | None) -> Iterator[None]:
        """Context in which forwards use the weights of `version`, if they are left."""
        if version is None or version.leaves is None:
            yield
            return
        stale, self._stale = self._stale, False
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

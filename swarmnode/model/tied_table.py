"""The token table of a tied model whose ends both train it: one matrix, as the sum of two parts.

The first stage looks tokens up in it, and the last one computes logits with it; each has only its own gradient. So each
end counts what it moved the table by:

    table = own + other,   own: of the first stage the start and its steps, of the last its steps alone

Once a round each end takes the other's part as it is now, puts it in the place of the one it had, and both have the
same table again. A part is a state and not a change: one that comes late, twice or never does no harm, and replicas of
a stage may take it from different ones. While replicas average, the mean of their own parts stays as it is.

The sum of both ends' steps is what a single machine does with plain gradients. AdamW scales each end's by itself;
measured on 500 steps from scratch: docs/models.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from swarmnode.model.inner_optimizer import IncomingNorms
from swarmnode.model.moments import PART


class TiedTable:
    """One end's table in the slow and fast weights `phi` and `theta` [V D], views of the replica's live buffers. It is
    the state section "table" (model/section.py): its own part, zeros while that is not known."""

    def __init__(self, phi: Tensor, theta: Tensor, *, first: bool) -> None:
        """`first`: of the first stage, whose part has the start. Begin as `begin` does."""
        self.phi = phi
        self.theta = theta
        self._first = first
        self.other = torch.zeros_like(phi)
        self._known = True
        self._changes = IncomingNorms()
        self.begin()

    def begin(self, *, known: bool = True) -> None:
        """Other weights are here: those that the run starts with, or if not `known` a table whose parts are not."""
        self._known = known
        self._changes.forget()
        if self._first:
            self.other.zero_()
        else:
            self.other.copy_(self.phi)

    def __len__(self) -> int:
        return self.phi.numel()

    def spans(self) -> Iterator[tuple[int, int]]:
        """Spans [first, last) of PART elements at most, for `read` and `load` in order."""
        for start in range(0, len(self), PART):
            yield start, min(start + PART, len(self))

    def read(self, first: int, last: int) -> Tensor:
        """Elements [first, last) of the own part."""
        own = self.phi[first:last] - self.other[first:last]
        return own if self._known else own.zero_()

    def load(self, first: int, values: Tensor) -> None:
        """Take `values`, of any dtype on any device, as the own part from element `first` on; the table has its values
        already. A part of zeros is not known."""
        if first == 0:
            self._known = False
            self._changes.forget()
        self._known |= bool(values.any())
        at = slice(first, first + values.numel())
        torch.sub(self.phi[at], values.to(self.phi), out=self.other[at])

    def take(self, theirs: Tensor) -> None:
        """Put `theirs` [V D], the other end's part, in the place of the one taken before; a change far longer than the
        usual one is clipped (gradient_clip.py), and the rest of it taken later. If the own part is not known, it is
        what `theirs` leaves of the table."""
        theirs = theirs.to(self.phi)
        if not self._known:
            if self._first or bool(theirs.any()):  # the last stage's part may be zero, the first one's is then unknown
                self.other.copy_(theirs)
                self._known = True
            return
        if not self._first and not bool(theirs.any()):
            return
        change = theirs - self.other
        change.mul_(self._changes.factor(change, 1.0))
        self.other.add_(change)
        self.phi.add_(change)
        self.theta.add_(change.to(self.theta))

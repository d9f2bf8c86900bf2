"""The usual length of the gradients that a replica answers with, and inputs whose gradient is much shorter.

An accusation shows an input that its accuser chose. It may have been made so that the gradient vanishes at the weights
of the accused: then the answers of two replicas, or of one a step later, have nothing in common, and an honest one
looks false. At any other weights of the stage that gradient is much shorter than usual.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import deque

from swarmnode.errors import RemoteFault
from swarmnode.ports import Replica, WireTensor

EVERY = 8  # guess: of so many answers one is measured
KEPT, LEAST = 64, 4  # guess: measurements
# Measured on a last stage of two layers: of the usual norm, an input made for its weights has .03 four inner steps
# later and .13 after 32; ordinary inputs differ by a fifth.
VANISHING = 0.25


class UsualNorm:
    """The usual length of the gradients that `replica` answers with. Called on the compute thread."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._answers = 0
        self._norms: deque[float] = deque(maxlen=KEPT)

    def gave(self, gradient: WireTensor, samples: int) -> None:
        """Note an answer to a microbatch of `samples`; one that is not finite is no measure."""
        self._answers += 1
        if self._answers <= LEAST or self._answers % EVERY == 0:
            with contextlib.suppress(RemoteFault):  # its receiver judges it
                self._norms.append(self._replica.norm(gradient, samples))

    def vanishes(self, gradient: WireTensor, samples: int) -> bool:
        """Whether our own gradient of an input is far shorter than usual, or nothing is known of what is."""
        if len(self._norms) < LEAST:
            return True
        return self._replica.norm(gradient, samples) < VANISHING * statistics.median(self._norms)


__all__ = ["LEAST", "VANISHING", "UsualNorm"]

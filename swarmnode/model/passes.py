"""The passes in which a stage computes a microbatch, so that a graph fits into the memory that is left. Pure.

A microbatch is cut into passes of some samples: the gradients are sums over samples, so nothing is computed twice. If
even a single sample's graph is too large, a pass keeps only the inputs of its layers and recomputes each layer in the
backward [checkpointing: arXiv 1604.06174], a third more arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

PASS_SHARE = 0.4  # guess: of a dedicated device's free memory for the pass in work; kept tapes take a half (hop.py)


@dataclass(frozen=True, slots=True)
class Passes:
    """`samples` of a microbatch at once; `by_layer`: graphs hold only the inputs of layers."""

    samples: int
    by_layer: bool

    def spans(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """(first, last) of each pass over samples [first, last)."""
        for at in range(first, last, self.samples):
            yield at, min(last, at + self.samples)


def repeated_forwards(passes: Passes, samples: int, *, last: bool) -> int:
    """Forwards that a backward over `samples` does again beside its own work, if memory for tapes lasts: by layer, or,
    but in the `last` stage, which has no forward of its own, in the passes."""
    return int(passes.by_layer or (passes.samples < samples and not last))


def choose_passes(samples: int, budget: int | None, nbytes: Callable[[int, bool], int]) -> Passes:
    """The fewest passes over `samples` whose graph fits into `budget` bytes (None: any does), by `nbytes` (samples, by
    layer); the smallest there are if none does."""
    if budget is None:
        return Passes(samples, False)
    for by_layer in (False, True):
        size = samples
        while True:
            if nbytes(size, by_layer) <= budget:
                return Passes(size, by_layer)
            if size == 1:
                break
            size = -(-size // 2)
    return Passes(1, True)

"""Machines whose work this node has seen with its own eyes, and how many such machines there are in all.

Keys cost nothing, so records alone prove no machine. A machine was seen at work when it answered a microbatch with a
gradient that passed every check, sent a microbatch that was trained here, or gave a packet that was believed.

Of a large stage one node sees a part. How many machines work there is estimated from how often each was seen (Chao
1984, "Nonparametric estimation of the number of classes in a population"): of D seen, f1 of them once and f2 twice,
there are about D + f1 (f1 - 1) / (2 (f2 + 1)). Whoever does no work adds nothing, however many keys it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from swarmnode.ids import PeerId

KEPT_MAX = 512  # guess: a node of a stage of hundreds sees as many; those seen longest ago are forgotten


class Observed:
    """Of one node's life."""

    def __init__(self) -> None:
        self._times: OrderedDict[PeerId, int] = OrderedDict()

    def worked(self, peer: PeerId) -> None:
        """`peer` was seen at work."""
        self._times[peer] = self._times.pop(peer, 0) + 1
        if len(self._times) > KEPT_MAX:
            self._times.popitem(last=False)

    def forget(self, peer: PeerId) -> None:
        """It was found to lie."""
        self._times.pop(peer, None)

    @property
    def times(self) -> Mapping[PeerId, int]:
        """How often each was seen."""
        return self._times


def machines(times: Iterable[int]) -> float:
    """How many machines there are about, of which some were seen so many times each (Chao 1984, bias-corrected)."""
    seen = list(times)
    once, twice = seen.count(1), seen.count(2)
    return len(seen) + once * (once - 1) / (2 * (twice + 1))

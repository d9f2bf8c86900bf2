"""Machines that this node has seen at work itself, and an estimate of how many machines there are.

Keys cost nothing, so records alone prove no machine. A machine was seen at work if it answered a microbatch with a
gradient that passed every check, or gave a packet that was believed. A machine that only sent a microbatch which was
trained here was seen, too: it counts as an ordinary machine, and has no vote.

In a large stage one node sees only a part. The number of working machines is estimated from how often each was seen
(Chao 1984, "Nonparametric estimation of the number of classes in a population"): with D seen, f1 of them once and f2
twice, there are about D + f1 (f1 - 1) / (2 (f2 + 1)). At most 2 D are believed: ten keys that do one piece of work each
would count as 55 machines. A machine that does no work adds nothing, however many keys it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set

from swarmnode.ids import PeerId

KEPT_MAX = 512  # guess: a node in a stage of hundreds sees as many; the least recently seen are forgotten


class ObservedMachines:
    """The machines seen since this node started."""

    def __init__(self) -> None:
        self._times: OrderedDict[PeerId, int] = OrderedDict()
        self._worked: set[PeerId] = set()  # of these

    def worked(self, peer: PeerId) -> None:
        """Record that `peer` was seen at work."""
        self.asked(peer)
        self._worked.add(peer)

    def asked(self, peer: PeerId) -> None:
        """Record that `peer` sent a microbatch that was trained here."""
        self._times[peer] = self._times.pop(peer, 0) + 1
        if len(self._times) > KEPT_MAX:
            oldest, _ = self._times.popitem(last=False)
            self._worked.discard(oldest)

    def forget(self, peer: PeerId) -> None:
        """Drop `peer`, which was found to lie."""
        self._times.pop(peer, None)
        self._worked.discard(peer)

    @property
    def times(self) -> Mapping[PeerId, int]:
        """The number of times each machine was seen."""
        return self._times

    @property
    def at_work(self) -> Set[PeerId]:
        """Machines of `times` that did work which was checked here."""
        return self._worked


def machines(times: Iterable[int]) -> float:
    """Estimated number of machines, from how often each known one was seen (Chao 1984, bias-corrected); at most twice
    as many as are known."""
    seen = list(times)
    once, twice = seen.count(1), seen.count(2)
    return len(seen) + min(float(len(seen)), once * (once - 1) / (2 * (twice + 1)))

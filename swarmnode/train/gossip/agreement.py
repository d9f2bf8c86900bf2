"""Which members' gradients lead elsewhere than most, by what each has in common with the others'.

    A_j  <- a_j smoothed over rounds; member j is refused if A_j is less than AGREES of the members' median A by more
            than Z deviations, the median one of the members' a or its own, smoothed

So what a liar was let in with has, over some rounds, led where the others go, or nowhere. Two members have no majority,
and no test. Where half of the members fail the test none is refused: rounds without them would be of a few, and never
judge them anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median_low

from swarmnode.base.ema import ENOUGH, EmaMoments
from swarmnode.base.remembered import Remembered

AGREES = 1 / 8  # guess: a machine with an eighth of the usual samples still counts
Z = 2.0  # derived: of members whose true agreement is at that bound, one in 44 is refused in a round


class Agreement:
    """The agreement of all members, as one member knows it."""

    def __init__(self) -> None:
        self._known = Remembered[str, EmaMoments]()

    def refused(self, agreements: Mapping[str, float]) -> set[str]:
        """Take in a round's `agreements` by member, in squares of a usual length; returns whose gradients lead
        elsewhere."""
        if len(agreements) <= 2:
            return set()
        for sender, value in agreements.items():
            self._known[sender] = known = self._known.get(sender) or EmaMoments()
            known.add(value)
        members = {sender: self._known[sender] for sender in agreements}
        if median_low([known.count for known in members.values()]) < ENOUGH:
            return set()
        least = AGREES * median_low([known.value for known in members.values()])
        variance = median_low([known.variance for known in members.values()])

        def deviation(known: EmaMoments) -> float:
            noise = min(variance, known.variance) if known.count >= ENOUGH else variance
            return math.sqrt(noise * max(1.0 / known.count, known.weight / (2.0 - known.weight)))

        refused = {sender for sender, known in members.items() if known.value < least - Z * deviation(known)}
        return refused if 2 * len(refused) < len(members) else set()

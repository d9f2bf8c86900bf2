"""The share of each packet of a gradient that counts, by its length and the targets that it states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_high, median_low

from swarmnode.base.work import TargetCount
from swarmnode.train.gossip.round import SPEEDS_MAX

CLIP = math.sqrt(SPEEDS_MAX)  # derived: a mean's noise, most of a packet, grows with the root of a machine's samples


def shares_by_length(lengths: Sequence[float], targets: Sequence[TargetCount]) -> list[float]:
    """The share of each packet that counts, by the lengths of all and the targets that they state.

    A packet of more targets than SPEEDS_MAX times the (upper) median counts as one of so many. One longer than CLIP
    medians of the packets, each made that of as many targets, is shortened to that. The few targets of a packet that
    has next to none, such as one of a codec's rest alone, are taken for a SPEEDS_MAXth of the median."""
    counting = [count for count in targets if count]
    if not counting:
        return [1.0] * len(lengths)
    usual = median_high(counting)
    believed = [min(float(count), SPEEDS_MAX * usual) for count in targets]
    shares = [most / count if count else 1.0 for most, count in zip(believed, targets, strict=True)]
    held = [share * length for share, length in zip(shares, lengths, strict=True)]
    told = [(length, count) for length, count in zip(held, believed, strict=True) if length and count]
    for i, (length, count) in enumerate(zip(held, believed, strict=True)):
        ratios = [(other, max(count, usual / SPEEDS_MAX) / targets_there) for other, targets_there in told]
        alike = [other * max(ratio, math.sqrt(ratio)) for other, ratio in ratios]
        if alike and length > (most := CLIP * median_low(alike)):
            shares[i] *= most / length
    return shares

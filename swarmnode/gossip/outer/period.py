"""The length of a round: inner steps between two meetings, by the learning rate or by bounds.

    QSR        H = max(H_least, floor((GROWTH / rate)^2))     [quadratic synchronisation rule, arXiv 2310.14423, eq. 2]
    bounded    H between two bounds, doubled when replicas drift less than they should and halved when more

As the rate falls, replicas drift apart more slowly and need fewer meetings: fewer bytes for the same loss. QSR is
gossip.rounds = "qsr" (gossip/round.py); bounded rounds are only measured, in `swarmnode bench gossip`.
"""

from __future__ import annotations

import math

DRIFT_MOST = 2.0  # guess: replicas' distance over |D| above which they should meet more often
DRIFT_LEAST = 0.7  # guess: below this, meeting brings little


def quadratic(rate: float, growth: float, least: int, most: int = 1 << 20) -> int:
    """Inner steps of the next round at learning rate `rate`. `growth` is alpha in the paper, there 0.2 to 0.25 times
    the peak rate's square root of H."""
    assert rate >= 0.0 and growth > 0.0 and 1 <= least <= most
    if rate * math.sqrt(most) <= growth:
        return most
    return min(max(least, math.floor((growth / rate) ** 2)), most)


def bounded(steps: int, drift: float, least: int, most: int) -> tuple[int, str]:
    """(inner steps of the next round, after `steps` in which partners drifted `drift` |D| apart; the reason)."""
    if drift > DRIFT_MOST:
        return max(least, steps // 2), f"partners lie {drift:.3g} |D| apart, the limit is {DRIFT_MOST:g}"
    if drift < DRIFT_LEAST:
        return min(most, steps * 2), f"partners lie {drift:.3g} |D| apart, {DRIFT_LEAST:g} would suffice"
    return min(max(steps, least), most), f"partners lie {drift:.3g} |D| apart"

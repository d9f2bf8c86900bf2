"""A sequential test for each peer (Page's CUSUM, Biometrika 41, 1954). Its statistics: of answers pipeline/audit.py, of
packets gossip/robust.py.

The test sums, for each peer and from packet to packet, the log-likelihood ratio of a lie over an honest packet. The sum
never falls below 0:

    S  <- min(max(S + (shift / s^2) (x - shift / 2), 0), WORST LIMIT)                s: the noise, from the packets seen

with x the packet's statistic beside what is usual, and `shift` the change of it that a lie makes. A packet is taken
whole while S is at most DOUBT, refused from LIMIT on, and counts in proportion between them. The noise decides how many
packets a refusal takes: two where lies are clearly distinct, dozens where they are not.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from swarmnode.remembered import Remembered

LIMIT = math.log(1e4)  # guess: a peer is no longer believed at these odds
DOUBT = math.log(1e3)  # the tail of S is exp(-S) at most for an honest peer: one packet in a thousand is doubted
# Guess: the share of a packet that is still taken after a single packet has raised S from 0 by the most allowed.
SINGLE = 0.1
MOST = LIMIT - SINGLE * (LIMIT - DOUBT)  # by which one packet raises S
WORST = 1.5  # guess: the most of S, in LIMITs, so that a peer that stops lying is believed again after a few packets
QUANTILE, DEVIATIONS = 0.8, 0.842  # this quantile of a normal distribution lies so many deviations above its mean
RECENT = 64  # guess: the noise is estimated from so many packets


def share_kept(against: float) -> float:
    """The share of a packet to take, from 0 to 1, if the sum S of its sender is `against`."""
    return min(max((LIMIT - against) / (LIMIT - DOUBT), 0.0), 1.0)


@dataclass(slots=True)
class PeerSum:
    """The state of a test for one peer: the sum S, and the packets tried."""

    against: float = 0.0
    tried: int = 0

    def add(self, ratio: float) -> None:
        """One more packet, of log-likelihood ratio `ratio`. No single packet decides."""
        self.against = min(max(self.against + min(max(ratio, -MOST), MOST), 0.0), WORST * LIMIT)
        self.tried += 1


@dataclass
class SequentialTest:
    """One replica's sums of its peers, and the statistic of packets lately believed."""

    _peers: Remembered[str, PeerSum] = field(default_factory=Remembered, init=False)
    _recent: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self._recent = deque(maxlen=RECENT)

    def against(self, sender: str) -> float:
        """Return the sum S of `sender`; 0.0 for an unknown one."""
        return self._peers[sender].against if sender in self._peers else 0.0

    def forget(self, sender: str) -> None:
        """Drop the sum of `sender`: it is explained."""
        self._peers.pop(sender, None)

    def _peer(self, sender: str) -> PeerSum:
        known = self._peers[sender] = self._peers.get(sender) or PeerSum()
        return known

    def _usual(self, inflation: float, *, below: bool = False) -> tuple[float, float]:
        """(median, standard deviation) of the packets lately believed, which must not be none. Only those above their
        median enter the deviation (`below`: those below it), since lies lie on the other side. A spread of n packets is
        taken to be larger by sqrt(1 + inflation / n)."""
        count, ordered = len(self._recent), sorted(self._recent)
        median = statistics.median(ordered)
        spread = median - ordered[int((1.0 - QUANTILE) * count)] if below else ordered[int(QUANTILE * count)] - median
        return median, spread * math.sqrt(1.0 + inflation / count) / DEVIATIONS

"""A sequential test for each peer: does what it learned in this round agree with what we learned, as others' does?

A packet's agreement is the cosine of the sender's D and of ours, of this one round. By itself it tells nothing: where
replicas meet often, half of the honest ones disagree (robust.py). But a sender that flips the sign of what it learned
flips its agreement, too. Where the honest agree at all, liars stand apart by twice as much, from the first rounds on.
The test is evidence.py's (Page's CUSUM), with

    x     = agreement - the median agreement
    shift = -2 the median agreement                             what a flipped sign does
    S    <- min(max(S + (shift / s^2) (x - shift / 2), 0), WORST LIMIT)              s: the noise, from the packets seen

A shift within half of the noise says nothing, and S decays.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from swarmnode.gossip.evidence import DEVIATIONS, QUANTILE, added, remembered, share_kept

NOISE_LEAST = 0.2  # measured: honest agreements of one round spread by 0.05 to 0.24 (docs/measurements/attacks.md)
SHIFT_LEAST = 0.5  # guess: of the noise
RECENT = 32  # guess: agreement falls while training goes on
RECENT_LEAST = 3  # measured: 3 finds liars sooner than 4, and honest packets are whole with both
INFLATION = 4  # guess: a spread of n packets is taken to be larger by sqrt(1 + INFLATION / n)


@dataclass(slots=True)
class DoubtedPeer:
    """The sum S of a peer."""

    against: float = 0.0


@dataclass(slots=True)
class Agreement:
    """One replica's evidence about its peers, from how far what they learned agrees with what it learned."""

    _peers: dict[str, DoubtedPeer] = field(default_factory=dict)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def against(self, sender: str) -> float:
        """Return the sum S of `sender`; 0.0 for an unknown one."""
        return self._peers[sender].against if sender in self._peers else 0.0

    def heard(self, sender: str, own_norm: float, gap: float, dot: float) -> tuple[float, str]:
        """Update the test with a packet of `sender`, and return (its S, the agreement in words). Our D is `own_norm`
        long, the sender's weights lie `gap` from ours, and `dot` is the inner product of both."""
        theirs = math.sqrt(max(0.0, own_norm * own_norm + 2.0 * dot + gap * gap))
        if own_norm <= 0.0 or theirs <= 0.0 or not math.isfinite(dot):
            return self.against(sender), "nothing learned to compare"
        agreement = min(max((own_norm * own_norm + dot) / (own_norm * theirs), -1.0), 1.0)
        usual, noise = self._usual()
        known, shift = remembered(self._peers, sender, DoubtedPeer), -2.0 * max(usual, 0.0)
        x = agreement - usual
        ratio = shift / noise**2 * (x - shift / 2.0) if -shift > SHIFT_LEAST * noise else -known.against / 2.0
        known.against = added(known.against, ratio)
        if share_kept(known.against) == 1.0:  # a lie says nothing about the honest
            self._recent.append(agreement)
        return known.against, f"agrees with us by {agreement:.2f}, {usual:.2f} +- {noise:.2f} are usual"

    def _usual(self) -> tuple[float, float]:
        """(median, standard deviation) of honest agreements. Only those above their median enter the deviation, since
        liars lie below."""
        count = len(self._recent)
        if count < RECENT_LEAST:
            return 0.0, NOISE_LEAST
        ordered = sorted(self._recent)
        median = statistics.median(ordered)
        spread = ordered[min(count - 1, int(QUANTILE * count))] - median
        return median, max(NOISE_LEAST, spread * math.sqrt(1.0 + INFLATION / count) / DEVIATIONS)

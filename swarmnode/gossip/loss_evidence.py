"""A sequential test for each peer: does averaging with its packets cost loss on our own text, more than with others?

A few packets are tried: the microbatch trained last is run with our weights and with the average, and the difference
of the two losses is the packet's change. Honest packets change little, mostly for the better: both sides learned
something. A packet that takes back a round's learning costs what a round gains. Early in training, where a lie does
most harm, that stands far above the noise. Later it does not, and evidence.py takes over, which knows where the stage
is going.

The test is evidence.py's: for each peer the sum, from packet to packet, of the log-likelihood ratio of "costs SHIFT
deviations more than usual" over "changes as usual", never below 0 (Page's CUSUM):

    z   = (change - the median change) / s                      s: the noise, from the packets tried
    S  <- min(max(S + SHIFT (z - SHIFT / 2), 0), WORST LIMIT)
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

from swarmnode.gossip.evidence import DEVIATIONS, QUANTILE, added, remembered, share_kept

SHIFT = 3.0  # guess: smaller harm than three deviations of the noise is left to evidence.py
NOISE_FIRST = 0.06  # nats; measured: honest changes of first rounds are within 0.02 (5 steps) to 0.12 (50 steps)
NOISE_LEAST = 0.015  # nats; measured: honest changes spread by 0.006 to 0.024, with a longer tail where they cost
RECENT = 64  # guess: the noise is estimated from so many packets
RECENT_LEAST = 8  # guess: before so many, the noise is NOISE_FIRST at least; before half of them, that
FIRST_PROBES = 4  # guess: packets of a peer that are all tried; then PROBE_EVERY
PROBE_EVERY = 4  # guess: rounds between two probes of a known peer, on average; each costs two forwards of a microbatch


@dataclass(slots=True)
class ProbedPeer:
    """The packets of a peer tried so far, and the sum S."""

    tried: int = 0
    against: float = 0.0


@dataclass(slots=True)
class LossEvidence:
    """One replica's evidence about its peers, from what their packets cost."""

    _peers: dict[str, ProbedPeer] = field(default_factory=dict)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def due(self, sender: str, draw: int) -> bool:
        """Whether to try a packet of `sender`; `draw` is a random number. New and doubted peers' always."""
        known = self._peers.get(sender)
        return known is None or known.tried < FIRST_PROBES or known.against > 0.0 or draw % PROBE_EVERY == 0

    def against(self, sender: str) -> float:
        """Return the sum S of `sender`; 0.0 for an unknown one."""
        return self._peers[sender].against if sender in self._peers else 0.0

    def heard(self, sender: str, change: float) -> tuple[float, str]:
        """Update the test with a packet of `sender` that changes our loss by `change` nats; return (its S, in
        words)."""
        known = remembered(self._peers, sender, ProbedPeer)
        known.tried += 1
        usual, noise = self._usual()
        z = (change - usual) / noise
        known.against = added(known.against, SHIFT * (z - SHIFT / 2.0))
        if share_kept(known.against) == 1.0:  # a lie says nothing about honest noise
            self._recent.append(change)
        return known.against, f"changes our loss by {change:.3f} nat, {usual:.3f} +- {noise:.3f} are usual"

    def _usual(self) -> tuple[float, float]:
        """(median, standard deviation) of honest changes. Only changes below their median enter the deviation, since
        lies lie above it."""
        count = len(self._recent)
        if 2 * count < RECENT_LEAST:
            return 0.0, NOISE_FIRST
        ordered = sorted(self._recent)
        median = statistics.median(ordered)
        spread = median - ordered[int((1.0 - QUANTILE) * count)]
        least = NOISE_FIRST if count < RECENT_LEAST else NOISE_LEAST
        return median, max(least, spread * math.sqrt(1.0 + RECENT_LEAST / count) / DEVIATIONS)

"""A sequential test for each peer: do its packets pull back what the stage learned, and how much are they believed?

A packet's lead is the distance of its weights ahead of our own along our course (update_direction.py), in units of
our usual gain along it in a round. Honest leads lie around 0, with noise. A replica that sends phi - D instead of
phi + D leads by -2. The test sums, for each peer and from packet to packet, the log-likelihood ratio of "leads by
LIAR" over "leads as most do". The sum never falls below 0 (Page's CUSUM, Biometrika 41, 1954):

    x   = (lead - the median lead) / (1 + the median lead / 2, if positive)      among our peers and ourselves
    S  <- min(max(S + (LIAR / s^2) (x - LIAR / 2), 0), WORST LIMIT)              s: the noise, from the packets seen

A packet is taken whole while S is at most DOUBT, refused from LIMIT on, and counts in proportion between them. The
noise decides how many packets a refusal takes: two where leads are clearly distinct, dozens where they are not.
Replicas of different speeds are not mistaken for liars: the median removes what all peers have in common, and the
unit is the stage's pace. A peer that trains at less than a third of that pace lags as a liar does, and so does a
peer that fell behind. Such a peer still takes what others send, and is believed again as soon as it has caught up.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from swarmnode.ema import Ema, EmaStart

LIAR = -2.5  # leads below half of this count against a peer: a lie is -2, honest work at half the usual pace is -1
LIMIT = math.log(1e4)  # guess: a peer is no longer believed at these odds
DOUBT = math.log(1e3)  # the tail of S is exp(-S) at most for an honest peer: one packet in a thousand is doubted
# Guess: the share of a packet that is still taken after a single packet has raised S from 0 by the most allowed.
SINGLE = 0.1
MOST = LIMIT - SINGLE * (LIMIT - DOUBT)  # by which one packet raises S
WORST = 1.5  # guess: the most of S, in LIMITs, so that a peer that stops lying is believed again after a few packets
GAIN_EMA = 0.7  # measured: what a round gains falls fast early in training; means over 20 rounds are twice too large
PEER_EMA = 0.1  # guess: for a peer's lead: an average over ten packets
RECENT = 64  # guess: the noise is estimated from so many packets
RECENT_LEAST = 4  # guess: the noise is unknown before so many packets
NOISE_LEAST = 0.25  # measured: honest leads spread by 0.15 to 0.9
NOISE_MOST = 1.3  # measured (tests/gossip/test_evidence.py): with more noise liars cannot be told apart: S decays
QUANTILE, DEVIATIONS = 0.8, 0.842  # this quantile of a normal distribution lies so many deviations above its mean
PEERS_MAX = 4096  # guess: peers remembered at once; the one heard of longest ago is forgotten first


def share_kept(against: float) -> float:
    """The share of a packet to take, from 0 to 1, if the sum S of its sender is `against`."""
    return min(max((LIMIT - against) / (LIMIT - DOUBT), 0.0), 1.0)


def added(against: float, ratio: float) -> float:
    """The sum S after one packet of log-likelihood ratio `ratio`. No single packet decides."""
    return min(max(against + min(max(ratio, -MOST), MOST), 0.0), WORST * LIMIT)


Known = TypeVar("Known")


def remembered(peers: dict[str, Known], sender: str, new: Callable[[], Known]) -> Known:
    """The state of `sender`, or `new()`, moved to the end of `peers`, which then has PEERS_MAX entries at most."""
    known = peers.pop(sender, None) or new()
    peers[sender] = known  # dicts keep the order of insertion
    if len(peers) > PEERS_MAX:
        del peers[next(iter(peers))]
    return known


@dataclass(slots=True)
class PeerEvidence:
    """The state of the test for one peer: its usual lead over us, and the sum S."""

    lead: Ema = field(default_factory=lambda: Ema(PEER_EMA, EmaStart.MEAN))
    against: float = 0.0


@dataclass(slots=True)
class Evidence:
    """One replica's evidence about its peers."""

    # The usual length of D along the course.
    usual_gain: Ema = field(default_factory=lambda: Ema(GAIN_EMA, EmaStart.MEAN))
    _round: int | None = None
    _peers: dict[str, PeerEvidence] = field(default_factory=dict)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def against(self, sender: str) -> float:
        """Return the sum S of `sender`; 0.0 for an unknown one."""
        return self._peers[sender].against if sender in self._peers else 0.0

    def heard(self, sender: str, round_index: int, own: float, ahead: float) -> tuple[float, str]:
        """Update the test with a packet of `sender`, and return (its S, the packet's lead in words). The packet is
        `ahead` of our weights along the course, in which our own D is `own` long."""
        if self._round != round_index:
            self._round = round_index
            self.usual_gain.add(own)
        gain = self.usual_gain.value
        if gain <= 0.0:  # our weights do not move: there is no unit of measure
            return self.against(sender), "no course to measure by"
        lead = ahead / gain
        known = remembered(self._peers, sender, PeerEvidence)
        known.lead.add(lead)
        leads = [0.0, *(peer.lead.value for peer in self._peers.values())]
        usual = (
            statistics.median(leads) if len(leads) > 2 else max(leads)
        )  # with two there is no majority: take the larger
        x = (lead - usual) / (1.0 + max(0.0, usual) / 2.0)
        noise = self._noise()
        ratio = LIAR / noise**2 * (x - LIAR / 2.0) if noise <= NOISE_MOST else -known.against / 2.0
        known.against = added(known.against, ratio)
        # Leads of doubted peers stay out: a lie says nothing about honest noise. A peer ahead of us is never in doubt,
        # so its leads enter, and the estimate grows with the noise.
        if known.against <= DOUBT:
            self._recent.append(x)
        return known.against, f"leads by {x:.2f} of our rounds, give or take {noise:.2f}"

    def _noise(self) -> float:
        """Return the standard deviation of honest leads; infinite before RECENT_LEAST packets. Only leads above
        their median enter, since liars lie behind it."""
        count = len(self._recent)
        if count < RECENT_LEAST:
            return math.inf
        ordered = sorted(self._recent)
        spread = ordered[int(QUANTILE * count)] - statistics.median(ordered)
        return max(NOISE_LEAST, spread * math.sqrt(1.0 + RECENT_LEAST / count) / DEVIATIONS)

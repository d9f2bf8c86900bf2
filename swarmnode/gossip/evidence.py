"""How far a peer is to be believed whose packets pull back what the stage learned: a sequential test for each peer.

A packet's lead is how far its weights lie ahead of our own along our course (course.py), in units of what we usually
gain along it in a round. Honest leads lie about 0, each with its noise; a replica that sends phi - D instead of phi + D
leads by -2. For each peer the log-likelihood ratio of "leads by LIAR" over "leads as most do" is summed up from packet
to packet and never falls below 0 (Page's CUSUM, Biometrika 41, 1954):

    x   = (lead - the median lead) / (1 + the median lead / 2, if positive)      among our peers and ourselves
    S  <- min(max(S + (LIAR / s^2) (x - LIAR / 2), 0), WORST LIMIT)              s: the noise, from the packets seen

Up to DOUBT a packet is taken whole, from LIMIT on it is refused, and between them it counts in proportion. The noise
decides how many packets that takes: two where leads are told apart cleanly, dozens where they are not. Replicas of
different speeds are not mistaken for liars: the median is what all peers have in common, and the unit is the stage's
pace. A peer that trains at less than a third of that pace lags as a liar does, and so does one that fell behind; it is
believed again as soon as it has caught up, as it takes what others send all the while.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

LIAR = -2.5  # leads below half of it speak against a peer: a lie is -2, honest ones at half the usual pace are -1
LIMIT = math.log(1e4)  # guess: the odds by which a peer is no longer believed
DOUBT = math.log(1e3)  # the tail of S is exp(-S) at most for an honest peer: one packet in a thousand is doubted
SINGLE = 0.1  # guess: what a single packet takes of its sender's credit leaves as much of the packet, whatever it says
WORST = 1.5  # guess: of LIMIT, so that a peer that stops lying is believed again after a few packets
GAIN_EMA = 0.7  # measured: what a round gains falls fast early in training; means over 20 rounds are twice too large
PEER_EMA = 0.1  # guess: of a peer's lead, ten packets
RECENT = 64  # guess: packets by which the noise is estimated
RECENT_LEAST = 4  # guess: before, the noise is not known
NOISE_LEAST = 0.25  # measured: honest leads spread by 0.15 to 0.9
NOISE_MOST = 1.3  # measured (tests/gossip/test_evidence.py): beyond it nothing is told apart, and all are forgiven
QUANTILE, DEVIATIONS = 0.8, 0.842  # of a normal distribution: where its quantile lies
PEERS_MAX = 4096  # guess: remembered at once; the one heard of longest ago is forgotten first


@dataclass(slots=True)
class Peer:
    """What is known of one peer: its usual lead over us, and the sum S."""

    lead: float = 0.0
    packets: int = 0
    against: float = 0.0


@dataclass(slots=True)
class Evidence:
    """Of one replica, about its peers."""

    gain: float = 0.0  # the usual length of D along the course
    _round: int | None = None
    _rounds: int = 0
    _peers: dict[str, Peer] = field(default_factory=dict)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def against(self, sender: str) -> float:
        """S of `sender`."""
        return self._peers[sender].against if sender in self._peers else 0.0

    def keep(self, sender: str) -> float:
        """How much of a packet of `sender` is to be taken."""
        return min(max((LIMIT - self.against(sender)) / (LIMIT - DOUBT), 0.0), 1.0)

    def heard(self, sender: str, round_index: int, own: float, ahead: float) -> tuple[float, str]:
        """(S of `sender`, what its packet says), after a packet that is `ahead` of our weights along the course, in
        which our own D is `own` long."""
        if self._round != round_index:
            self._round, self._rounds = round_index, self._rounds + 1
            self.gain += (own - self.gain) * max(GAIN_EMA, 1.0 / self._rounds)
        if self.gain <= 0.0:  # we go nowhere: nothing to measure by
            return self.against(sender), "no course to measure by"
        lead = ahead / self.gain
        known = self._peers.pop(sender, None) or Peer()
        self._peers[sender] = known  # the last in order
        known.packets += 1
        known.lead += (lead - known.lead) * max(PEER_EMA, 1.0 / known.packets)
        if len(self._peers) > PEERS_MAX:
            del self._peers[next(iter(self._peers))]
        leads = [0.0, *(peer.lead for peer in self._peers.values())]
        usual = statistics.median(leads) if len(leads) > 2 else max(leads)  # of two, ours is as good as theirs
        x = (lead - usual) / (1.0 + max(0.0, usual) / 2.0)
        noise = self._noise()
        most = LIMIT - SINGLE * (LIMIT - DOUBT)
        ratio = LIAR / noise**2 * (x - LIAR / 2.0) if noise <= NOISE_MOST else -known.against / 2.0
        known.against = min(max(known.against + min(max(ratio, -most), most), 0.0), WORST * LIMIT)
        if (
            known.against <= DOUBT
        ):  # a lie says nothing of honest noise; who leads is never in doubt, and tells its growth
            self._recent.append(x)
        return known.against, f"leads by {x:.2f} of our rounds, give or take {noise:.2f}"

    def _noise(self) -> float:
        """The standard deviation of honest leads, by those ahead of their median: liars lie behind."""
        count = len(self._recent)
        if count < RECENT_LEAST:
            return math.inf
        ordered = sorted(self._recent)
        spread = ordered[int(QUANTILE * count)] - statistics.median(ordered)
        return max(NOISE_LEAST, spread * math.sqrt(1.0 + RECENT_LEAST / count) / DEVIATIONS)

"""Three statistics of a peer's packets for the sequential test: Evidence, Agreement and LossEvidence."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from swarmnode.ema import Ema, EmaStart
from swarmnode.sequential_test import DOUBT, SequentialTest, share_kept


@dataclass
class Evidence(SequentialTest):
    """Tests whether a peer's packets pull back what the stage learned.

    A packet's lead is the distance of its weights ahead of our own along our course (update_direction.py), in units of
    our usual gain along it in a round. Honest leads lie around 0, with noise. A replica that sends phi - D instead of
    phi + D leads by -2.

        x   = (lead - the median lead) / (1 + the median lead / 2, if positive)      among our peers and ourselves

    Replicas of different speeds are not mistaken for liars: the median removes what all peers have in common, and the
    unit is the stage's pace. A peer that trains at less than a third of that pace lags as a liar does, and so does a
    peer that fell behind. Such a peer still takes what others send, and is believed again as soon as it has caught up.
    """

    LIAR = -2.5  # leads below half of this count against a peer: a lie is -2, honest work at half the usual pace is -1
    GAIN_EMA = 0.7  # measured: what a round gains falls fast early in training; means over 20 rounds are twice as large
    RECENT_LEAST = 4  # guess: the noise is unknown before so many packets
    NOISE_LEAST = 0.25  # measured: honest leads spread by 0.15 to 0.9
    NOISE_MOST = 1.3  # measured (tests/gossip/test_evidence.py): with more noise liars cannot be told apart: S decays

    # The usual length of D along the course.
    usual_gain: Ema = field(default_factory=lambda: Ema(Evidence.GAIN_EMA, EmaStart.MEAN), init=False)
    _round: int | None = field(default=None, init=False)

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
        known = self._peer(sender)
        known.lead.add(lead)
        leads = [0.0, *(peer.lead.value for peer in self._peers.values())]
        # With two there is no majority: take the larger.
        usual = statistics.median(leads) if len(leads) > 2 else max(leads)
        x = (lead - usual) / (1.0 + max(0.0, usual) / 2.0)
        enough = len(self._recent) >= self.RECENT_LEAST
        noise = max(self.NOISE_LEAST, self._usual(self.RECENT_LEAST)[1]) if enough else math.inf
        decided = noise <= self.NOISE_MOST
        known.add(self.LIAR / noise**2 * (x - self.LIAR / 2.0) if decided else -known.against / 2.0)
        # Leads of doubted peers stay out: a lie says nothing about honest noise. A peer ahead of us is never in doubt,
        # so its leads enter, and the estimate grows with the noise.
        if known.against <= DOUBT:
            self._recent.append(x)
        return known.against, f"leads by {x:.2f} of our rounds, give or take {noise:.2f}"


class Agreement(SequentialTest):
    """Tests whether what a peer learned in this round agrees with what we learned, as others' does.

    A packet's agreement is the cosine of the sender's D and of ours, of this one round. By itself it tells nothing:
    where replicas meet often, half of the honest ones disagree (robust.py). But a sender that flips the sign of what it
    learned flips its agreement, too. Where the honest agree at all, liars stand apart by twice as much, from the first
    rounds on.

        x     = agreement - the median agreement
        shift = -2 the median agreement                             what a flipped sign does

    A shift within half of the noise says nothing, and S decays.
    """

    NOISE_LEAST = 0.2  # measured: honest agreements of one round spread by 0.05 to 0.24 (docs/measurements/attacks.md)
    SHIFT_LEAST = 0.5  # guess: of the noise
    recent = 32  # guess: agreement falls while training goes on
    RECENT_LEAST = 3  # measured: 3 finds liars sooner than 4, and honest packets are whole with both
    INFLATION = 4  # guess

    def heard(self, sender: str, own_norm: float, gap: float, dot: float) -> tuple[float, str]:
        """Update the test with a packet of `sender`, and return (its S, the agreement in words). Our D is `own_norm`
        long, the sender's weights lie `gap` from ours, and `dot` is the inner product of both."""
        theirs = math.sqrt(max(0.0, own_norm * own_norm + 2.0 * dot + gap * gap))
        if own_norm <= 0.0 or theirs <= 0.0 or not math.isfinite(dot):
            return self.against(sender), "nothing learned to compare"
        agreement = min(max((own_norm * own_norm + dot) / (own_norm * theirs), -1.0), 1.0)
        enough = len(self._recent) >= self.RECENT_LEAST
        usual, spread = self._usual(self.INFLATION) if enough else (0.0, 0.0)
        noise, known, shift = max(self.NOISE_LEAST, spread), self._peer(sender), -2.0 * max(usual, 0.0)
        decided = -shift > self.SHIFT_LEAST * noise
        known.add(shift / noise**2 * (agreement - usual - shift / 2.0) if decided else -known.against / 2.0)
        if share_kept(known.against) == 1.0:  # a lie says nothing about the honest
            self._recent.append(agreement)
        return known.against, f"agrees with us by {agreement:.2f}, {usual:.2f} +- {noise:.2f} are usual"


FIRST_PROBES = 4  # guess: packets of a peer that are all tried; then PROBE_EVERY
PROBE_EVERY = 4  # guess: rounds between two probes of a known peer, on average; each costs two forwards of a microbatch


class LossEvidence(SequentialTest):
    """Tests whether averaging with a peer's packets costs loss on our own text, more than with others.

    A few packets are tried: the microbatch trained last is run with our weights and with the average, and the
    difference of the two losses is the packet's change. Honest packets change little, mostly for the better: both sides
    learned something. A packet that takes back a round's learning costs what a round gains. Early in training, where a
    lie does most harm, that stands far above the noise. Later it does not, and Evidence takes over, which knows where
    the stage is going.

        x   = (change - the median change) / s,    shift = SHIFT,    s = 1
    """

    SHIFT = 3.0  # guess: smaller harm than three deviations of the noise is left to Evidence
    NOISE_FIRST = 0.06  # nats; measured: honest changes of first rounds are within 0.02 (5 steps) to 0.12 (50 steps)
    NOISE_LEAST = 0.015  # nats; measured: honest changes spread by 0.006 to 0.024, with a longer tail where they cost
    RECENT_LEAST = 8  # guess: before so many, the noise is NOISE_FIRST at least; before half of them, that

    def due(self, sender: str, draw: int) -> bool:
        """Whether to try a packet of `sender`; `draw` is a random number. New and doubted peers' always."""
        known = self._peers.get(sender)
        return known is None or known.tried < FIRST_PROBES or known.against > 0.0 or draw % PROBE_EVERY == 0

    def heard(self, sender: str, change: float) -> tuple[float, str]:
        """Update the test with a packet of `sender` that changes our loss by `change` nats; return (its S, in
        words)."""
        count = len(self._recent)
        usual, spread = (0.0, 0.0) if 2 * count < self.RECENT_LEAST else self._usual(self.RECENT_LEAST, below=True)
        noise = max(self.NOISE_FIRST if count < self.RECENT_LEAST else self.NOISE_LEAST, spread)
        known = self._peer(sender)
        known.add(self.SHIFT * ((change - usual) / noise - self.SHIFT / 2.0))
        if share_kept(known.against) == 1.0:  # a lie says nothing about honest noise
            self._recent.append(change)
        return known.against, f"changes our loss by {change:.3f} nat, {usual:.3f} +- {noise:.3f} are usual"

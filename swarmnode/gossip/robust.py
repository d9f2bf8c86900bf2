"""Decides how much of a partner's packet is believed, from a few numbers, cheapest check first.

Format, range and finiteness are the codec's checks, before anything is decoded. Then, of the partner's weights theta_j
against our own theta_i, slow weights phi_i and pseudo-gradient D_i = theta_i - phi_i:

    1. norm       the distance g = |theta_j - theta_i| is clipped to L: the usual distance of what was accepted before,
                  with Z deviations above it, and at most CLIP |D_i|. Beyond CLIP L the clip comes down again as
                  1 / g^2: absurd packets count for nothing, and replicas that a partition parted still meet.
    2. loss       a few packets are tried on our own text; those of a peer whose packets cost more than others' count
                  for less, and are refused once the evidence of several is overwhelming (`LossEvidence`)

Step 1 is always safe: an honest packet is never refused. Under a sign flip by a quarter of the replicas it leaves .05
nat, and step 2 some .02 of these; tests of a packet's direction, against ours or the past course of the weights, took
.002 and .006 off and are gone (docs/measurements/attacks.md). The clip that comes down again is a redescending
M-estimator (Hampel et al., Robust Statistics, 1986), about one's own weights centred clipping [arXiv 2012.10333]. When
nothing is accepted the round is a lone step for this replica, which is always valid. What step 2 adds is measured by
`swarmnode bench attack` (docs/measurements/attacks.md).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from swarmnode.ema import Ema, EmaMoments, EmaStart
from swarmnode.ports import Verdict
from swarmnode.sequential_test import LIMIT, SequentialTest, share_kept

CLIP = 4.0  # measured (8 replicas, 40 rounds): seed 0: honest gaps were 0.5 to 2.5 times |D|
FIRST_CLIP = 0.1  # guess: of |phi_i|, where nothing was learned yet
HISTORY_LEAST = 5  # guess: packets accepted before history speaks
Z = 4.0  # guess
DEVIATION_LEAST = 0.2  # guess: of the logarithm; honest gaps wander by a factor of 1.2 without meaning harm

LOSS_MOST = 0.2  # nats; guess: of honest averages 2 % cost more than 0.05 in early rounds (8 replicas, 25 rounds)
PROBE_EVERY = 4  # guess: rounds between two probes of a known peer, on average, and packets of a new one that are all
# tried; each costs two forwards of a microbatch

ALL, CLIPPED, GUARDED = "all", "clipped", "guarded"
"""gossip.acceptance: what is well-formed; step 1; every step."""

ENOUGH = f" against it, {LIMIT:.1f} is enough"
EQUAL = "equal to our own"
STEPS = ("accepted", "clipped", "norm", "loss", "misshapen", "newcomer")


@dataclass(frozen=True, slots=True)
class PacketMeasures:
    """Measures of one packet: |D_i|, |theta_j - theta_i| and |phi_i|. For a packet of D_j, theta_j = phi_i + D_j."""

    own_norm: float
    gap: float
    weights_norm: float = math.inf


class LossEvidence(SequentialTest):
    """Tests whether averaging with a peer's packets costs loss on our own text, more than with others.

    A few packets are tried: the microbatch trained last is run with our weights and with the average, and the
    difference of the two losses is the packet's change. Honest packets change little, mostly for the better: both sides
    learned something. A packet that takes back a round's learning costs what a round gains. Early in training, where a
    lie does most harm, that stands far above the noise; later it does not, and is clipped.

        x   = (change - the median change) / s,    shift = SHIFT,    s = 1
    """

    SHIFT = 3.0  # guess: smaller harm than three deviations of the noise is left to the clip
    NOISE_FIRST = 0.06  # nats; measured: honest changes of first rounds are within 0.02 (5 steps) to 0.12 (50 steps)
    NOISE_LEAST = 0.015  # nats; measured: honest changes spread by 0.006 to 0.024, with a longer tail where they cost
    RECENT_LEAST = 8  # guess: before so many, the noise is NOISE_FIRST at least; before half of them, that

    def due(self, sender: str, draw: int) -> bool:
        """Whether to try a packet of `sender`; `draw` is a random number. New and doubted peers' always."""
        known = self._peers.get(sender)
        return known is None or known.tried < PROBE_EVERY or known.against > 0.0 or draw % PROBE_EVERY == 0

    def observe(self, sender: str, change: float) -> tuple[float, str]:
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


@dataclass(slots=True)
class PacketGuard:
    """One replica's memory of what it accepted. `counts` by step, for metrics and reports."""

    # Of log(g / |D_i|) over what was accepted.
    ratios: EmaMoments = field(default_factory=EmaMoments)
    # The usual |D_i|: a replica that trained nothing in a round is no easier to mislead.
    own_norm: Ema = field(default_factory=lambda: Ema(start=EmaStart.MEAN))
    counts: Counter[str] = field(default_factory=Counter)
    losses: LossEvidence = field(default_factory=LossEvidence)

    def judge(self, measures: PacketMeasures) -> Verdict:
        """The verdict on a packet by its distance; it is counted, and what is accepted becomes history."""
        verdict = self.decide(measures)
        self.counts[verdict.step] += 1
        if verdict.keep > 0.0 and measures.gap > 0.0 and measures.own_norm > 0.0:
            ratio = min(max(measures.gap / measures.own_norm, 1 / CLIP), CLIP)
            self.ratios.add(math.log(ratio))
            self.own_norm.add(measures.own_norm)
        return verdict

    def limit(self, measures: PacketMeasures) -> tuple[float, str]:
        """(the distance up to which a packet is taken whole, by what)."""
        own = max(measures.own_norm, self.own_norm.value)
        if own == 0.0:
            return FIRST_CLIP * measures.weights_norm, f"{FIRST_CLIP:g} times our weights"
        factor = CLIP
        if self.ratios.count >= HISTORY_LEAST:
            deviation = max(math.sqrt(self.ratios.variance), DEVIATION_LEAST)
            factor = min(CLIP, max(1.0, math.exp(self.ratios.value + Z * deviation)))
        return factor * own, f"{factor:.3g} times our pseudo-gradient"

    def decide(self, measures: PacketMeasures) -> Verdict:
        """The verdict by distance alone: nothing changes."""
        gap = measures.gap
        if not (math.isfinite(measures.own_norm) and math.isfinite(gap)):
            return Verdict(0.0, "norm", "norms that are not finite")
        if gap == 0.0:
            return Verdict(1.0, "accepted", EQUAL)
        limit, of_what = self.limit(measures)
        ratio = gap / limit if limit > 0.0 else math.inf
        if ratio > 1.0:
            keep = min(1.0, CLIP / ratio) ** 2 / ratio
            return Verdict(keep, "clipped", f"{ratio:.3g} times as far as {of_what}")
        return Verdict(1.0, "accepted", f"within {of_what}")

    def judge_loss(self, verdict: Verdict, sender: str, change: float | None) -> Verdict:
        """The last step: `verdict`, or less of a packet whose sender costs loss. `change`: by how many nats the average
        with this packet is worse than our weights on our own text; None if it was not tried."""
        what = "not tried"
        if change is not None:
            _, what = self.losses.observe(sender, LOSS_MOST if math.isnan(change) else change)
            if not change <= LOSS_MOST:
                self.counts["loss"] += 1
                return Verdict(0.0, "loss", f"the average costs {change:.3f} nat on our own text")
        against = self.losses.against(sender)
        if verdict.keep == 0.0 or (believed := share_kept(against)) == 1.0:
            return verdict
        self.counts["loss"] += 1
        return Verdict(believed * verdict.keep, "loss", f"{what}: {against:.1f}{ENOUGH}")


def guard(acceptance: str) -> PacketGuard | None:
    """Return the guard for a manifest's gossip.acceptance; None accepts every well-formed packet."""
    return None if acceptance == ALL else PacketGuard()

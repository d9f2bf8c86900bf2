"""What of a partner's packet is believed: decisions from a few numbers, cheapest first.

Format, range and finiteness are the codec's checks, before anything is decoded. Then, of the partner's weights theta_j
against our own theta_i, slow weights phi_i and pseudo-gradient D_i = theta_i - phi_i:

    1. norm       the distance g = |theta_j - theta_i| is clipped to L: the usual distance of what was accepted before,
                  with Z deviations above it, and at most CLIP |D_i|. Beyond CLIP L the clip comes down again as
                  1 / g^2: absurd packets count for nothing, and replicas that a partition parted still meet.
    2. direction  packets of a peer that pull back along the way the stage has been going count for less, and are
                  refused once the evidence of several of them is overwhelming (evidence.py)

Step 1 is always safe: an honest packet is never refused. Alone it leaves +0.4 nat under a sign flip by a quarter of the
replicas (measured: swarmnode bench attack); step 2 is what stops that. The cosine of one packet with our own D_i says
nothing: honest ones are negative where replicas meet often, because what we learned last is noise that our partners do
not share. The clip that comes down again is a redescending M-estimator (Hampel et al., Robust Statistics, 1986);
clipping about one's own weights is centred clipping [arXiv 2012.10333]. When nothing is accepted the round is a lone
step for this replica, which is always valid.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from swarmnode.gossip.evidence import LIMIT, Evidence
from swarmnode.ports import Verdict

CLIP = 4.0  # measured (8 replicas, 40 rounds): seed 0: honest gaps were 0.5 to 2.5 times |D|
FIRST_CLIP = 0.1  # guess: of |phi_i|, where nothing was learned yet
HISTORY_LEAST = 5  # guess: packets accepted before history speaks
HISTORY_EMA = 0.1  # guess
Z = 4.0  # guess
DEVIATION_LEAST = 0.2  # guess: of the logarithm; honest gaps wander by a factor of 1.2 without meaning harm
LOSS_MOST = 0.2  # nats; guess: of honest averages 2 % cost more than 0.05 in early rounds (8 replicas, 25 rounds)
PROBE_EVERY = 4  # guess: rounds between two probes, on average; each costs two forwards of a microbatch

ALL, CLIPPED, GUARDED = "all", "clipped", "guarded"
ACCEPTANCES = (ALL, CLIPPED, GUARDED)
"""gossip.acceptance: what is well-formed; step 1; every step."""

STEPS = ("accepted", "clipped", "norm", "direction", "loss", "misshapen", "newcomer")


@dataclass(frozen=True, slots=True)
class Measures:
    """Of one packet: |D_i|, |theta_j - theta_i| and |phi_i|; along our course (course.py) D_i and theta_j - theta_i,
    None while there is no course. Of a packet of D_j: theta_j = phi_i + D_j."""

    own_norm: float
    gap: float
    weights_norm: float = math.inf
    own_along: float | None = None
    gap_along: float | None = None


@dataclass(slots=True)
class Guard:
    """One replica's memory of what it accepted. `counts` by step, for metrics and reports."""

    direction: bool = True  # whether step 2 is taken
    mean: float = 0.0  # of log(g / |D_i|) over what was accepted
    variance: float = 0.0
    seen: int = 0
    own_norm: float = 0.0  # the usual |D_i|: who trained nothing in a round is no easier to mislead
    counts: Counter[str] = field(default_factory=Counter)
    evidence: Evidence = field(default_factory=Evidence)

    def judge(self, measures: Measures, sender: str = "", round_index: int = 0) -> Verdict:
        """The verdict on a packet of `sender`, of whom nothing is remembered if it is ""; it is counted, and what is
        accepted becomes history."""
        verdict = self.decide(measures)
        if verdict.keep > 0.0 and self.direction and sender:
            verdict = self._along(verdict, measures, sender, round_index)
        self.counts[verdict.step] += 1
        if verdict.keep > 0.0 and measures.gap > 0.0 and measures.own_norm > 0.0:
            ratio = min(max(measures.gap / measures.own_norm, 1 / CLIP), CLIP)
            self._remember(math.log(ratio), measures.own_norm)
        return verdict

    def _along(self, verdict: Verdict, measures: Measures, sender: str, round_index: int) -> Verdict:
        """`verdict`, or less of a packet whose sender pulls back."""
        own, ahead = measures.own_along, measures.gap_along
        if own is None or ahead is None:
            return verdict
        against, what = self.evidence.heard(sender, round_index, own, ahead)
        believed = self.evidence.keep(sender)
        if believed == 1.0:
            return verdict
        return Verdict(believed * verdict.keep, "direction", f"{what}: {against:.1f} against it, {LIMIT:.1f} is enough")

    def limit(self, measures: Measures) -> tuple[float, str]:
        """(the distance up to which a packet is taken whole, by what)."""
        own = max(measures.own_norm, self.own_norm)
        if own == 0.0:
            return FIRST_CLIP * measures.weights_norm, f"{FIRST_CLIP:g} times our weights"
        factor = CLIP
        if self.seen >= HISTORY_LEAST:
            deviation = max(math.sqrt(self.variance), DEVIATION_LEAST)
            factor = min(CLIP, max(1.0, math.exp(self.mean + Z * deviation)))
        return factor * own, f"{factor:.3g} times our pseudo-gradient"

    def decide(self, measures: Measures) -> Verdict:
        """The verdict by distance alone: nothing changes."""
        gap = measures.gap
        if not (math.isfinite(measures.own_norm) and math.isfinite(gap)):
            return Verdict(0.0, "norm", "norms that are not finite")
        if gap == 0.0:
            return Verdict(1.0, "accepted", "equal to our own")
        limit, of_what = self.limit(measures)
        ratio = gap / limit if limit > 0.0 else math.inf
        if ratio > 1.0:
            keep = min(1.0, CLIP / ratio) ** 2 / ratio
            return Verdict(keep, "clipped", f"{ratio:.3g} times as far as {of_what}")
        return Verdict(1.0, "accepted", f"within {of_what}")

    def judge_loss(self, change: float) -> Verdict:
        """The last step, for the packets that are probed: by how many nats the average's loss on our own text is above
        that of our weights."""
        if not change <= LOSS_MOST:
            self.counts["loss"] += 1
            return Verdict(0.0, "loss", f"the average costs {change:.3f} nat on our own text")
        return Verdict(1.0, "accepted", f"the average changes our loss by {change:.3f} nat")

    def _remember(self, value: float, own_norm: float) -> None:
        self.seen += 1
        weight = max(HISTORY_EMA, 1.0 / self.seen)
        moved = value - self.mean
        self.mean += weight * moved
        self.variance = (1.0 - weight) * (self.variance + weight * moved * moved)
        self.own_norm += weight * (own_norm - self.own_norm)


def guard(acceptance: str) -> Guard | None:
    """The guard for a manifest's gossip.acceptance; None believes whatever is well-formed."""
    return None if acceptance == ALL else Guard(direction=acceptance == GUARDED)

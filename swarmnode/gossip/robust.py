"""Decides how much of a partner's packet is believed, from a few numbers, cheapest check first.

Format, range and finiteness are the codec's checks, before anything is decoded. Then, of the partner's weights theta_j
against our own theta_i, slow weights phi_i and pseudo-gradient D_i = theta_i - phi_i:

    1. norm       the distance g = |theta_j - theta_i| is clipped to L: the usual distance of what was accepted before,
                  with Z deviations above it, and at most CLIP |D_i|. Beyond CLIP L the clip comes down again as
                  1 / g^2: absurd packets count for nothing, and replicas that a partition parted still meet.
    2. direction  packets of a peer that pull back along the way the stage has been going, or disagree with what we
                  learned where others agree, count for less, and are refused once the evidence of several of them is
                  overwhelming
    3. loss       a few packets are tried on our own text; what costs more than others' does counts for less. What the
                  three tests (sequential_test.py) find does not add up: the worst of it counts.

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

from swarmnode.ema import Ema, EmaMoments, EmaStart
from swarmnode.gossip.sequential_test import Agreement, Evidence, LossEvidence
from swarmnode.ports import Verdict
from swarmnode.sequential_test import LIMIT, share_kept

CLIP = 4.0  # measured (8 replicas, 40 rounds): seed 0: honest gaps were 0.5 to 2.5 times |D|
FIRST_CLIP = 0.1  # guess: of |phi_i|, where nothing was learned yet
HISTORY_LEAST = 5  # guess: packets accepted before history speaks
HISTORY_EMA = 0.1  # guess
Z = 4.0  # guess
DEVIATION_LEAST = 0.2  # guess: of the logarithm; honest gaps wander by a factor of 1.2 without meaning harm
LOSS_MOST = 0.2  # nats; guess: of honest averages 2 % cost more than 0.05 in early rounds (8 replicas, 25 rounds)

ALL, CLIPPED, GUARDED = "all", "clipped", "guarded"
"""gossip.acceptance: what is well-formed; step 1; every step."""

ENOUGH = f" against it, {LIMIT:.1f} is enough"
EQUAL = "equal to our own"
STEPS = ("accepted", "clipped", "norm", "direction", "loss", "misshapen", "newcomer")


@dataclass(frozen=True, slots=True)
class PacketMeasures:
    """Measures of one packet: |D_i|, |theta_j - theta_i| and |phi_i|. D_i and theta_j - theta_i along our course
    (update_direction.py) are None while there is no course. `gap_dot` is their inner product, None if we have nothing
    to compare with. For a packet of D_j, theta_j = phi_i + D_j."""

    own_norm: float
    gap: float
    weights_norm: float = math.inf
    own_along: float | None = None
    gap_along: float | None = None
    gap_dot: float | None = None


@dataclass(slots=True)
class PacketGuard:
    """One replica's memory of what it accepted. `counts` by step, for metrics and reports."""

    direction: bool = True  # whether step 2 is taken
    # Of log(g / |D_i|) over what was accepted.
    ratios: EmaMoments = field(default_factory=lambda: EmaMoments(HISTORY_EMA))
    # The usual |D_i|: a replica that trained nothing in a round is no easier to mislead.
    own_norm: Ema = field(default_factory=lambda: Ema(HISTORY_EMA, EmaStart.MEAN))
    counts: Counter[str] = field(default_factory=Counter)
    evidence: Evidence = field(default_factory=Evidence)
    agreement: Agreement = field(default_factory=Agreement)
    losses: LossEvidence = field(default_factory=LossEvidence)

    def judge(self, measures: PacketMeasures, sender: str = "", round_index: int = 0) -> Verdict:
        """The verdict on a packet of `sender`, of whom nothing is remembered if it is ""; it is counted, and what is
        accepted becomes history."""
        verdict = self.decide(measures)
        if verdict.keep > 0.0 and self.direction and sender:
            verdict = self._along(verdict, measures, sender, round_index)
        self.counts[verdict.step] += 1
        if verdict.keep > 0.0 and measures.gap > 0.0 and measures.own_norm > 0.0:
            ratio = min(max(measures.gap / measures.own_norm, 1 / CLIP), CLIP)
            self.ratios.add(math.log(ratio))
            self.own_norm.add(measures.own_norm)
        return verdict

    def _along(self, verdict: Verdict, measures: PacketMeasures, sender: str, round_index: int) -> Verdict:
        """`verdict`, or less of a packet whose sender pulls back."""
        own, ahead, dot, words = measures.own_along, measures.gap_along, measures.gap_dot, list[str]()
        if own is not None and ahead is not None:
            words.append(self.evidence.heard(sender, round_index, own, ahead)[1])
        if dot is not None:
            words.append(self.agreement.heard(sender, measures.own_norm, measures.gap, dot)[1])
        against = self._against(sender)
        if not words or (believed := share_kept(against)) == 1.0:
            return verdict
        return Verdict(believed * verdict.keep, "direction", f"{'; '.join(words)}: {against:.1f}{ENOUGH}")

    def _against(self, sender: str) -> float:
        """The evidence against `sender` by its direction. Not a sum: both tests see the same noise."""
        return max(self.evidence.against(sender), self.agreement.against(sender))

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
            if not change <= LOSS_MOST:
                self.counts["loss"] += 1
                self.losses.heard(sender, LOSS_MOST if math.isnan(change) else change)
                return Verdict(0.0, "loss", f"the average costs {change:.3f} nat on our own text")
            _, what = self.losses.heard(sender, change)
        against = self.losses.against(sender)
        if verdict.keep == 0.0 or (believed := share_kept(against)) == 1.0:
            return verdict
        already = share_kept(self._against(sender)) if verdict.step == "direction" else 1.0
        if believed >= already:
            return verdict
        self.counts["loss"] += 1
        return Verdict(believed / already * verdict.keep, "loss", f"{what}: {against:.1f}{ENOUGH}")


def guard(acceptance: str) -> PacketGuard | None:
    """Return the guard for a manifest's gossip.acceptance; None accepts every well-formed packet."""
    return None if acceptance == ALL else PacketGuard(direction=acceptance == GUARDED)

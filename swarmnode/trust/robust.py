"""Decides how much of a partner's packet is believed, from a few numbers.

Format, range and finiteness are the codec's checks, before anything is decoded. Then, of the partner's weights theta_j
against our own theta_i, slow weights phi_i and pseudo-gradient D_i = theta_i - phi_i:

    the distance g = |theta_j - theta_i| is clipped to L: the usual distance of what was accepted before, with Z
    deviations above it, and at most CLIP |D_i|. Beyond CLIP L the clip comes down again as 1 / g^2: absurd packets
    count for nothing, and replicas that a partition parted still meet.

An honest packet is never refused. Under a sign flip by a quarter of the replicas .05 nat are left; tests of a packet's
direction, against ours or the past course of the weights, and of its loss on our own text took .002, .006 and .021 off
and are gone (docs/measurements/attacks.md). The clip that comes down again is a redescending M-estimator (Hampel et
al., Robust Statistics, 1986), about one's own weights centred clipping [arXiv 2012.10333]. When nothing is accepted the
round is a lone step for this replica, which is always valid.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from swarmnode.base.ema import ENOUGH, Ema, EmaMoments, EmaStart
from swarmnode.base.ports import EQUAL, PacketMeasures, Verdict

CLIP = 4.0  # measured (8 replicas, 40 rounds): seed 0: honest gaps were 0.5 to 2.5 times |D|
FIRST_CLIP = 0.1  # guess: of |phi_i|, where nothing was learned yet
Z = 4.0  # derived: of honest gaps, normal in the logarithm, one in 30,000 is larger
DEVIATION_LEAST = 0.2  # guess: of the logarithm; honest gaps wander by a factor of 1.2 without meaning harm

STEPS = ("accepted", "clipped", "norm", "misshapen", "newcomer", "direction")


@dataclass(slots=True)
class PacketGuard:
    """One replica's memory of what it accepted. `counts` by step, for metrics and reports."""

    # Of log(g / |D_i|) over what was accepted.
    ratios: EmaMoments = field(default_factory=EmaMoments)
    # The usual |D_i|: a replica that trained nothing in a round is no easier to mislead.
    own_norm: Ema = field(default_factory=lambda: Ema(start=EmaStart.MEAN))
    counts: Counter[str] = field(default_factory=Counter)

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
        if self.ratios.count >= ENOUGH:
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

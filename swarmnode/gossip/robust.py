"""What of a partner's packet is believed: decisions from a few numbers, cheapest first (design section 5).

Format, range and finiteness are the codec's checks, before anything is decoded. Then, of the partner's weights theta_j
against our own theta_i, slow weights phi_i and pseudo-gradient D_i = theta_i - phi_i:

    1. norm       g = |theta_j - theta_i| is clipped to CLIP |D_i|; beyond ABSURD |D_i| the packet is refused
    2. history    log(g / |D_i|) more than Z deviations above the mean of what was accepted before: refused
    3. direction  the cosine of theta_j - phi_i and D_i is below COSINE_LEAST: refused
    4. loss       on text of our own the average is worse than our weights by more than LOSS_MOST: refused

Clipping alone leaves +0.4 nat under a sign flip by a quarter of the replicas (design section 5, measured); step 3 is
what stops it. The z-test is that of EDiT [arXiv 2412.07210] on one's own view. With three or more members `nearest`
keeps those closest to our own weights (MoNNA, Farhadkhani et al., ICML 2023). A refused packet makes the round a lone
step for this replica, which is always valid.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

CLIP = 4.0  # measured (8 replicas, 40 rounds): seed 0: honest gaps were 0.5 to 2.5 times |D|
ABSURD = 50.0  # guess
HISTORY_LEAST = 5  # guess: packets accepted before history speaks
HISTORY_EMA = 0.1  # guess
Z = 4.0  # guess
DEVIATION_LEAST = 0.2  # guess: of the logarithm; honest gaps wander by a factor of 1.2 without meaning harm
COSINE_LEAST = 0.02  # measured (seed 0): honest 0.11 to 0.89, flipped -0.05 to -0.93; chance 0.003 at 10^5 parameters
LOSS_MOST = 0.05  # guess, nats

STEPS = ("accepted", "clipped", "norm", "history", "direction", "loss")


@dataclass(frozen=True, slots=True)
class Measures:
    """Of one packet: |D_i|, |theta_j - phi_i|, |theta_j - theta_i|, and the inner product (theta_j - phi_i) · D_i."""

    own_norm: float
    norm: float
    gap: float
    product: float

    @property
    def cosine(self) -> float:
        scale = self.own_norm * self.norm
        return self.product / scale if scale > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How much of the partner's distance is taken (0: refused), the step that decided, and why."""

    keep: float
    step: str
    reason: str


@dataclass(slots=True)
class Guard:
    """One replica's memory of what it accepted. `counts` by step, for metrics and reports."""

    mean: float = 0.0
    variance: float = 0.0
    seen: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def judge(self, measures: Measures) -> Verdict:
        """The verdict on a packet; it is counted, and what is accepted becomes history."""
        verdict = self.decide(measures)
        self.counts[verdict.step] += 1
        if verdict.keep > 0.0 and measures.gap > 0.0 and measures.own_norm > 0.0:
            self._remember(math.log(min(measures.gap / measures.own_norm, CLIP)))
        return verdict

    def decide(self, measures: Measures) -> Verdict:
        """The verdict alone: nothing changes."""
        own, gap = measures.own_norm, measures.gap
        if not all(map(math.isfinite, (own, gap, measures.norm, measures.product))):
            return Verdict(0.0, "norm", "norms that are not finite")
        if own == 0.0 or gap == 0.0:  # nothing learned here, or they are where we are: nothing to judge by
            return Verdict(1.0, "accepted", "no distance to judge")
        ratio = gap / own
        if ratio > ABSURD:
            return Verdict(0.0, "norm", f"{ratio:.3g} times our pseudo-gradient away; {ABSURD:g} is absurd")
        if self.seen >= HISTORY_LEAST:
            deviation = max(math.sqrt(self.variance), DEVIATION_LEAST)
            z = (math.log(ratio) - self.mean) / deviation
            if z > Z:
                usual = math.exp(self.mean)
                return Verdict(0.0, "history", f"{ratio:.3g} times our pseudo-gradient away; {usual:.3g} is usual")
        if measures.cosine < COSINE_LEAST:
            return Verdict(
                0.0, "direction", f"cosine {measures.cosine:.3f} with what we learned; {COSINE_LEAST} is least"
            )
        if ratio > CLIP:
            return Verdict(CLIP / ratio, "clipped", f"{ratio:.3g} times our pseudo-gradient away, clipped to {CLIP:g}")
        return Verdict(1.0, "accepted", f"cosine {measures.cosine:.3f}, {ratio:.3g} times our pseudo-gradient away")

    def judge_loss(self, own_nats: float, averaged_nats: float) -> Verdict:
        """The last step, for the packets that are probed: our weights' loss and that of the average, on our text."""
        if not averaged_nats <= own_nats + LOSS_MOST:
            self.counts["loss"] += 1
            return Verdict(0.0, "loss", f"the average costs {averaged_nats - own_nats:.3f} nat on our own text")
        return Verdict(1.0, "accepted", f"the average changes our loss by {averaged_nats - own_nats:.3f} nat")

    def _remember(self, value: float) -> None:
        self.seen += 1
        weight = max(HISTORY_EMA, 1.0 / self.seen)
        moved = value - self.mean
        self.mean += weight * moved
        self.variance = (1.0 - weight) * (self.variance + weight * moved * moved)


def nearest(gaps: Sequence[float], liars_most: int) -> list[int]:
    """MoNNA: of the other members by their distance to our own weights, all but the `liars_most` farthest (and none
    that is not finite), in their order. Ties go to the earlier."""
    finite = [i for i, gap in enumerate(gaps) if math.isfinite(gap)]
    keep = max(len(gaps) - liars_most, 0)
    return sorted(sorted(finite, key=lambda i: (gaps[i], i))[:keep])

"""What of a partner's packet is believed: decisions from a few numbers, cheapest first (design section 5).

Format, range and finiteness are the codec's checks, before anything is decoded. Then, of the partner's weights theta_j
against our own theta_i, slow weights phi_i and pseudo-gradient D_i = theta_i - phi_i:

    1. norm       the distance g = |theta_j - theta_i| is clipped to L: the usual distance of what was accepted before,
                  with Z deviations above it, and at most CLIP |D_i|. Beyond CLIP L the clip comes down again as
                  1 / g^2: absurd packets count for nothing, and replicas that a partition parted still meet.
    2. direction  the cosine of theta_j - phi_i and D_i is negative: refused; below COSINE_WHOLE: taken in proportion
    3. loss       on text of our own the average is worse than our weights by more than LOSS_MOST: refused

Step 1 is always safe: an honest packet is never refused. Alone it leaves +0.4 nat under a sign flip by a quarter of the
replicas (design section 5, measured); step 2 is what stops that. The clip that comes down again is a redescending
M-estimator (Hampel et al., Robust Statistics, 1986); clipping about one's own weights is centred clipping
[arXiv 2012.10333]. When nothing is accepted the round is a lone step for this replica, which is always valid.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from swarmnode.ports import Verdict

CLIP = 4.0  # measured (8 replicas, 40 rounds): seed 0: honest gaps were 0.5 to 2.5 times |D|
FIRST_CLIP = 0.1  # guess: of |phi_i|, where nothing was learned yet
HISTORY_LEAST = 5  # guess: packets accepted before history speaks
HISTORY_EMA = 0.1  # guess
Z = 4.0  # guess
DEVIATION_LEAST = 0.2  # guess: of the logarithm; honest gaps wander by a factor of 1.2 without meaning harm
COSINE_WHOLE = (
    0.04  # measured (8 replicas, 40 rounds): 1 % of honest cosines lie below 0, and 2 to 4 % of flipped above
)
LOSS_MOST = (
    0.05  # nats; measured (8 replicas, 25 rounds, 2 seeds): 2 % of honest averages cost more, and in early rounds
)
PROBE_EVERY = 4  # guess: rounds between two probes, on average; each costs two forwards of a microbatch

ALL, CLIPPED, GUARDED = "all", "clipped", "guarded"
ACCEPTANCES = (ALL, CLIPPED, GUARDED)
"""gossip.acceptance: what is well-formed; step 1; every step."""

STEPS = ("accepted", "clipped", "norm", "direction", "loss", "misshapen", "newcomer")


@dataclass(frozen=True, slots=True)
class Measures:
    """Of one packet: |D_i|, |theta_j - phi_i|, |theta_j - theta_i|, the inner product (theta_j - phi_i) · D_i, and
    |phi_i|. Of a packet of D_j: theta_j = phi_i + D_j, and where it says nothing what we have ourselves."""

    own_norm: float
    norm: float
    gap: float
    product: float
    weights_norm: float = math.inf
    own_there: float | None = None  # |D_i| over those coordinates alone that the packet speaks of; None: all

    @property
    def cosine(self) -> float:
        scale = (self.own_norm if self.own_there is None else self.own_there) * self.norm
        return self.product / scale if scale > 0.0 else 0.0


@dataclass(slots=True)
class Guard:
    """One replica's memory of what it accepted. `counts` by step, for metrics and reports."""

    direction: bool = True  # whether step 2 is taken
    mean: float = 0.0  # of log(g / |D_i|) over what was accepted
    variance: float = 0.0
    seen: int = 0
    own_norm: float = 0.0  # the usual |D_i|: who trained nothing in a round is no easier to mislead
    counts: Counter[str] = field(default_factory=Counter)

    def judge(self, measures: Measures) -> Verdict:
        """The verdict on a packet; it is counted, and what is accepted becomes history."""
        verdict = self.decide(measures)
        self.counts[verdict.step] += 1
        if verdict.keep > 0.0 and measures.gap > 0.0 and measures.own_norm > 0.0:
            ratio = min(max(measures.gap / measures.own_norm, 1 / CLIP), CLIP)
            self._remember(math.log(ratio), measures.own_norm)
        return verdict

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
        """The verdict alone: nothing changes."""
        gap = measures.gap
        if not all(map(math.isfinite, (measures.own_norm, gap, measures.norm, measures.product))):
            return Verdict(0.0, "norm", "norms that are not finite")
        if gap == 0.0:
            return Verdict(1.0, "accepted", "equal to our own")
        keep, what = self._toward(measures)
        if keep == 0.0:
            return Verdict(0.0, "direction", what)
        limit, of_what = self.limit(measures)
        ratio = gap / limit if limit > 0.0 else math.inf
        if ratio > 1.0:
            keep *= min(1.0, CLIP / ratio) ** 2 / ratio
            return Verdict(keep, "clipped", f"{what}, {ratio:.3g} times as far as {of_what}")
        return Verdict(keep, "accepted", f"{what}, within {of_what}")

    def _toward(self, measures: Measures) -> tuple[float, str]:
        """(how much of a packet its direction allows, why)."""
        cosine = measures.cosine
        what = f"cosine {cosine:.3f} with what we learned"
        if not self.direction or measures.own_norm == 0.0:
            return 1.0, what
        return min(max(cosine / COSINE_WHOLE, 0.0), 1.0), what

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

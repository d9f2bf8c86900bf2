"""Choose the answers to audit, judge the votes, add up what they show of each replica, and decide on exclusions. Pure.

A caller has another replica recompute a small share of each replica's answers, without announcing which. The share
starts high, falls for a replica that has been right for long, and rises after a wrong answer. LIES contradicted answers
exclude a replica.

Two honest replicas of a stage never have equal weights: each is some inner steps ahead or behind, and one may have
trained on this very microbatch meanwhile. So an answer is not wrong by its absolute distance, but by a distance much
larger than the one between the other answers (`wrong`), and than the one that age explains (`beyond_age`). Where age
may explain it, its server's own weights decide, and it counts half: they may have met others since.

A liar may keep each answer within those bounds and have their mean point elsewhere. So what single checks show is
added up (`Shortfall`): answers that are each a little farther from others' than is usual in their stage suspect their
server, and its own weights decide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from swarmnode.ids import PeerId
from swarmnode.sequential_test import DOUBT, LIMIT, MOST, SequentialTest

FIRST_SHARE, FIRST_RIGHT = 0.25, 2  # guess: share of an unknown replica's answers, until so many were right
# Factor on the manifest's share, until so many were right. Measured (`bench attack --pipeline --every 10`): with 2.0 a
# replica that lied once in ten was found after 32 lies, which cost 0.04 nat of 5,000 samples.
EARLY_FACTOR, EARLY_RIGHT = 5.0, 8
LATE_FACTOR, LATE_RIGHT = 2.0 / 3.0, 200  # guess: factor on the manifest's share, from so many on
DOUBTED_SHARE, DOUBTED_RIGHT = (
    0.5,
    32,
)  # guess: who lies once in ten is caught again at 97 %: share after a wrong answer, until so many in a row were right
LIES = 2  # guess: a single one may be a memory error, or come from weights that were being replaced
SUSPECT = 3.0  # guess: odds of 20 that its answers fall short; from there on a replica is checked as after a false one
FORGIVEN_RIGHT = 100  # guess: so many right answers in a row cancel earlier wrong ones
# guess: contradicted answers of one of two replicas that never gives its weights; an honest donor is busy at times
WITHHELD_MAX = 6
UNSHOWN_MAX = 32  # guess: refused openings in a row; an honest replica keeps its last answers for a while
PEERS_MAX = 4096  # guess: replicas remembered; the least recently checked are forgotten first
BUDGET_FACTOR = 1.0  # guess: recomputed hops per answer to us, over the manifest's share, at most
BUDGET_FIRST = 16.0  # guess: additional recomputed hops, to examine newcomers
BUDGET_WRONG = 40.0  # guess: the same after a false answer, so that a replica that lies once in ten is found soon
BUDGET_WARNED = 8.0  # guess: the same after a warning, which proves nothing

ALIKE = 0.5  # guess: cosine from which two answers count as equal
COSINE_GAP = 0.4  # guess: an answer so much farther from the others than they are from each other is wrong
# An answer farther than this from its own weights is wrong, if the other one is not, and so are activations as far from
# those of two others. Measured on the demo and on `examples/moe-small` from the first step on, where weights move
# fastest: an honest answer and what its server's weights make 32 steps later have a cosine of .22 or more, activations
# 64 steps later of .25; noise has 0.
OWN_LEAST = 0.15
# Guess: an answer this close to the others may come from weights that are far from theirs, as of a replica that stood
# still for a while: its own weights decide. Measured once in a storm: an honest answer at 0.434, the others at 0.993.
PERHAPS_STALE = 0.25
LOSS_GAP = 1.0  # guess: nats per token; training on the microbatch may lower its loss by 0.7 (measured: tests/node)
# Measured in the same way, and on a tiny model that learns a text by heart in 40 steps: ...
NEAR_STEPS = (
    8  # ... so many steps later an honest answer has a cosine of .73 or more (activations .62), 16 later of .42
)
LOSS_STEPS = 2  # ... losses are .66 nats apart at most, 4 steps later 1.3, 8 later 2.1, 32 later 2.8
AGED_LIES = 2  # guess: so many answers that may have been old are as bad as one that was not
LOSS_FACTOR = 4.0  # guess: ... plus so many times the distance between the others
LOSS_LEAST = 0.3  # guess: nats per token; below this, text is memorised and its gradients are noise


# Guess: own weights explain an answer that is less than half as far from theirs as from others. A few steps later they
# explain most of an honest one, and nothing of a lie.
EXPLAINED = 0.5
STEPS_DOUBLE = 4.0  # measured (docs/security.md): so many steps later an honest answer is twice as far from its weights


@dataclass(frozen=True, slots=True)
class AnswerSimilarity:
    """Similarity of two answers: the least cosine of their tensors, the difference of their losses in nats per token,
    and how many times longer than the other's a tensor is (the most of them)."""

    cosine: float
    loss_apart: float = 0.0
    longer: float = 1.0

    @property
    def distance(self) -> float:
        """|a - b|^2 / (2 |a| |b|) of two tensors a and b: 1 - cosine if they are equally long."""
        return 1.0 - self.cosine + (self.longer + 1.0 / self.longer) / 2.0 - 1.0

    @property
    def close(self) -> bool:
        """Whether the answers agree well enough to need no vote."""
        return self.cosine >= ALIKE and self.loss_apart <= LOSS_GAP

    @property
    def perhaps_stale(self) -> bool:
        """Whether an answer so far from the others may be honest, from older weights."""
        return self.cosine >= PERHAPS_STALE and self.loss_apart <= LOSS_GAP

    def __str__(self) -> str:
        length = f", {self.longer:.2f} times as long" if self.longer >= 1.1 else ""
        return f"cosine {self.cosine:.3f}{length}" + (
            f", losses {self.loss_apart:.3g} apart" if self.loss_apart else ""
        )


def middle(likeness: Sequence[AnswerSimilarity]) -> AnswerSimilarity:
    """Similarity of one answer to all others: the better median of each number."""
    return AnswerSimilarity(
        statistics.median_high([one.cosine for one in likeness]),
        statistics.median_low([one.loss_apart for one in likeness]),
        statistics.median_low([one.longer for one in likeness]),
    )


def wrong(likeness: Sequence[AnswerSimilarity]) -> list[bool]:
    """Which of at least three answers are false, given each one's similarity to the others. None if most disagree with
    each other."""
    cosine = statistics.median_high([one.cosine for one in likeness])
    apart = statistics.median_low([one.loss_apart for one in likeness])
    if cosine < ALIKE:
        return [False] * len(likeness)
    return [
        one.cosine < cosine - COSINE_GAP or not one.loss_apart <= LOSS_GAP + LOSS_FACTOR * apart for one in likeness
    ]


UNKNOWN_DRIFT = AnswerSimilarity(0.0, math.inf)
"""Similarity of old and new answers where none was measured. The cosine of an honest answer to a later one falls to
-.1, not to -.4 [measured: a tiny model that learns a text by heart, 64 steps apart; the demo: .2]."""


def beyond_age(one: AnswerSimilarity, drift: AnswerSimilarity) -> bool:
    """Whether an answer, as alike to the others as `one`, is farther from them than age explains. `drift`: how alike
    old answers are to those that the others give to the same now."""
    return one.cosine < drift.cosine - COSINE_GAP or not one.loss_apart <= LOSS_GAP + LOSS_FACTOR * drift.loss_apart


def contradicts(own: AnswerSimilarity, apart: int) -> bool:
    """Whether an answer is not that of its server's weights, as alike as `own` to what these give `apart` inner steps
    before or after."""
    least = ALIKE if apart <= NEAR_STEPS else OWN_LEAST
    return own.cosine < least or (apart <= LOSS_STEPS and not own.loss_apart <= LOSS_GAP)


def wrong_of_two(cosines: Sequence[float]) -> list[bool]:
    """Which of two answers are false, given each one's cosine to a recomputation with its server's own weights (which
    may have trained on the microbatch since)."""
    return [one < OWN_LEAST and max(cosines) >= ALIKE for one in cosines]


class Shortfall(SequentialTest):
    """Tests whether a replica's answers are farther from those of others of its stage than is usual there.

        x      = log(distance)
        lie    = exp(SHIFT ((x - the median x) / s - SHIFT / 2))      the odds of a lie
        S     <- max(0, S + log(1 - LYING + LYING lie))

    A lie is SHIFT deviations s farther away. The odds are those of a replica that falsifies one answer in 1 / LYING:
    many right answers cancel an honest outlier, and ten of them no lie. Inner steps that both state do not enter: among
    replicas that meet in rounds, distances do not depend on them (measured on the demo: 74 pairs, 0 to 31 steps apart).
    """

    # Distances of honest pairs, before any were seen. Measured on the demo: 65 pairs of four lives, and the first 1,000
    # samples of another (tests/pipeline/test_shortfall.py has a few).
    FIRST = (0.02, 0.03, 0.04, 0.05, 0.05, 0.06, 0.07, 0.09)
    NOISE_LEAST = 0.4  # measured as FIRST: honest distances spread by a factor of 1.5 each way
    SHIFT = 3.0  # guess: a lie of three deviations; one of four and a half is as certain as a check can be
    LYING = 0.1  # a replica that lies in fewer answers does as much less harm
    DISTANCE_LEAST, DISTANCE_MOST = 1e-3, 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._recent.extend(map(math.log, self.FIRST))

    def _deviations(self, distance: float, usual: float) -> tuple[float, float]:
        """(x, its deviations above the median x, or above that of a distance `usual` if this is more)."""
        median, spread = self._usual(0.0)
        x, beside = (math.log(min(max(one, self.DISTANCE_LEAST), self.DISTANCE_MOST)) for one in (distance, usual))
        return x, (x - max(median, beside)) / max(self.NOISE_LEAST, spread)

    def short(self, distance: float) -> bool:
        """Whether two answers so far apart need a third one."""
        return self._deviations(distance, 0.0)[1] > self.SHIFT / 2.0

    def heard(self, peer: PeerId, distance: float, usual: float = 0.0) -> bool:
        """Update the test with an answer of `peer`, at `distance` from others, which are `usual` from each other.
        Returns whether it speaks against `peer`."""
        x, deviations = self._deviations(distance, usual)
        odds = math.exp(min(self.SHIFT * (deviations - self.SHIFT / 2.0), MOST))
        known = self._peer(peer)
        known.add(math.log(1.0 - self.LYING + self.LYING * odds))
        if known.against <= DOUBT / 2.0:  # a lie says nothing about the honest
            self._recent.append(x)
        return odds > 1.0


class Coherence(SequentialTest):
    """Tests whether a replica's answers point one way more than others' of its stage, from every answer, with nothing
    made again: of their rows' signed means the length, over that of a row (ports.Replica.sketch). It only chooses whom
    to check.

        x = log(length),  S as Shortfall's
    """

    RECENT_LEAST = 16  # guess: nobody is suspected before so many answers
    NOISE_LEAST = 0.2  # measured on the demo: honest answers spread by a factor of 1.4, less after the first hundred
    SHIFT = 3.0  # guess: as Shortfall's

    def heard(self, peer: PeerId, length: float) -> None:
        """Update the test with an answer of `peer`."""
        x, known = math.log(max(length, 1e-6)), self._peer(peer)
        if len(self._recent) >= self.RECENT_LEAST:
            median, spread = self._usual(0.0, below=True)  # liars are above
            known.add(self.SHIFT * ((x - median) / max(self.NOISE_LEAST, spread) - self.SHIFT / 2.0))
        if known.against <= DOUBT / 2.0:
            self._recent.append(x)


@dataclass(slots=True)
class RunningResidual:
    """The sum over a replica's checks of its answer minus another's to the same hop, in a small sketch.

        S <- KEPT S + r,  Q <- KEPT^2 Q + |r|^2,    r: (answer - other answer) / length of the other, sketched

    Honest residuals are independent, so |S| / sqrt(Q) stays near 1; those of a replica that steers add up to the root
    of their number.
    """

    # Measured on the demo (tests/pipeline/test_shortfall.py): 1.84 at most of 74 honest checks; steering at a cosine of
    # .72 to .9 has 2.5 after eight, at .98 after twelve.
    COHERENT: ClassVar[float] = 2.4
    KEPT: ClassVar[float] = 0.95  # guess: a window of twenty checks, in which weights that differ meet in rounds

    total: list[float] = field(default_factory=list)
    squares: float = 0.0
    checks: float = 0.0

    def add(self, residual: Sequence[float], sign: float = 1.0) -> None:
        """One more check."""
        before = self.total or [0.0] * len(residual)
        self.total = [self.KEPT * old + sign * new for old, new in zip(before, residual, strict=True)]
        self.squares = self.KEPT**2 * self.squares + math.fsum(one * one for one in residual)
        self.checks = self.KEPT * self.checks + 1.0

    @property
    def coherent(self) -> bool:
        """Whether the residuals point one way."""
        return math.hypot(*self.total) > self.COHERENT * math.sqrt(self.squares) > 0.0

    def share_of(self, residual: Sequence[float]) -> float:
        """The share of the mean residual that lies in another `residual`: 1 if they are equal."""
        size = math.hypot(*self.total)
        along = math.fsum(one * other for one, other in zip(self.total, residual, strict=True)) / size
        return along / (size / self.checks)


@dataclass(slots=True)
class _Record:
    right: int = 0
    right_in_row: int = 0
    doubted: bool = False
    unshown: int = 0
    wrong: set[bytes] = field(default_factory=set)  # microbatches, LIES at most
    aged: set[bytes] = field(default_factory=set)  # microbatches, LIES * AGED_LIES at most
    withheld: set[bytes] = field(default_factory=set)  # microbatches, WITHHELD_MAX at most
    residual: RunningResidual = field(default_factory=RunningResidual)


class Audits:
    """A caller's audits of replicas. `share`: part of the answers audited for a replica that has been right for a
    while."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._records: dict[PeerId, _Record] = {}
        self._budget = BUDGET_FIRST
        self._shortfalls: dict[int, Shortfall] = {}
        self._coherences: dict[int, Coherence] = {}

    def shortfall(self, stage: int) -> Shortfall:
        """The test of the checks of `stage`."""
        return self._shortfalls.setdefault(stage, Shortfall())

    def coherence(self, stage: int) -> Coherence:
        """The test of all answers of `stage`."""
        return self._coherences.setdefault(stage, Coherence())

    def residual(self, peer: PeerId) -> RunningResidual:
        """The running residual of `peer`."""
        return self._of(peer).residual

    def suspected(self, peer: PeerId, stage: int) -> bool:
        """Whether an answer of `peer` is to be compared with its own weights."""
        known = self._records.get(peer)
        return self.shortfall(stage).against(peer) > LIMIT or (known is not None and known.residual.coherent)

    def put_off(self, peer: PeerId, stage: int) -> None:
        """Halve what speaks against `peer`: it got no work for a while, and gets another chance."""
        self.shortfall(stage).halve(peer)
        self._of(peer).residual.total = [0.5 * one for one in self._of(peer).residual.total]

    def cleared(self, peer: PeerId, stage: int) -> None:
        """Its own weights explain the answers of `peer`: they are far from others'."""
        self.shortfall(stage).forget(peer)
        self._of(peer).residual = RunningResidual()

    def chosen(self, peer: PeerId, draw: float) -> bool:
        """Whether to check an answer of `peer` that just arrived; `draw` is a random number in [0, 1)."""
        if self._budget < BUDGET_FIRST:
            self._budget += BUDGET_FACTOR * self._share
        return draw < self.share(peer) and self._budget >= 1.0

    def spent(self) -> None:
        """Charge one recomputed hop to the budget."""
        self._budget -= 1.0

    def share(self, peer: PeerId) -> float:
        """The share of `peer`'s answers to check now."""
        if self._share == 0.0:
            return 0.0
        known = self._records.get(peer) or _Record()
        tests = (*self._shortfalls.values(), *self._coherences.values())
        against = max((one.against(peer) for one in tests), default=0.0)
        if known.doubted or against > SUSPECT:
            return max(self._share, DOUBTED_SHARE)
        if known.right < FIRST_RIGHT:
            return max(self._share, FIRST_SHARE)
        if known.right < EARLY_RIGHT:
            return min(1.0, EARLY_FACTOR * self._share)
        return self._share * (LATE_FACTOR if known.right >= LATE_RIGHT else 1.0)

    def in_row(self, peer: PeerId) -> int:
        """Right answers of `peer` in a row, since the last contradicted or withheld one."""
        known = self._records.get(peer)
        return known.right_in_row if known is not None else 0

    def was_right(self, peer: PeerId) -> bool:
        """Whether some answer of `peer` was confirmed."""
        known = self._records.get(peer)
        return known is not None and known.right > 0

    def right(self, peer: PeerId) -> None:
        """Record a confirmed answer of `peer`."""
        known = self._of(peer)
        for test in self._coherences.values():
            test.forget(peer)
        known.right += 1
        known.right_in_row += 1
        known.unshown = 0
        if known.right_in_row >= DOUBTED_RIGHT:
            known.doubted = False
        if known.right_in_row >= FORGIVEN_RIGHT:
            known.wrong.clear()
            known.aged.clear()
            known.withheld.clear()

    def wrong(self, peer: PeerId, microbatch: bytes, *, aged: bool = False) -> bool:
        """Record a contradicted answer of `peer`, `aged` if it may have been of older weights; return whether to
        exclude it."""
        known = self._doubt(peer)
        self._budget = max(self._budget, BUDGET_WRONG)
        (known.aged if aged else known.wrong).add(microbatch)
        return len(known.wrong) + len(known.aged - known.wrong) // AGED_LIES >= LIES

    def doubt(self, peer: PeerId) -> None:
        """Record an unproven report that `peer` lies: more of its answers will be checked."""
        self._doubt(peer)
        self._budget = max(self._budget, BUDGET_WARNED)

    def unshown(self, peer: PeerId) -> bool:
        """Record that `peer` refused to show its evidence; return whether to exclude it."""
        known = self._doubt(peer) if self._of(peer).unshown else self._of(peer)
        known.unshown += 1
        return known.unshown >= UNSHOWN_MAX

    def withheld(self, peer: PeerId, microbatch: bytes) -> bool:
        """Record that `peer` gave no weights to judge a contradicted answer by; return whether to exclude it."""
        known = self._doubt(peer)
        known.withheld.add(microbatch)
        return len(known.withheld) >= WITHHELD_MAX

    def _doubt(self, peer: PeerId) -> _Record:
        known = self._of(peer)
        known.right_in_row, known.doubted = 0, True
        return known

    def _of(self, peer: PeerId) -> _Record:
        """The record of `peer`, moved to the most recently checked place."""
        known = self._records.pop(peer, None) or _Record()
        self._records[peer] = known
        if len(self._records) > PEERS_MAX:
            del self._records[next(iter(self._records))]
        return known

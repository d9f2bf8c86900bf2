"""Tests whether a replica's answers point elsewhere on average, from every answer, with nothing computed again. Pure.

SENTINEL compares means of each server so (2603.03592).

    d = m_i - m_others,   z = |d|^2 / (v (1 / n_i + 1 / n_others) + s)

m is the mean of sketched answers over their lengths (ports.Replica.sketch), each less the mean of all lately, since
gradients turn while a run learns; n their number, v the variance of one, s by which the others' means differ, as their
weights do. A caller's microbatches are drawn by chance, so z is about 1 for an honest replica. One above the limit
stands aside, and the others are compared without it. Of two nobody knows which one it is.

Answers that a replica gives while it is examined are kept apart. Honest ones, of whatever weights, have the mean of its
other answers. A liar that is honest while it is examined has two.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarmnode.base.ids import PeerId
from swarmnode.base.remembered import Remembered
from swarmnode.trust.verdict import ASIDE, ASIDE_S

LATELY = 8.0  # guess: answers of each in the mean of all lately
FIRST = 8.0  # answers before a mean is one; measured: at the fourth an honest replica's z was 3.3
EACH = 64.0  # guess: answers of a replica that enter


@dataclass(slots=True)
class _Answers:
    """Answers of one replica, the older the lighter: the sum of their sketches, of their weights and these' squares."""

    total: np.ndarray
    weight: float = 0.0
    squares: float = 0.0

    def add(self, one: np.ndarray) -> None:
        self.total = self.total + one
        self.weight += 1.0
        self.squares += 1.0

    def fade(self, kept: float) -> None:
        self.total = self.total * kept
        self.weight *= kept
        self.squares *= kept * kept

    def merged(self, other: _Answers) -> _Answers:
        return _Answers(self.total + other.total, self.weight + other.weight, self.squares + other.squares)

    @property
    def count(self) -> float:
        """The number of equally heavy answers whose mean is as sure."""
        return self.weight**2 / self.squares if self.squares > 0.0 else 0.0

    @property
    def mean(self) -> np.ndarray:
        return self.total / self.weight


class MeanAnswers:
    """The means of the answers of one stage's replicas, at one caller."""

    def __init__(self, limit: float = ASIDE) -> None:
        self._limit = limit
        self._of = dict[PeerId, _Answers]()
        self._z = dict[PeerId, float]()
        self._square = self._weight = self._now_s = 0.0
        self._usual: np.ndarray | None = None  # the mean of all answers lately
        self._aside = Remembered[PeerId, tuple[float, float]]()  # until, and how long
        self._before = Remembered[PeerId, _Answers]()  # of those that stand aside: what spoke against them
        self._examined = Remembered[PeerId, _Answers]()

    def aside(self, peer: PeerId) -> bool:
        """Whether `peer` stands aside."""
        return self._aside.get(peer, (0.0, 0.0))[0] > self._now_s

    def speaks(self, peer: PeerId) -> bool:
        """Whether `peer` stands aside or, of two, may have to."""
        return self.aside(peer) or self._z.get(peer, 0.0) > self._limit

    def observe(self, peer: PeerId, sketch: Sequence[float], now_s: float, *, examined: bool = False) -> None:
        """Update the test with an answer of `peer`; `examined`: its weights were fetched just before."""
        self._now_s = now_s
        if not sketch or not all(map(math.isfinite, sketch)) or (self.aside(peer) and not examined):
            return
        one = np.asarray(sketch)
        count = max(1, len(self._of))
        self._usual = one if self._usual is None else self._usual
        one = one - self._usual
        if examined:
            self._examined.setdefault(peer, _Answers(np.zeros_like(one))).add(one)
            return
        self._usual = self._usual + one / (LATELY * count)
        kept = 1.0 - 1.0 / (EACH * count)
        for known in self._of.values():
            known.fade(kept)
        self._square = self._square * kept + float(one @ one)
        self._weight = self._weight * kept + 1.0
        self._of.setdefault(peer, _Answers(np.zeros_like(one))).add(one)
        self._of = {key: known for key, known in self._of.items() if known.weight > 1e-3}
        self._z = self._found()
        farthest = max(self._z, key=self._z.__getitem__, default=peer)
        if len(self._z) > 2 and self._z.get(farthest, 0.0) > self._limit:
            self.put_aside(farthest, now_s)

    def put_aside(self, peer: PeerId, now_s: float) -> None:
        """Have `peer` stand aside, for twice as long as the last time, if it does not yet."""
        if self.aside(peer):
            return
        for_s = 2.0 * self._aside.get(peer, (0.0, ASIDE_S / 2.0))[1]
        self._aside[peer] = now_s + for_s, for_s
        if (mine := self._of.pop(peer, None)) is not None:
            before = self._before.get(peer)
            self._before[peer] = mine if before is None else before.merged(mine)
        self._z = self._found()

    def excuse(self, peer: PeerId) -> None:
        """`peer` stands aside no longer where enough of its answers were examined, were right, and are no others than
        those before."""
        shown = self._examined.get(peer)
        if self.aside(peer) and shown is not None and shown.count >= FIRST and not self.two_faced(peer):
            self._aside[peer] = self._now_s, self._aside[peer][1]

    def two_faced(self, peer: PeerId) -> bool:
        """Whether the answers of `peer` while it is examined have another mean than its others."""
        shown = self._examined.get(peer)
        others = self._before.get(peer) or self._of.get(peer)
        if shown is None or others is None or min(shown.count, others.count) < FIRST or self._weight == 0.0:
            return False
        apart = shown.mean - others.mean
        noise = self._variance() * (1.0 / shown.count + 1.0 / others.count)
        return noise > 0.0 and float(apart @ apart) > self._limit * noise

    def _variance(self) -> float:
        """The variance of one answer."""
        seen = self._of.values()
        weight = sum(one.weight for one in seen)
        if weight == 0.0:
            return 0.0
        mean = np.sum([one.total for one in seen], axis=0) / weight
        return self._square / self._weight - float(mean @ mean)

    def _found(self) -> dict[PeerId, float]:
        """z of each replica that enough is known of."""
        found = dict[PeerId, float]()
        seen = self._of.values()
        if len(seen) < 2:
            return found
        total, weight, squares = (sum(getattr(one, key) for one in seen) for key in ("total", "weight", "squares"))
        variance = self._variance()
        counts = {peer: one.count for peer, one in self._of.items()}
        judged = [peer for peer, count in counts.items() if count >= FIRST]
        for peer, one in self._of.items():
            rest = weight - one.weight
            others = rest**2 / (squares - one.squares)
            if min(counts[peer], others) < FIRST or variance <= 0.0:
                continue
            apart = one.mean - (total - one.total) / rest
            square = float(apart @ apart)
            noise = variance * (1.0 / counts[peer] + 1.0 / others)
            if square > self._limit * noise and len(beside := [other for other in judged if other != peer]) > 1:
                means = np.stack([self._of[other].mean for other in beside])
                spread = float(means.var(axis=0, ddof=1).sum())
                spread -= variance * statistics.fmean(1.0 / counts[other] for other in beside)
                noise += max(0.0, spread) * (1.0 + 1.0 / len(beside))
            found[peer] = square / noise
        return found

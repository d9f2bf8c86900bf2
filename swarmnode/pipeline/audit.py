"""Which answers are checked by other replicas, who of them was wrong, and what follows from that. Pure.

A caller has a small share of the answers of each replica done again by another one, without saying so beforehand. The
share begins high, falls for a replica that has been right for long and rises for one that was found wrong. A replica is
excluded after LIES answers that its stage contradicts.

Two honest replicas of a stage never have the same weights: each is some inner steps ahead or behind, and one may have
learned the very microbatch meanwhile. So nobody is wrong by an absolute distance, but by one that is much larger than
the distance between the others (`wrong`).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmnode.ids import PeerId

FIRST_SHARE, FIRST_RIGHT = 0.25, 2  # guess: of the answers of a replica nothing is known of, until so many were right
EARLY_FACTOR, EARLY_RIGHT = 2.0, 8  # guess: of the manifest's share, until so many were right
LATE_FACTOR, LATE_RIGHT = 2.0 / 3.0, 200  # guess: of the manifest's share, from so many on
DOUBTED_SHARE, DOUBTED_RIGHT = 0.5, 8  # guess: after a wrong one, until so many in a row were right
LIES = 2  # guess: one may be an accident of memory, or of weights that were being replaced
FORGIVEN_RIGHT = 100  # guess: so many right ones in a row, and an earlier wrong one counts no more
UNSHOWN_MAX = 32  # guess: openings in a row that a replica refused; an honest one keeps its last answers for a while
PEERS_MAX = 4096  # guess: replicas remembered; those checked longest ago are forgotten first
BUDGET_FACTOR = 1.0  # guess: hops done again for us, over the manifest's share of the answers to us, at most
BUDGET_FIRST = 4.0  # guess: hops that may be done again beyond that, to find out about newcomers
BUDGET_WRONG = 8.0  # guess: the same, after a false answer: who lies once in ten is to be found out soon

ALIKE = 0.5  # guess: cosine from which two answers are taken as the same
COSINE_GAP = 0.4  # guess: who lies so much farther from the others than they from each other is wrong
OWN_LEAST = 0.25  # guess: who is farther from its own weights, while another is not, is wrong
LOSS_GAP = 1.0  # guess: nats per token; who has learned a microbatch since may be .7 lower (measured: tests/node)
LOSS_FACTOR = 4.0  # guess: ... and so many times the others' own distance
LOSS_LEAST = 0.3  # guess: nats per token; of text that is known by heart gradients are noise, and say nothing


@dataclass(frozen=True, slots=True)
class Likeness:
    """Of two answers: the least cosine of their tensors, and the difference of their losses in nats per token."""

    cosine: float
    loss_apart: float = 0.0

    @property
    def close(self) -> bool:
        """Whether they need no further look."""
        return self.cosine >= ALIKE and self.loss_apart <= LOSS_GAP

    def __str__(self) -> str:
        return f"cosine {self.cosine:.3f}" + (f", losses {self.loss_apart:.3g} apart" if self.loss_apart else "")


def middle(likeness: Sequence[Likeness]) -> Likeness:
    """How like the others one answer is, given how like each of them it is: the better median of both numbers."""
    return Likeness(
        statistics.median_high([one.cosine for one in likeness]),
        statistics.median_low([one.loss_apart for one in likeness]),
    )


def wrong(likeness: Sequence[Likeness]) -> list[bool]:
    """Which of at least three answers is false, given how like the others each is. Nobody where most are not like each
    other."""
    cosine = statistics.median_high([one.cosine for one in likeness])
    apart = statistics.median_low([one.loss_apart for one in likeness])
    if cosine < ALIKE:
        return [False] * len(likeness)
    return [
        one.cosine < cosine - COSINE_GAP or not one.loss_apart <= LOSS_GAP + LOSS_FACTOR * apart for one in likeness
    ]


def wrong_of_two(cosines: Sequence[float]) -> list[bool]:
    """Which of two answers is false, given how like the arithmetic with its own weights each is, whose weights may have
    learned the microbatch since."""
    return [one < OWN_LEAST and max(cosines) >= ALIKE for one in cosines]


@dataclass(slots=True)
class _Record:
    right: int = 0
    right_in_row: int = 0
    doubted: bool = False
    unshown: int = 0
    wrong: set[bytes] = field(default_factory=set)  # microbatches, LIES at most


class Audits:
    """One caller's checks of replicas. `share` of the answers of a replica that has been right for a while are
    checked."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._records: dict[PeerId, _Record] = {}
        self._budget = BUDGET_FIRST

    def chosen(self, peer: PeerId, draw: float) -> bool:
        """Whether an answer of `peer` that came now is to be checked; `draw` is a number from 0 to 1 by lot."""
        if self._budget < BUDGET_FIRST:
            self._budget += BUDGET_FACTOR * self._share
        return draw < self.share(peer) and self._budget >= 1.0

    def spent(self) -> None:
        """A hop was done again for us."""
        self._budget -= 1.0

    def share(self, peer: PeerId) -> float:
        """Of the answers of `peer`, how many are to be checked now."""
        if self._share == 0.0:
            return 0.0
        known = self._records.get(peer) or _Record()
        if known.doubted:
            return max(self._share, DOUBTED_SHARE)
        if known.right < FIRST_RIGHT:
            return max(self._share, FIRST_SHARE)
        if known.right < EARLY_RIGHT:
            return min(1.0, EARLY_FACTOR * self._share)
        return self._share * (LATE_FACTOR if known.right >= LATE_RIGHT else 1.0)

    def in_row(self, peer: PeerId) -> int:
        """Answers of `peer` found right one after the other, none contradicted or refused to be shown since."""
        known = self._records.get(peer)
        return known.right_in_row if known is not None else 0

    def right(self, peer: PeerId) -> None:
        """An answer of `peer` was confirmed."""
        known = self._of(peer)
        known.right += 1
        known.right_in_row += 1
        known.unshown = 0
        if known.right_in_row >= DOUBTED_RIGHT:
            known.doubted = False
        if known.right_in_row >= FORGIVEN_RIGHT:
            known.wrong.clear()

    def wrong(self, peer: PeerId, microbatch: bytes) -> bool:
        """An answer of `peer` was contradicted; returns whether it is to be excluded."""
        known = self._doubt(peer)
        self._budget = max(self._budget, BUDGET_WRONG)
        known.wrong.add(microbatch)
        return len(known.wrong) >= LIES

    def doubt(self, peer: PeerId) -> None:
        """Somebody says that `peer` lies, which proves nothing: more of its answers are to be checked."""
        self._doubt(peer)

    def unshown(self, peer: PeerId) -> bool:
        """`peer` did not show what it had answered by; returns whether it is to be excluded."""
        known = self._doubt(peer) if self._of(peer).unshown else self._of(peer)
        known.unshown += 1
        return known.unshown >= UNSHOWN_MAX

    def _doubt(self, peer: PeerId) -> _Record:
        known = self._of(peer)
        known.right_in_row, known.doubted = 0, True
        return known

    def _of(self, peer: PeerId) -> _Record:
        """The record of `peer`, which was checked last now."""
        known = self._records.pop(peer, None) or _Record()
        self._records[peer] = known
        if len(self._records) > PEERS_MAX:
            del self._records[next(iter(self._records))]
        return known

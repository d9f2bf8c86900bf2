"""One caller's knowledge of each peer: the answers to check, the verdicts on them added up, and exclusions. Pure.

A caller has another replica recompute a small share of each replica's answers, without announcing which. What a finding
says is in verdict.py. Here verdicts add up: so many false answers exclude a peer, and so many that nothing explains.
reference.py is the same for one peer, as short as it can be said.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from swarmnode.base.ids import PeerId
from swarmnode.base.remembered import Remembered
from swarmnode.base.token_bucket import TokenBucket
from swarmnode.trust.mean_answers import MeanAnswers
from swarmnode.trust.verdict import APART_S, ASIDE, ASIDE_FEEDER, LIES, UNEXPLAINED_MAX, Judgement

# What checks may cost, in recomputed hops and in copies of weights.
BUDGET_FIRST = 32.0  # measured: one that steers is excluded after some twenty; so many right ones end a doubt
NEWCOMERS_SHARE = 0.25  # guess: of that budget, for checks of newcomers
EXAMINED_S = 3.0  # guess: between copies of one peer's weights, and
EXAMINED_SHARE = 0.25  # guess: at most this share of the time, since a large state takes the line for long
EXAMINED_MOST = 8  # guess: so many times that, after as many right answers, where nobody stands aside
DOUBTED_RIGHT = 32  # derived: who lies once in ten is caught again at 97 % before so many are right
FORGIVEN_RIGHT = 100  # guess: so many right answers in a row cancel earlier wrong ones
UNSHOWN_MAX = 32  # guess: refused openings in a row; an honest replica keeps its last answers for a while


@dataclass(slots=True)
class _Record:
    right: int = 0
    right_in_row: int = 0
    doubted: bool = False
    unshown: int = 0  # openings in a row
    wrong: set[bytes] = field(default_factory=set)  # microbatches, LIES at most
    unexplained: int = 0  # answers, UNEXPLAINED_MAX at most
    explained_s: float = -math.inf  # one change of weights may explain answers until then
    weighable_s: float = -math.inf  # until then its weights are not fetched again


class Audits:
    """A caller's audits of replicas. `share`: part of the answers audited for a replica that has been right for a
    while."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._records = Remembered[PeerId, _Record]()
        self._answers = 0
        self._budget = TokenBucket.full(share, BUDGET_FIRST)  # of recomputed hops, by the number of answers
        self._means: dict[int, MeanAnswers] = {}

    def means(self, stage: int) -> MeanAnswers:
        """The test of all answers of `stage`."""
        if stage not in self._means:
            self._means[stage] = MeanAnswers(ASIDE if stage else ASIDE_FEEDER)
        return self._means[stage]

    def unusable(self, peer: PeerId, stage: int) -> bool:
        """Whether answers of `peer` are not used now. Of two whose means differ nobody knows which one it is."""
        return self.means(stage).aside(peer)

    def examined(self, peer: PeerId, stage: int) -> bool:
        """Whether the answers of `peer` are compared with its own weights."""
        return self.means(stage).speaks(peer) or self.doubted(peer)

    def doubted(self, peer: PeerId) -> bool:
        """Whether an answer of `peer` was false, or nothing explained it, or others showed one."""
        return self._records.get(peer, _Record()).doubted

    def chosen(self, peer: PeerId, draw: float, callers: int = 1) -> bool:
        """Whether to check an answer of `peer` that just arrived, one of `callers` replicas of our stage, with us;
        `draw` is a random number in [0, 1)."""
        self._answers += 1
        return draw < self.share(peer, callers)

    def share(self, peer: PeerId, callers: int = 1) -> float:
        """The share of `peer`'s answers to check now: all of a newcomer's until one was right, and of a doubted one.

        Newcomers have a part of the budget, the smaller the more `callers` share it: what one of them finds is shown to
        the others. A first check finds what is broken, or lies to everybody from the start. Who knows of it is honest
        at first, or lies to one caller only, and meets the manifest's share, which each caller draws for itself. The
        rest of the budget is out of newcomers' reach, so that a stream of honest keys does not use up the checks of a
        liar.
        """
        known = self._records.get(peer, _Record())
        left = self._budget.fill(self._answers)
        newcomers = NEWCOMERS_SHARE * BUDGET_FIRST / max(1, callers)
        if left < 1.0 or self._share == 0.0:
            return 0.0
        if known.doubted or (not known.right and left >= min(BUDGET_FIRST - newcomers + 1.0, BUDGET_FIRST)):
            return 1.0
        return self._share

    def spent(self) -> None:
        """Charge one recomputed hop."""
        self._budget.spend(self._answers, 1.0)

    def weighed(self, peer: PeerId, stage: int, took_s: float, now_s: float) -> None:
        """Record that the weights of `peer` were fetched and used, in `took_s`. One of two whose answers are right
        is examined less and less."""
        known = self._of(peer)
        usual_s = max(EXAMINED_S, took_s * (1.0 / EXAMINED_SHARE - 1.0))
        times = 1 if self.unusable(peer, stage) else min(1 + known.right_in_row, EXAMINED_MOST)
        known.weighable_s = now_s + times * usual_s

    def weighable(self, peer: PeerId, now_s: float) -> bool:
        """Whether donors may have newer weights of `peer` than those fetched last."""
        return now_s >= self._of(peer).weighable_s

    def in_row(self, peer: PeerId) -> int:
        """Right answers of `peer` in a row, since the last contradicted or unexplained one."""
        known = self._records.get(peer)
        return known.right_in_row if known is not None else 0

    def convicted(self, peer: PeerId) -> bool:
        """Whether so many answers of `peer` were false, or unexplained, that it is excluded."""
        known = self._records.get(peer, _Record())
        return len(known.wrong) >= LIES or known.unexplained >= UNEXPLAINED_MAX

    def record(self, peer: PeerId, found: Judgement, microbatch: bytes, now_s: float) -> bool:
        """Add the verdict on the answer of `peer` to `microbatch`; return whether to exclude it.

        Of a false answer the very weights that answered decide: each microbatch counts once. A replica that met others
        between its answer and the fetch of its weights has other weights than those that answered, so unexplained
        answers count only APART_S apart.
        """
        known = self._of(peer)
        if found is Judgement.RIGHT:
            self._right(known)
        elif found is Judgement.FALSE:
            self.doubt(peer).wrong.add(microbatch)
        elif found is Judgement.UNEXPLAINED:
            self.doubt(peer)
            if now_s > known.explained_s:
                known.unexplained += 1
                known.explained_s = now_s + APART_S
        return self.convicted(peer)

    def unshown(self, peer: PeerId) -> bool:
        """Record that `peer` refused to show its evidence; return whether to exclude it."""
        known = self.doubt(peer) if self._of(peer).unshown else self._of(peer)
        known.unshown += 1
        return known.unshown >= UNSHOWN_MAX

    def doubt(self, peer: PeerId) -> _Record:
        """Check more answers of `peer`: one was false, or others showed one that looks so."""
        known = self._of(peer)
        known.right_in_row = 0
        known.doubted = True
        return known

    def _right(self, known: _Record) -> None:
        known.right += 1
        known.right_in_row += 1
        known.unshown = 0
        if known.right_in_row >= DOUBTED_RIGHT:
            known.doubted = False
        if known.right_in_row >= FORGIVEN_RIGHT:
            known.wrong.clear()
            known.unexplained = 0

    def _of(self, peer: PeerId) -> _Record:
        """The record of `peer`, moved to the most recently checked place."""
        known = self._records[peer] = self._records.get(peer) or _Record()
        return known

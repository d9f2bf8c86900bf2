"""Decide which of several answers to one hop is false, when the first two contradict each other.

Of three or more, the one that is far from the others is suspected (`audit.wrong`). It is false if age cannot explain
it: if its weights took about as many inner steps as theirs, as its server states, which was right before, or by how far
weights moved lately (weight_drift.py). Else its server's own weights decide, and what they prove counts half: a
replica that stood still may have met others since. So may a newcomer, whose weights are those after the last round,
whatever it states. Of two, the weights of each decide (own_weights.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.ids import PeerId
from swarmnode.pipeline.audit import (
    ALIKE,
    LOSS_STEPS,
    NEAR_STEPS,
    UNKNOWN_DRIFT,
    AnswerSimilarity,
    beyond_age,
    contradicts,
    middle,
    wrong,
    wrong_of_two,
)
from swarmnode.pipeline.hop_claim import HopAnswer, HopClaim, StepsContradicted
from swarmnode.pipeline.own_weights import Like, Weigh, like_own_weights, withheld
from swarmnode.pipeline.recompute import HopEvidence

Voter = tuple[PeerId, HopAnswer]
Drift = Callable[[int, Sequence[PeerId]], Awaitable[AnswerSimilarity]]
"""Least similarity of an old answer of a stage to those that some peers give to the same now; else UNKNOWN_DRIFT."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Outcome for one answer: its similarity to the others or to its server's weights (None: no weights to compare),
    and whether it is false. `aged`: but may have been honest when its weights were; `hides`: its server gave no
    weights, and others agree against it."""

    likeness: AnswerSimilarity | None
    false: bool = False
    aged: bool = False
    hides: bool = False


class ContradictionJudge:
    """Judges contradicting answers for one auditor."""

    def __init__(self, weigh: Weigh, like: Like, drift: Drift, was_right: Callable[[PeerId], bool]) -> None:
        """`was_right` tells of whom some answer was confirmed."""
        self._was_right = was_right
        self._weigh = weigh
        self._like = like
        self._drift = drift

    async def judge(self, claim: HopClaim, shown: HopEvidence | None, voters: Sequence[Voter]) -> Sequence[Judgement]:
        """A judgement of each of the `voters`, who answered the hop of `claim`, its server first. Raises Unavailable or
        RemoteFault if two cannot be judged."""
        if len(voters) == 2:
            return await self._of_two(claim, shown, voters)
        votes = await self.votes(claim, voters)
        found = [Judgement(vote) for vote in votes]
        for index, suspected in enumerate(wrong(votes)):
            if suspected:
                aged = await self._may_be_old(claim, voters, index, votes[index])
                found[index] = Judgement(votes[index], false=True)
                if aged or votes[index].perhaps_stale:
                    found[index] = await self._by_own_weights(claim, shown, voters[index], votes[index], aged)
        return found

    async def votes(self, claim: HopClaim, voters: Sequence[Voter]) -> list[AnswerSimilarity]:
        """Similarity of each of the `voters` to the others."""
        votes = []
        for peer, answered in voters:
            others = [one for other, one in voters if other != peer]
            votes.append(middle([await self._like(claim, answered, one) for one in others]))
        return votes

    async def by_own(
        self, claim: HopClaim, shown: HopEvidence | None, voters: Sequence[Voter], indices: Sequence[int]
    ) -> dict[int, tuple[AnswerSimilarity, HopAnswer | None]]:
        """(similarity, the hop made again) of the answers at `indices` and of their own weights; (the lowest, None)
        where a server cannot have had the weights it gives. Those that give none are left out."""
        found = dict[int, tuple[AnswerSimilarity, HopAnswer | None]]()
        for index in indices:
            peer, answered = voters[index]
            stated = claim if answered.statement is None else replace(claim, statement=answered.statement)
            try:
                own = await self._weigh(peer, stated, shown)
                found[index] = await self._like(claim, answered, own), own
            except StepsContradicted:
                found[index] = AnswerSimilarity(-1.0), None
            except (Unavailable, RemoteFault):
                continue
        return found

    async def _of_two(self, claim: HopClaim, shown: HopEvidence | None, voters: Sequence[Voter]) -> Sequence[Judgement]:
        apart = await self._like(claim, voters[0][1], voters[1][1])
        if apart.cosine >= ALIKE:  # losses alone: near a run's start honest ones fall by a nat in a dozen steps
            return [Judgement(apart)] * 2
        likeness = await like_own_weights(self._weigh, self._like, claim, shown, voters)
        known = [one for one in likeness if one is not None]
        if len(known) < 2:
            return [Judgement(one, hides=hides) for one, hides in zip(likeness, withheld(likeness), strict=True)]
        false = wrong_of_two([one.cosine for one in known])
        found = [Judgement(one, lies) for one, lies in zip(known, false, strict=True)]
        for index, (own, lies) in enumerate(zip(known, false, strict=True)):
            if lies and not beyond_age(own, UNKNOWN_DRIFT):
                found[index] = replace(found[index], aged=await self._may_be_old(claim, voters, index, apart))
        return found

    async def _may_be_old(self, claim: HopClaim, voters: Sequence[Voter], index: int, vote: AnswerSimilarity) -> bool:
        """Whether age may explain how far the answer of `voters[index]` is from the others, which is `vote`."""
        steps = [(answered.statement or claim.statement).inner_steps for _, answered in voters]
        others = [peer for at, (peer, _) in enumerate(voters) if at != index]
        apart = abs(steps[index] - statistics.median(steps[:index] + steps[index + 1 :]))
        near = NEAR_STEPS if vote.cosine < ALIKE else LOSS_STEPS  # losses alone part sooner
        if apart <= near and self._was_right(voters[index][0]):
            return False
        if beyond_age(vote, UNKNOWN_DRIFT):
            return False
        return not beyond_age(vote, await self._drift(claim.statement.stage, others))

    async def _by_own_weights(
        self, claim: HopClaim, shown: HopEvidence | None, voter: Voter, vote: AnswerSimilarity, aged: bool
    ) -> Judgement:
        """Judge an answer by the hop made again with its server's own weights. Weights that cannot be had count against
        their server, unless losses alone differ, but prove nothing."""
        peer, answered = voter
        stated = claim if answered.statement is None else replace(claim, statement=answered.statement)
        try:
            own = await self._weigh(peer, stated, shown)
        except StepsContradicted:
            return Judgement(AnswerSimilarity(-1.0), false=True)
        except (Unavailable, RemoteFault):
            return Judgement(None, hides=vote.cosine < ALIKE)
        likeness = await self._like(claim, answered, own)
        return Judgement(likeness, contradicts(likeness, own.apart), aged)


__all__ = ["ContradictionJudge", "Drift", "Judgement", "Voter"]

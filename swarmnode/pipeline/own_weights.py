"""Judge two replicas that contradict each other by the weights that each of them gives, when no third can vote.

An honest answer fits the weights that made it. A liar could state that its weights took another number of inner steps,
so that the weights it gives never seem to be those that answered, or give none. Both count against it if the other
answer fits: at once if no replica can have taken so many steps since (StepsContradicted), else after a few times.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.ids import PeerId
from swarmnode.pipeline.audit import ALIKE, AnswerSimilarity
from swarmnode.pipeline.hop_claim import HopAnswer, HopClaim, StepsContradicted
from swarmnode.pipeline.recompute import HopEvidence

Weigh = Callable[[PeerId, HopClaim, HopEvidence | None], Awaitable[HopAnswer]]
"""Recomputes a hop here with a given peer's weights. Raises Unavailable, RemoteFault, StepsContradicted."""

Like = Callable[[HopClaim, HopAnswer, HopAnswer], Awaitable[AnswerSimilarity]]


async def like_own_weights(
    weigh: Weigh,
    like: Like,
    claim: HopClaim,
    shown: HopEvidence | None,
    voters: Sequence[tuple[PeerId, HopAnswer]],
) -> list[AnswerSimilarity | None]:
    """Similarity of each answer for the hop of `claim` to the hop recomputed here with its server's weights: the lowest
    possible if those cannot be the weights it stated, None if they cannot be had. Raises Unavailable if neither can."""
    found = list[AnswerSimilarity | None]()
    for peer, answered in voters:
        stated = claim if answered.statement is None else replace(claim, statement=answered.statement)
        try:
            found.append(await like(claim, answered, await weigh(peer, stated, shown)))
        except StepsContradicted:
            found.append(AnswerSimilarity(-1.0))
        except (Unavailable, RemoteFault) as error:
            reason = str(error)
            found.append(None)
    if not any(found):
        raise Unavailable(reason)
    return found


def withheld(found: Sequence[AnswerSimilarity | None]) -> list[bool]:
    """Which of two answers cannot be judged, while the other one fits its server's own weights."""
    fits = any(one is not None and one.cosine >= ALIKE for one in found)
    return [fits and one is None for one in found]

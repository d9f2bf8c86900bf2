"""Distance that honest weights move while an answer may grow old: an answer confirmed long ago, made again now.

Honest answers differ when their weights do: of a replica that stood still, of a newcomer whose state is some seconds
old, or of a check that comes late. Early in a run weights move fast. Two replicas that are up to date then agree with
each other, and an honest third that is 16 steps behind looks like a liar [measured: a tiny model that learns a text by
heart in 40 steps; 16 steps apart, losses differ by 1.7 nats; 64 steps apart, cosines fall to -.1]. So how far an answer
may be from the others is measured where it matters: others make an old, confirmed answer of the same stage again, and
their distance to it is the one that age explains.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.ids import PeerId
from swarmnode.manifest import Manifest
from swarmnode.pipeline.audit import UNKNOWN_DRIFT, AnswerSimilarity
from swarmnode.pipeline.hop_claim import HopAnswer, HopClaim
from swarmnode.pipeline.own_weights import Like
from swarmnode.pipeline.recompute import HopEvidence

Again = Callable[[PeerId, HopClaim, HopEvidence | None], Awaitable[HopAnswer]]
"""Has a peer make a hop again. Raises Unavailable, RemoteFault."""

OLD_STEPS = 64  # guess: an honest answer is of weights that are no older, in steps of the whole stage ...
OLD_ROUNDS = 4  # guess: ... nor in rounds: who came or stood still has met others by then
ASKED_MAX = 2  # guess: peers that make an old answer again; the least alike counts
KEPT_SHARE = 0.25  # guess: share of the tape memory for answers kept


@dataclass(frozen=True, slots=True)
class ConfirmedAnswer:
    """An answer that another replica confirmed, when the run had `samples` samples."""

    claim: HopClaim
    shown: HopEvidence | None
    samples: int

    @property
    def nbytes(self) -> int:
        return self.claim.nbytes + (0 if self.shown is None else self.shown.nbytes)


class OldAnswers:
    """Two confirmed answers of each stage: one that is old, and one that will be."""

    def __init__(self, manifest: Manifest) -> None:
        inner, gossip = manifest.inner, manifest.gossip
        self._age = max(OLD_STEPS * max(inner.inner_batch, inner.inner_batch_max), OLD_ROUNDS * gossip.round_samples)
        self._nbytes_max = int(KEPT_SHARE * manifest.limits.tape_bytes_max)
        self._kept: dict[int, list[ConfirmedAnswer]] = {}  # by stage, the older one first

    def confirmed(self, answer: ConfirmedAnswer) -> None:
        """Consider a confirmed answer: it is kept if there is none that may still grow old, and memory for it."""
        kept = self._kept.setdefault(answer.claim.statement.stage, [])
        if kept and answer.samples - kept[-1].samples < self._age:
            return
        if len(kept) > 1:
            kept.pop(0)
        if sum(one.nbytes for all_of in self._kept.values() for one in all_of) + answer.nbytes <= self._nbytes_max:
            kept.append(answer)

    def of(self, stage: int, samples: int) -> ConfirmedAnswer | None:
        """The newest old answer of `stage` now that the run has `samples` samples; None if there is none."""
        old = [one for one in self._kept.get(stage, ()) if samples - one.samples >= self._age]
        return old[-1] if old else None

    async def drift(
        self, stage: int, samples: int, peers: Sequence[PeerId], again: Again, like: Like
    ) -> AnswerSimilarity:
        """Least similarity of an old answer of `stage` to those that some of `peers` give to the same now;
        UNKNOWN_DRIFT if there is none, or nobody does it again. Its own server is not asked: it knows its answer."""
        if (old := self.of(stage, samples)) is None:
            return UNKNOWN_DRIFT
        then, found = old.claim.answer(None if old.shown is None else old.shown.sent), list[AnswerSimilarity]()
        for peer in peers:
            if peer == old.claim.server or len(found) == ASKED_MAX:
                continue
            try:
                found.append(await like(old.claim, then, await again(peer, old.claim, old.shown)))
            except (Unavailable, RemoteFault):  # the next one may
                continue
        if not found:
            return UNKNOWN_DRIFT
        return AnswerSimilarity(min(one.cosine for one in found), max(one.loss_apart for one in found))


__all__ = ["ConfirmedAnswer", "OldAnswers"]

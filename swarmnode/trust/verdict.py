"""The verdict table: what one piece of evidence about an answer says of the peer that gave it. Data, and pure.

There are two kinds of evidence. An answer is made again, by another replica or here with its server's own weights; and
the mean of all answers of a replica is compared with that of others, and with the answers that it gave while it was
examined. An answer made again with the very weights is the same but for what devices differ by. With other weights it
may lie far away and be honest: then it only says that a closer look is due. docs/security.md has this table.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from enum import Enum

# ---- the constants of all verdicts

# Made again with the very weights. Measured: stages of the demo's model after 0 to 400 steps, 2e-5 at most between
# float32 and bfloat16 products, 5e-16 between one thread and two, 1e-5 between two machines of one kind. Guess: deeper
# stages on other devices differ by fifty times as much. A distance is a square: losses may differ by its root, in nats
# a token (measured: 1.1e-3 at 64 tokens between float32 and bfloat16).
EXACT = 1e-3
# The distance where answers travel in few bits: a number near the middle of two levels goes to another one, so that a
# difference of r of the length adds .12 r [measured on the demo's stages: 7.8e-4 where float32 has 2e-5], in two bits
# .39 r [measured on normal numbers]. Of EXACT's r.
EXACT_OF = {"int4": 8e-3, "int4_int2": 2e-2}
# The least cosine of an honest answer and what its server's weights make so many inner steps later. Measured on the
# demo and on examples/moe-small from the first step on, where weights move fastest: .91, .77, .56, .40, .22.
LATER = ((2, 0.8), (4, 0.65), (8, 0.45), (16, 0.25), (32, 0.15))
NEAR_STEPS = 8  # guess: of LATER, how far one answer convicts
# Distance of two replicas' answers above which their servers' weights are asked. Measured on the demo: .09 at most of
# replicas that are up to date (.04 at the median); a lie of cosine .72, 1.8 times as long, has .46.
CLOSE = 0.25
LOSS_GAP = 1.0  # nats a token, of two replicas; measured in the same way: .66 at most 2 steps later
LOSS_LEAST = 0.3  # guess: nats a token; below this, text is known by heart and its gradients are noise
# Variances by which means of answers differ. Measured on the demo, four replicas, 3,000 samples: 1.5 at most of honest
# gradients, 4.9 of activations, all of which weights that differ a little move. With recorded answers (bench attack
# --attacks search) a lie of cosine .98 in one of three answers is suspected after 15 at 2, after 36 at 3. At 2 honest
# replicas that had just moved to the stage stood aside (tests/node/test_stage_change.py).
ASIDE = 3.0
ASIDE_FEEDER = 8.0
ASIDE_S = 60.0  # guess: the first time; twice as long each time
LIES = 2  # derived: the fewest; a single one may be a memory error, or come from weights that were being replaced
UNEXPLAINED_MAX = 6  # guess: answers, APART_S apart, that no weights of their server explain
APART_S = 30.0  # guess: no donor gives older snapshots, except of large states or while it is busy


class Evidence(Enum):
    """A finding about an answer, or about all answers of a peer."""

    AGAIN_SAME = "another replica gives it again"
    AGAIN_OTHER = "another replica gives another one"
    TWO_AGAINST = "two others, who agree, give another one"
    OWN_SAME = "its server's own weights give it again"
    OWN_OTHER = "its server's own weights give another one"
    OTHER_TIME = "its server's own weights are of another time than it states"
    NO_WEIGHTS = "its server's weights do not come"
    MEAN_APART = "the mean of its server's answers is far from others'"
    TWO_FACED = "... and from that of the answers that it gives while it is examined"
    OTHER_TEXT = "a feeder's tokens are not the run's text"


class Judgement(Enum):
    """The consequence for the peer."""

    NOTHING = "nothing"
    RIGHT = "right"
    EXAMINE = "its own weights are fetched, and judge"
    ASIDE = "it stands aside, and is examined"
    UNEXPLAINED = f"{UNEXPLAINED_MAX} of these, {APART_S:g} s apart, exclude it"
    FALSE = f"{LIES} of these exclude it"


@dataclass(frozen=True, slots=True)
class VerdictRow:
    """`comparable`: the weights that made it again are those that answered, or their few steps later kin (None: either
    way). `stages`: sizes of the stage, 3 for three and more."""

    evidence: Evidence
    comparable: bool | None
    stages: tuple[int, ...]
    verdict: Judgement
    why: str


ANY = (1, 2, 3)
VERDICTS = (
    VerdictRow(Evidence.AGAIN_SAME, None, (2, 3), Judgement.RIGHT, "one that agrees is enough"),
    VerdictRow(Evidence.AGAIN_OTHER, None, (2, 3), Judgement.EXAMINE, "either may be false, or both honest"),
    VerdictRow(Evidence.TWO_AGAINST, True, (3,), Judgement.FALSE, "equal weights give one answer"),
    VerdictRow(Evidence.OWN_SAME, None, ANY, Judgement.RIGHT, "no lie looks so to the weights that answered"),
    VerdictRow(Evidence.OWN_OTHER, True, ANY, Judgement.FALSE, "the very weights give one answer"),
    VerdictRow(Evidence.OWN_OTHER, False, ANY, Judgement.UNEXPLAINED, "it may have met others since"),
    VerdictRow(Evidence.OTHER_TIME, None, ANY, Judgement.UNEXPLAINED, "a donor may have given old ones"),
    VerdictRow(Evidence.NO_WEIGHTS, None, ANY, Judgement.ASIDE, "honest lines are busy; one that hides stays aside"),
    VerdictRow(Evidence.MEAN_APART, None, (2,), Judgement.EXAMINE, "of two nobody knows which one it is"),
    VerdictRow(Evidence.MEAN_APART, None, (3,), Judgement.ASIDE, "it may be honest, of other weights"),
    VerdictRow(Evidence.TWO_FACED, None, (2, 3), Judgement.ASIDE, "or its weights moved meanwhile"),
    VerdictRow(Evidence.OTHER_TEXT, None, ANY, Judgement.FALSE, "all read one text"),
)


def verdict(evidence: Evidence, replicas: int, *, comparable: bool = False) -> Judgement:
    """The verdict on a peer of a stage of `replicas`."""
    for row in VERDICTS:
        if row.evidence is evidence and row.comparable in (None, comparable) and min(max(1, replicas), 3) in row.stages:
            return row.verdict
    return Judgement.NOTHING


@dataclass(frozen=True, slots=True)
class AnswerSimilarity:
    """Similarity of two answers: the least cosine of their tensors, the difference of their losses in nats per token,
    and how many times longer than the other's a tensor is (the most of them). `exact`: `exact_distance` of the run."""

    cosine: float
    loss_apart: float = 0.0
    longer: float = 1.0
    exact: float = EXACT

    @property
    def distance(self) -> float:
        """|a - b|^2 / (2 |a| |b|) of two tensors a and b: 1 - cosine if they are equally long."""
        return 1.0 - self.cosine + (self.longer + 1.0 / self.longer) / 2.0 - 1.0

    @property
    def same(self) -> bool:
        """Whether the two are of the very same weights, on whatever devices."""
        return self.distance <= self.exact and self.loss_apart <= math.sqrt(self.exact)

    @property
    def close(self) -> bool:
        """Whether they are as alike as those of two replicas of a stage."""
        return self.distance <= CLOSE and self.loss_apart <= LOSS_GAP

    def __str__(self) -> str:
        length = f", {self.longer:.2f} times as long" if self.longer >= 1.1 else ""
        return f"cosine {self.cosine:.3f}{length}" + (
            f", losses {self.loss_apart:.3g} apart" if self.loss_apart else ""
        )


def exact_distance(boundary: str) -> float:
    """The most by which answers of the very weights differ, with pipeline.boundary = `boundary`."""
    return EXACT_OF.get(boundary, EXACT)


def by_own_weights(likeness: AnswerSimilarity, apart: int, *, marked: bool) -> tuple[Evidence, bool]:
    """(the evidence, whether the weights are comparable) of an answer and what its server's own weights make of the
    hop, `apart` inner steps from those that answered. `marked`: no round lies between. Weights of more steps than LATER
    has are of another time."""
    near = marked and apart <= NEAR_STEPS
    if near and apart == 0:
        return (Evidence.OWN_SAME if likeness.same else Evidence.OWN_OTHER), True
    if apart > LATER[-1][0]:
        return Evidence.OTHER_TIME, False
    least = LATER[bisect.bisect_left(LATER, (apart, -math.inf))][1] if near else LATER[-1][1]
    other = likeness.cosine < least or (apart <= LATER[0][0] and not likeness.loss_apart <= LOSS_GAP)
    return (Evidence.OWN_OTHER if other else Evidence.OWN_SAME), near

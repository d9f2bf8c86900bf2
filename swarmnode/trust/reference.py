"""A reference of the audits, from the whole history each time: nothing is remembered, and nothing is bounded.

`standing` is what findings about one peer add up to (audit.Audits), `distances` how far the means of answers lie from
each other's (mean_answers.MeanAnswers). Tests hold the real ones against these. No node runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmnode.base.ids import PeerId
from swarmnode.trust.audit import DOUBTED_RIGHT, FORGIVEN_RIGHT
from swarmnode.trust.mean_answers import EACH, FIRST, LATELY
from swarmnode.trust.verdict import APART_S, LIES, UNEXPLAINED_MAX, VERDICTS, Evidence, Judgement

Vector = Sequence[float]


@dataclass(frozen=True, slots=True)
class Finding:
    """Evidence about the answer of a peer to `microbatch`, found at `at_s`."""

    at_s: float
    evidence: Evidence
    comparable: bool
    microbatch: bytes


@dataclass(frozen=True, slots=True)
class Standing:
    """The standing of a peer: whether it is excluded, whether all its answers are checked, and how many were right in
    a row."""

    excluded: bool
    doubted: bool
    in_row: int


def verdict_of(found: Finding, replicas: int) -> Judgement:
    """The verdict on a peer of a stage of `replicas`: of the first row that fits."""
    rows = [row for row in VERDICTS if row.evidence is found.evidence and row.comparable in (None, found.comparable)]
    return next((row.verdict for row in rows if min(replicas, 3) in row.stages), Judgement.NOTHING)


def standing(findings: Sequence[Finding], replicas: int) -> Standing:
    """The sum of `findings` about one peer of a stage of `replicas`, oldest first."""
    told = [(found, verdict_of(found, replicas)) for found in findings]
    against = [at for at, (_, said) in enumerate(told) if said in (Judgement.FALSE, Judgement.UNEXPLAINED)]

    def rights(first: int, last: int) -> int:
        return sum(said is Judgement.RIGHT for _, said in told[first:last])

    in_row = rights(against[-1] + 1 if against else 0, len(told))
    # What is older than enough right answers in a row is forgiven.
    since = 0
    for at, following in zip([-1, *against], [*against, len(told)], strict=True):
        if rights(at + 1, following) >= FORGIVEN_RIGHT:
            since = following
    lies = {found.microbatch for found, said in told[since:] if said is Judgement.FALSE}
    count = 0
    last_s = float("-inf")
    for at, (found, said) in enumerate(told):
        if said is Judgement.UNEXPLAINED and found.at_s > last_s:
            count += at >= since
            last_s = found.at_s + APART_S
    excluded = len(lies) >= LIES or count >= UNEXPLAINED_MAX
    return Standing(excluded, bool(against) and in_row < DOUBTED_RIGHT, in_row)


def distances(answers: Sequence[tuple[PeerId, Vector]]) -> dict[PeerId, float]:
    """|m_i - m_others|^2 / (v (1 / n_i + 1 / n_others) + s) of each peer that has enough `answers`, oldest first.

    Each answer counts less the mean of all lately, and less the older it is; v is the variance of one answer, s by
    which the means of the others differ. s enters only where a peer would be above any limit without it, so it is left
    out here: the result is the most that the real test may find."""
    usual: list[float] = []
    weights: list[float] = []
    centred: list[list[float]] = []
    for index, (_, answer) in enumerate(answers):
        count = max(1, len({who for who, _ in answers[:index]}))
        usual = usual or list(answer)
        one = [a - u for a, u in zip(answer, usual, strict=True)]
        usual = [u + a / (LATELY * count) for u, a in zip(usual, one, strict=True)]
        kept = 1.0 - 1.0 / (EACH * count)
        weights = [weight * kept for weight in weights] + [1.0]
        centred.append(one)

    def mean(rows: Sequence[int]) -> list[float]:
        weight = sum(weights[row] for row in rows)
        return [sum(weights[row] * centred[row][at] for row in rows) / weight for at in range(len(usual))]

    def number(rows: Sequence[int]) -> float:
        return sum(weights[row] for row in rows) ** 2 / sum(weights[row] ** 2 for row in rows)

    everything = range(len(answers))
    if not everything:
        return {}
    middle = mean(everything)
    square = sum(weights[row] * sum(a * a for a in centred[row]) for row in everything)
    variance = square / sum(weights) - sum(a * a for a in middle)
    found = {}
    for peer in {who for who, _ in answers}:
        mine = [row for row in everything if answers[row][0] == peer]
        rest = [row for row in everything if answers[row][0] != peer]
        if rest and variance > 0.0 and min(number(mine), number(rest)) >= FIRST:
            apart = sum((a - b) ** 2 for a, b in zip(mean(mine), mean(rest), strict=True))
            found[peer] = apart / (variance * (1.0 / number(mine) + 1.0 / number(rest)))
    return found

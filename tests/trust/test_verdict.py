"""Each row of the verdict table, and what makes an answer evidence of one kind or the other."""

from itertools import product

import pytest

from swarmnode.base.ids import PeerId
from swarmnode.trust.audit import Audits
from swarmnode.trust.verdict import (
    EXACT,
    LATER,
    LIES,
    NEAR_STEPS,
    UNEXPLAINED_MAX,
    VERDICTS,
    AnswerSimilarity,
    Evidence,
    Judgement,
    VerdictRow,
    by_own_weights,
    verdict,
)

PEER = PeerId("p" * 52)


@pytest.mark.parametrize("row", VERDICTS, ids=lambda row: f"{row.evidence.name} {row.comparable} {row.stages}")
def test_a_row_is_what_happens_to_a_peer(row: VerdictRow) -> None:
    """Its verdict comes of its evidence alone, and so many of them exclude."""
    for replicas in row.stages:
        for comparable in (True, False) if row.comparable is None else (row.comparable,):
            found = verdict(row.evidence, replicas, comparable=comparable)
            assert found is row.verdict
            audits = Audits(0.02)
            out = [audits.record(PEER, found, bytes([number]), 1000.0 * number) for number in range(10)]
            due = {Judgement.FALSE: LIES, Judgement.UNEXPLAINED: UNEXPLAINED_MAX}.get(found)
            assert out == [due is not None and number + 1 >= due for number in range(10)]
            assert audits.doubted(PEER) == (due is not None)


def test_what_has_no_row_says_nothing_and_no_row_hides_another() -> None:
    cases = list(product(Evidence, (True, False), (1, 2, 3)))
    for evidence, comparable, replicas in cases:
        mine = [
            row
            for row in VERDICTS
            if row.evidence is evidence and row.comparable in (None, comparable) and replicas in row.stages
        ]
        assert len(mine) <= 1, (evidence, comparable, replicas)
        assert verdict(evidence, replicas, comparable=comparable) is (mine[0].verdict if mine else Judgement.NOTHING)
    assert all(verdict(evidence, 9, comparable=c) is verdict(evidence, 3, comparable=c) for evidence, c, _ in cases)


def test_only_the_very_weights_or_their_near_kin_convict_at_once() -> None:
    certain = [row for row in VERDICTS if row.verdict is Judgement.FALSE and row.evidence is Evidence.OWN_OTHER]
    assert [row.comparable for row in certain] == [True]


@pytest.mark.parametrize(
    ("cosine", "apart", "marked", "found", "comparable"),
    [
        (1.0, 0, True, Evidence.OWN_SAME, True),
        (1.0 - 2 * EXACT, 0, True, Evidence.OWN_OTHER, True),
        (0.98, 0, False, Evidence.OWN_SAME, False),  # it met others in a round since
        (0.1, 0, False, Evidence.OWN_OTHER, False),
        (0.72, 1, True, Evidence.OWN_OTHER, True),
        (0.95, 2, True, Evidence.OWN_SAME, True),
        (0.7, 4, True, Evidence.OWN_SAME, True),
        (0.4, NEAR_STEPS, True, Evidence.OWN_OTHER, True),
        (0.4, NEAR_STEPS + 1, True, Evidence.OWN_SAME, False),
        (0.1, LATER[-1][0], True, Evidence.OWN_OTHER, False),
        (-1.0, LATER[-1][0] + 1, True, Evidence.OTHER_TIME, False),
    ],
)
def test_own_weights_are_evidence_by_their_steps_and_mark(
    cosine: float, apart: int, marked: bool, found: Evidence, comparable: bool
) -> None:
    assert by_own_weights(AnswerSimilarity(cosine), apart, marked=marked) == (found, comparable)


def test_very_weights_give_a_loss_again_as_far_as_devices_do() -> None:
    assert AnswerSimilarity(1.0, loss_apart=1.1e-3).same
    assert not AnswerSimilarity(1.0, loss_apart=0.1).same


def test_a_false_loss_is_evidence_where_age_does_not_explain_it() -> None:
    said = AnswerSimilarity(0.99, loss_apart=2.0)
    assert by_own_weights(said, 1, marked=True)[0] is Evidence.OWN_OTHER
    assert by_own_weights(said, 4, marked=True)[0] is Evidence.OWN_SAME
    assert not said.close and AnswerSimilarity(0.95, loss_apart=0.5).close
    assert not AnswerSimilarity(0.72, longer=1.8).close

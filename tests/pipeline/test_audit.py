"""Which answers are checked, who of several is wrong, and that statements cannot be forged."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from swarmnode.errors import RemoteFault
from swarmnode.identity import Identity
from swarmnode.ids import PeerId
from swarmnode.model.parted_optimizer import FACTOR, FIRST, IncomingNorms
from swarmnode.pipeline import statement
from swarmnode.pipeline.audit import (
    AGED_LIES,
    BUDGET_FIRST,
    DOUBTED_RIGHT,
    DOUBTED_SHARE,
    FIRST_RIGHT,
    FIRST_SHARE,
    FORGIVEN_RIGHT,
    LATE_RIGHT,
    LIES,
    LOSS_STEPS,
    NEAR_STEPS,
    UNKNOWN_DRIFT,
    UNSHOWN_MAX,
    AnswerSimilarity,
    Audits,
    beyond_age,
    contradicts,
    middle,
    wrong,
    wrong_of_two,
)
from swarmnode.wire import call_pb2 as wire

A, B = PeerId("a" * 52), PeerId("b" * 52)
SHARE = 0.03


def test_the_share_falls_for_who_is_right_and_rises_for_who_is_not() -> None:
    audits = Audits(SHARE)
    assert audits.share(A) == FIRST_SHARE
    shares = []
    for _ in range(LATE_RIGHT):
        audits.right(A)
        shares.append(audits.share(A))
    assert shares == sorted(shares, reverse=True) and shares[-1] < SHARE < shares[FIRST_RIGHT]
    assert not audits.wrong(A, b"one") and audits.share(A) == DOUBTED_SHARE
    for _ in range(DOUBTED_RIGHT):
        audits.right(A)
    assert audits.share(A) < SHARE and audits.share(B) == FIRST_SHARE


def test_two_lies_exclude_and_one_is_forgiven_in_time() -> None:
    audits = Audits(SHARE)
    assert not audits.wrong(A, b"one") and not audits.wrong(A, b"one"), "one microbatch counts once"
    assert audits.wrong(A, b"two") and LIES == 2
    assert not audits.wrong(B, b"one")
    for _ in range(FORGIVEN_RIGHT):
        audits.right(B)
    assert not audits.wrong(B, b"two")


def test_answers_that_may_have_been_old_count_half() -> None:
    audits = Audits(SHARE)
    counted = [audits.wrong(A, bytes([number]), aged=True) for number in range(LIES * AGED_LIES)]
    assert counted == [False] * (LIES * AGED_LIES - 1) + [True]
    for number in range(AGED_LIES):
        assert not audits.wrong(B, bytes([number]), aged=True)
    assert audits.wrong(B, b"whole"), "one whole, two halves"


def test_who_never_shows_what_it_answers_by_is_excluded() -> None:
    audits = Audits(SHARE)
    assert [audits.unshown(A) for _ in range(UNSHOWN_MAX)] == [False] * (UNSHOWN_MAX - 1) + [True]
    audits.unshown(B)
    assert audits.share(B) == FIRST_SHARE, "once is no reason for doubt"
    audits.right(B)
    assert not any(audits.unshown(B) for _ in range(UNSHOWN_MAX - 1))


def test_checks_stay_within_their_budget() -> None:
    audits, rng, done = Audits(SHARE), random.Random(1), 0
    audits.doubt(A)
    for _ in range(2000):
        if audits.chosen(A, rng.random()):
            done += 1
            audits.spent()
    assert done <= BUDGET_FIRST + SHARE * 2000 + 1
    assert not Audits(0.0).chosen(A, 0.0), "no share, no checks"


def alike(*cosines: float) -> list[AnswerSimilarity]:
    return [AnswerSimilarity(cosine) for cosine in cosines]


@pytest.mark.parametrize(
    ("cosines", "expected"),
    [
        ((0.95, 0.95, -0.95), [False, False, True]),  # a flipped gradient
        ((0.0, 0.96, 0.96, 0.94), [True, False, False, False]),  # noise
        ((0.70, 0.75, 0.72), [False] * 3),  # honest ones that are far from each other
        ((0.30, 0.40, 0.10), [False] * 3),  # most are not like each other: nobody is
        ((0.50, 0.95, 0.95), [True, False, False]),
    ],
)
def test_who_is_far_from_those_that_are_close_is_wrong(cosines: tuple[float, ...], expected: list[bool]) -> None:
    assert wrong(alike(*cosines)) == expected


def test_a_loss_is_wrong_far_beyond_what_the_others_lie_apart() -> None:
    honest = [AnswerSimilarity(0.99, 0.1), AnswerSimilarity(0.99, 0.05)]
    assert wrong([AnswerSimilarity(0.99, 2.0), *honest]) == [True, False, False]
    assert wrong([AnswerSimilarity(0.99, 0.7), *honest]) == [False] * 3, "it has learned the microbatch meanwhile"
    assert wrong([AnswerSimilarity(0.99, float("nan")), *honest]) == [True, False, False]


def test_age_explains_a_distance_only_as_far_as_weights_moved() -> None:
    settled, fast = AnswerSimilarity(0.95, 0.05), AnswerSimilarity(0.3, 1.5)
    assert beyond_age(AnswerSimilarity(0.4), settled) and not beyond_age(AnswerSimilarity(0.6), settled)
    assert not beyond_age(AnswerSimilarity(0.0), fast) and beyond_age(AnswerSimilarity(-0.3), fast)
    assert beyond_age(AnswerSimilarity(0.9, 2.0), settled) and not beyond_age(AnswerSimilarity(0.9, 2.0), fast)
    assert not beyond_age(AnswerSimilarity(-0.3, 9.0), UNKNOWN_DRIFT) and beyond_age(
        AnswerSimilarity(-0.9), UNKNOWN_DRIFT
    )
    assert beyond_age(AnswerSimilarity(0.9, float("nan")), UNKNOWN_DRIFT)


def test_own_weights_decide_less_the_more_steps_they_took_since() -> None:
    assert contradicts(AnswerSimilarity(0.4), NEAR_STEPS) and not contradicts(AnswerSimilarity(0.4), NEAR_STEPS + 1)
    assert contradicts(AnswerSimilarity(0.1), NEAR_STEPS + 1)
    assert contradicts(AnswerSimilarity(0.9, 2.0), LOSS_STEPS)
    assert not contradicts(AnswerSimilarity(0.9, 2.0), LOSS_STEPS + 1), "it may have learned two nats since"


def test_of_two_who_does_not_answer_as_its_own_weights_do_is_wrong() -> None:
    assert wrong_of_two([-1.0, 0.99]) == [True, False]
    assert wrong_of_two([0.0, 0.1]) == [False, False], "no arithmetic of ours is like either"
    assert wrong_of_two([0.4, 1.0]) == [False, False], "its weights have moved on"


def test_the_median_over_the_others_is_the_better_one() -> None:
    assert middle(alike(-0.9, 0.95)).cosine == 0.95
    assert middle(alike(-0.9, 0.95, 0.93)).cosine == 0.93
    assert middle(alike(-0.9, -0.95, 0.93)).cosine == -0.9


def test_gradients_are_clipped_to_what_is_usual() -> None:
    norms, g = IncomingNorms(), torch.ones(4)

    def clipped(gradient: Tensor, weight: float, *, learn: bool = True) -> Tensor:
        return gradient * norms.factor(gradient, weight, learn=learn)

    for _ in range(FIRST):
        assert torch.equal(clipped(g, 4), g)
    assert torch.allclose(clipped(1e4 * g, 4), FACTOR * g)
    assert torch.equal(clipped(2 * g, 4), 2 * g) and norms.clips == 1
    assert torch.allclose(clipped(1e4 * g, 16), 2 * FACTOR * g), "by the root of the samples"
    for _ in range(3):
        clipped(torch.full((4,), 1e30), 4)
    assert torch.allclose(clipped(1e30 * g, 4, learn=False), FACTOR * g), "lies do not raise the median"


def stated(identity: Identity) -> wire.Statement:
    process = wire.Process(microbatch_id=b"m" * 16, samples=2, itinerary=[0, 1, 2], position=1)
    prints = statement.TensorFingerprints(*(bytes([n]) * 32 for n in range(5)))
    found = statement.stated("ab" * 32, process, identity.peer_id, A, prints, wire.Processed(loss_sum=3.5))
    statement.sign(found, identity)
    return found


@pytest.mark.parametrize("field", ["run_id", "microbatch_id", "client", "x", "tokens", "gradient", "sent", "got"])
def test_a_statement_that_was_changed_does_not_verify(field: str) -> None:
    found = stated(Identity.of_seed(b"1" * 32))
    statement.check(found)
    value = getattr(found, field)
    setattr(found, field, B if isinstance(value, str) else bytes(len(value)))
    if field == "x":
        found.x = b"y" * 32
    with pytest.raises(RemoteFault, match="forged"):
        statement.check(found)


def test_a_statement_of_another_key_or_shape_is_refused() -> None:
    found = stated(Identity.of_seed(b"1" * 32))
    found.server = Identity.of_seed(b"2" * 32).peer_id
    with pytest.raises(RemoteFault, match="forged"):
        statement.check(found)
    found = stated(Identity.of_seed(b"1" * 32))
    found.x = b"short"
    with pytest.raises(RemoteFault, match="32 bytes"):
        statement.check(found)

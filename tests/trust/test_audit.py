"""Which answers are checked, who of several is wrong, and that statements cannot be forged."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swarmnode.ema import ENOUGH
from swarmnode.errors import RemoteFault
from swarmnode.identity import Identity
from swarmnode.ids import PeerId
from swarmnode.model.inner_optimizer import FACTOR, IncomingNorms
from swarmnode.trust import statement
from swarmnode.trust.audit import (
    BUDGET_FIRST,
    DOUBT_FIRST,
    DOUBTED_RIGHT,
    EXAMINED_S,
    FORGIVEN_RIGHT,
    LIES,
    LOSS_STEPS,
    SNAPSHOT_AGE_S,
    UNSHOWN_MAX,
    AnswerSimilarity,
    Audits,
    Weighed,
    hides,
    is_false,
    middle,
)
from swarmnode.wire import call_pb2 as wire

A, B, C = (PeerId(letter * 52) for letter in "abc")
SHARE = 0.03


def test_the_share_falls_for_who_is_right_and_rises_for_who_is_not() -> None:
    audits = Audits(SHARE)
    assert audits.share(A) == 1.0
    audits.right(A)
    assert audits.share(A) == SHARE
    assert not audits.wrong(A, b"one") and audits.share(A) == 1.0
    for _ in range(DOUBTED_RIGHT):
        audits.right(A)
    assert audits.share(A) == SHARE and audits.share(B) == 1.0


def test_two_lies_exclude_and_one_is_forgiven_in_time() -> None:
    audits = Audits(SHARE)
    assert not audits.wrong(A, b"one") and not audits.wrong(A, b"one"), "one microbatch counts once"
    assert audits.wrong(A, b"two") and LIES == 2
    assert not audits.wrong(B, b"one")
    for _ in range(FORGIVEN_RIGHT):
        audits.right(B)
    assert not audits.wrong(B, b"two")


def test_false_answers_that_one_change_of_weights_explains_count_as_one() -> None:
    audits = Audits(SHARE)
    assert not audits.wrong(A, b"one", came_s=10.0, now_s=20.0)
    assert not audits.wrong(A, b"two", came_s=20.0, now_s=90.0), "it came before the weights that judged the first"
    assert audits.wrong(A, b"three", came_s=20.0 + SNAPSHOT_AGE_S + 1.0, now_s=91.0)
    assert not audits.wrong(B, b"one", came_s=10.0, now_s=20.0) and audits.wrong(B, b"two"), "of whatever weights"


def test_a_replica_that_never_shows_its_weights_is_excluded() -> None:
    audits = Audits(SHARE)
    assert [audits.unshown(A) for _ in range(UNSHOWN_MAX)] == [False] * (UNSHOWN_MAX - 1) + [True]
    audits.unshown(B)
    assert audits.share(B) == 1.0, "once is no reason for doubt"
    audits.right(B)
    assert not any(audits.unshown(B) for _ in range(UNSHOWN_MAX - 1))


def test_checks_stay_within_their_budgets() -> None:
    """Twice the manifest's share in the long run, whoever is doubted."""
    audits = Audits(SHARE)
    rng = random.Random(1)

    def checks(peer: PeerId) -> int:
        """Checks of `peer` among 2,000 answers; none finds it right."""
        count = 0
        for _ in range(2000):
            if audits.chosen(peer, rng.random()):
                audits.spent(peer)
                count += 1
        return count

    assert checks(A) <= BUDGET_FIRST + SHARE * 2000 + 1
    assert not Audits(0.0).chosen(A, 0.0), "no share, no checks"
    for peer in (B, C, A):
        audits.right(peer)
    audits.doubt(A)
    assert DOUBT_FIRST / 2.0 < checks(A) <= 2.0 * (DOUBT_FIRST + SHARE * 2000), "of what others say"
    audits.wrong(B, b"one")
    assert audits.share(B) == 1.0 and audits.share(A) < 1.0, "what we saw ourselves comes first"
    assert DOUBT_FIRST / 2.0 < checks(B) <= 2.0 * (DOUBT_FIRST + SHARE * 2000)
    assert audits.chosen(C, 0.0), "others are checked meanwhile"


@pytest.mark.parametrize(("callers", "first"), [(1, 8), (2, 4), (3, 2), (4, 2), (8, 1), (100, 1)])
def test_callers_share_the_first_checks_of_newcomers(callers: int, first: int) -> None:
    """Newcomers that are never found right, however many keys they are, leave the other checks to those known."""
    audits = Audits(SHARE)
    checked = 0
    for number in range(20):
        if audits.share(PeerId(f"{number:052}"), callers) == 1.0:
            audits.spent(PeerId(f"{number:052}"))
            checked += 1
    assert checked == first
    audits.right(A)
    assert audits.share(A, callers) == (SHARE if callers > 1 else 0.0)


def test_weights_are_fetched_again_when_donors_may_have_newer_ones() -> None:
    audits = Audits(SHARE)
    for peer, took_s, times in ((A, 0.1, (0.1, EXAMINED_S)), (B, 10.0, (EXAMINED_S, 30.0))):
        audits.weighed([peer], took_s, now_s=0.0)
        assert [audits.weighable(peer, at) for at in times] == [False, True]


def alike(*cosines: float) -> list[AnswerSimilarity]:
    return [AnswerSimilarity(cosine) for cosine in cosines]


NOISE = AnswerSimilarity(0.0)
FLIPPED = AnswerSimilarity(-0.95)
HONEST = AnswerSimilarity(0.95)
FITS = Weighed(NOISE, own=HONEST)


@pytest.mark.parametrize(
    ("case", "others", "expected"),
    [
        (Weighed(FLIPPED), None, True),  # no honest answer is the opposite, of whatever weights
        (Weighed(FLIPPED), FITS, False),  # of two the other may lie
        (Weighed(FLIPPED, own=FLIPPED, apart=30), FITS, True),
        (Weighed(NOISE, own=NOISE), None, True),
        (Weighed(NOISE, own=NOISE), FITS, True),
        (Weighed(NOISE, own=NOISE), Weighed(NOISE, own=NOISE), False),  # no arithmetic of ours is like either
        (Weighed(NOISE, own=NOISE), Weighed(NOISE), False),
        (Weighed(NOISE, own=AnswerSimilarity(0.4), apart=20), None, False),  # older weights, and they moved on
        (Weighed(AnswerSimilarity(0.4), own=HONEST), None, False),  # it stood still
        (Weighed(AnswerSimilarity(0.9, 2.0), own=AnswerSimilarity(0.9, 2.0), apart=LOSS_STEPS), None, True),
        (Weighed(AnswerSimilarity(0.9, 2.0), own=AnswerSimilarity(0.9, 2.0), apart=LOSS_STEPS + 1), None, False),
        (Weighed(AnswerSimilarity(0.9, 2.0), own=AnswerSimilarity(0.9, 2.0)), FITS, False),
    ],
)
def test_an_answer_is_false_where_its_own_weights_do_not_explain_it(
    case: Weighed, others: Weighed | None, expected: bool
) -> None:
    assert is_false(case, others) == expected


def test_answers_that_look_honest_are_false_only_of_a_suspected_replica() -> None:
    near = AnswerSimilarity(0.98)
    far = AnswerSimilarity(0.72, longer=1.8)
    assert not is_false(Weighed(far, suspected=False, speaks=True, own=far))
    assert is_false(Weighed(far, suspected=True, speaks=True, own=far, near=True))
    assert not is_false(Weighed(far, suspected=True, speaks=True, own=far, near=True, apart=1)), "it has moved since"
    some = Weighed(AnswerSimilarity(0.4), suspected=True, speaks=True, own=AnswerSimilarity(0.4), near=True, apart=4)
    assert is_false(some) and not is_false(replace(some, speaks=False)), "this answer is usual"
    assert not is_false(replace(some, vote=far, own=near)), "its own weights explain it"
    assert not is_false(Weighed(far, suspected=True, speaks=True, own=far)), "it may have met the others"
    assert is_false(some, Weighed(far, own=near)) and not is_false(some, Weighed(far, own=far)), "of two"


def test_weights_few_steps_from_those_that_answered_give_the_answer_again() -> None:
    fine = AnswerSimilarity(0.98, longer=1.3)
    same = AnswerSimilarity(0.9999)
    steered = Weighed(fine, suspected=True, own=fine, near=True)
    assert is_false(steered) and not is_false(replace(steered, suspected=False))
    assert not is_false(replace(steered, apart=1)), "it has moved since"
    assert not is_false(replace(steered, near=False)), "it met others since"
    assert not is_false(replace(steered, own=same, speaks=True))
    assert is_false(steered, Weighed(fine, own=same)), "of two, the other one's weights give its answer"
    assert not is_false(steered, steered) and not is_false(steered, Weighed(fine)), "our arithmetic may be another"


def test_a_far_answer_without_weights_counts_where_others_are_alike() -> None:
    assert hides(Weighed(NOISE, speaks=True)) and not hides(Weighed(HONEST, speaks=True))
    assert hides(Weighed(NOISE, speaks=True), FITS) and not hides(Weighed(NOISE, speaks=True), Weighed(NOISE))


def test_a_suspected_replica_that_says_it_met_others_is_excused_six_times() -> None:
    """Its own word about its weights is not believed for ever."""
    steered = AnswerSimilarity(0.72, longer=1.8)
    one = Weighed(steered, suspected=True, speaks=True, own=steered)
    assert not is_false(one) and hides(one) and not one.explained
    assert replace(one, own=AnswerSimilarity(0.99)).explained and not hides(replace(one, own=AnswerSimilarity(0.99)))
    assert not hides(replace(one, suspected=False))
    silent = replace(one, own=None)
    assert hides(silent) and not hides(replace(silent, late=True)) and not hides(replace(silent, suspected=False))


def test_the_median_over_the_others_is_the_better_one() -> None:
    assert middle(alike(-0.9, 0.95)).cosine == 0.95
    assert middle(alike(-0.9, 0.95, 0.93)).cosine == 0.93
    assert middle(alike(-0.9, -0.95, 0.93)).cosine == -0.9


def test_gradients_are_clipped_to_what_is_usual() -> None:
    norms = IncomingNorms()
    g = torch.ones(4)

    def clipped(gradient: Tensor, weight: float, *, learn: bool = True) -> Tensor:
        return gradient * norms.factor(gradient, weight, learn=learn)

    for _ in range(ENOUGH):
        assert torch.equal(clipped(g, 4), g)
    assert torch.allclose(clipped(1e4 * g, 4), FACTOR * g)
    assert torch.equal(clipped(1.3 * g, 4), 1.3 * g) and norms.clips == 1
    assert torch.allclose(clipped(1e4 * g, 16), 2 * FACTOR * g), "by the root of the samples"
    for _ in range(3):
        clipped(torch.full((4,), 1e30), 4)
    assert torch.allclose(clipped(1e30 * g, 4, learn=False), FACTOR * g), "lies do not raise the median"


def stated(identity: Identity) -> wire.Statement:
    process = wire.Process(microbatch_id=b"m" * 16, samples=2, itinerary=[0, 1, 2], position=1)
    prints = statement.TensorFingerprints(*(bytes([n]) * 32 for n in range(6)))
    found = statement.stated("ab" * 32, process, identity.peer_id, A, prints, wire.Processed(loss_sum=3.5))
    statement.sign(found, identity)
    return found


FIELDS = ("run_id", "microbatch_id", "client", "x", "tokens", "gradient", "sent", "got", "mark")


@pytest.mark.parametrize("field", FIELDS)
def test_a_statement_that_was_changed_does_not_verify(field: str) -> None:
    found = stated(Identity.of_seed(b"1" * 32))
    statement.check(found)
    value = getattr(found, field)
    setattr(found, field, B if isinstance(value, str) else b"y" * len(value))
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

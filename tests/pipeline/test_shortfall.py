"""What single checks show adds up: answers that are each a little false suspect their replica, honest ones do not."""

from __future__ import annotations

import math
import random

import pytest

from swarmnode.ids import PeerId
from swarmnode.pipeline.audit import DOUBTED_SHARE, NEAR_STEPS, AnswerSimilarity, Audits, Shortfall

LIAR, HONEST, OTHER = (PeerId(letter * 52) for letter in "lho")
# Distances of honest pairs in a live demo: median .05, the farthest of 65 .137 (a cosine of .863).
SPREAD = 0.4


def honest_distance(rng: random.Random, median: float = 0.05) -> float:
    return min(median * math.exp(rng.gauss(0.0, SPREAD)), 2.8 * median)


def checks_until_suspected(lies: list[float], seed: int, honest: float = 0.05) -> int:
    """Checks of a liar, of which the next lie has the next of `lies` as its distance (nan: it answers honestly)."""
    rng, test = random.Random(seed), Shortfall()
    for _ in range(40):
        test.heard(HONEST, honest_distance(rng, honest), rng.randrange(4))
    for number, lie in enumerate(lies):
        test.heard(LIAR, honest_distance(rng, honest) if math.isnan(lie) else lie, rng.randrange(4))
        if test.suspected(LIAR):
            return number + 1
    return len(lies) + 1


def test_the_distance_of_two_answers_has_angle_and_length() -> None:
    assert AnswerSimilarity(0.9).distance == pytest.approx(0.1)
    assert AnswerSimilarity(0.72, longer=1.8).distance == pytest.approx(0.28 + (1.8 + 1 / 1.8) / 2 - 1)
    assert AnswerSimilarity(1.0, longer=math.inf).distance == math.inf


@pytest.mark.parametrize("seed", range(5))
def test_a_liar_that_steers_is_suspected_after_few_checks(seed: int) -> None:
    assert checks_until_suspected([0.28] * 20, seed) <= 3
    assert checks_until_suspected([AnswerSimilarity(0.72, longer=1.8).distance] * 20, seed) <= 3
    assert checks_until_suspected([0.28] * 20, seed, honest=0.02) <= 3, "the stage's own pairs set the limit"


@pytest.mark.parametrize("seed", range(5))
def test_right_answers_do_not_reset_what_is_known(seed: int) -> None:
    one_in_five = [0.28 if n % 5 == 0 else math.nan for n in range(100)]
    assert checks_until_suspected(one_in_five, seed) <= 25


def test_honest_replicas_are_not_suspected_whatever_the_stage_s_distances() -> None:
    for seed in range(20):
        rng, test = random.Random(seed), Shortfall()
        for n in range(400):
            median = 0.05 if seed % 2 else 0.02 + 0.15 * n / 400  # it grows with training
            test.heard(HONEST, honest_distance(rng, median), rng.randrange(4))
            assert not test.suspected(HONEST), (seed, n)


def test_stated_steps_and_a_noisy_vote_explain_a_distance() -> None:
    test = Shortfall()
    assert test.short(0.2, 0) and not test.short(0.2, NEAR_STEPS)
    assert test.short(0.6, NEAR_STEPS) and test.short(0.6, 10**6), "no number of steps explains everything"
    assert not test.heard(HONEST, 0.2, 0, usual=0.18) and test.heard(LIAR, 0.4, 0, usual=0.05)


def test_a_suspected_replica_is_checked_more_until_its_own_weights_clear_it() -> None:
    audits = Audits(0.02)
    for _ in range(20):
        audits.right(LIAR)
    before, test = audits.share(LIAR), audits.shortfall(1)
    test.heard(LIAR, 0.46, 0)
    assert before < audits.share(LIAR) == DOUBTED_SHARE and not test.suspected(LIAR), "no single check decides"
    test.heard(LIAR, 0.46, 0)
    assert test.suspected(LIAR) and not test.suspected(OTHER)
    test.cleared(LIAR)
    assert not test.suspected(LIAR) and audits.share(LIAR) == before

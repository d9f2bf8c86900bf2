"""Means of all answers add up: those that each look honest put their replica aside, honest ones do not.

The sketches are those of honest replicas and liars in a demo of four replicas of the last stage.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarmnode.base.ids import PeerId
from swarmnode.model.tensor import sketch
from swarmnode.trust.mean_answers import FIRST, MeanAnswers
from swarmnode.trust.verdict import AnswerSimilarity

LIAR, HONEST, OTHER = (PeerId(letter * 52) for letter in "lho")


@cache
def recorded() -> dict[str, Any]:
    """By kind of life, one entry a check: `distance`, `residual` of the server's answer to another's, `own` to that of
    its own weights three microbatches later, `length` of its answer's sketch."""
    return dict(json.loads((Path(__file__).parent / "recorded_checks.json").read_text()))


LIES = ["steer", "steer cosine=.9 length=1", "steer toward=bias cosine=.98 length=1"]


def test_the_distance_of_two_answers_has_angle_and_length() -> None:
    assert AnswerSimilarity(0.9).distance == pytest.approx(0.1)
    assert AnswerSimilarity(0.72, longer=1.8).distance == pytest.approx(0.28 + (1.8 + 1 / 1.8) / 2 - 1)
    assert AnswerSimilarity(1.0, longer=math.inf).distance == math.inf


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("every", [1, 3])
def test_a_replica_that_leans_one_way_stands_aside_without_any_check(lie: str, every: int) -> None:
    test = MeanAnswers()
    honest = [PeerId(peer) for peer in "abc"]
    lies = recorded()[lie]
    usual = recorded()["honest"]
    for number in range(3 * len(usual)):
        given = usual[(7 * number + 3) % len(usual)] if number % every else lies[number % len(lies)]
        test.observe(LIAR, given["residual"], float(number))
        for at, peer in enumerate(honest):
            test.observe(peer, usual[(5 * number + 11 * at) % len(usual)]["residual"], float(number))
        assert not any(map(test.aside, honest))
        if test.aside(LIAR):
            return
    raise AssertionError("it is never seen")


@pytest.mark.parametrize("liars", [0, 1])
def test_honest_means_differ_by_their_weights_and_by_when_they_answered(liars: int) -> None:
    """Each replica's are off in a way of its own, a liar's five times as far. All turn, and one joins late."""
    test = MeanAnswers()
    draw = np.random.default_rng(3)
    usual = recorded()["honest"]
    peers = [LIAR, OTHER, PeerId("x" * 52), HONEST]
    width = len(usual[0]["residual"])
    turn = 0.003 * draw.normal(size=width)
    off = dict(zip(peers, 0.01 * draw.normal(size=(4, width)), strict=True))
    off[LIAR] *= 1 + 4 * liars
    for number in range(400):
        for at, peer in enumerate(peers if number >= 40 else peers[:3]):
            answer = number * turn + off[peer] + usual[(5 * number + 11 * at) % len(usual)]["residual"]
            test.observe(peer, answer.tolist(), float(number))
        if test.aside(LIAR):
            break
        assert not any(map(test.aside, peers))
    assert test.aside(LIAR) == bool(liars)


def test_neither_of_two_replicas_stands_aside_and_both_are_checked() -> None:
    test = MeanAnswers()
    for number in range(20):
        test.observe(HONEST, recorded()["honest"][number]["residual"], float(number))
        test.observe(LIAR, recorded()[LIES[0]][number]["residual"], float(number))
    assert test.speaks(LIAR) and test.speaks(HONEST) and not test.aside(LIAR)


def test_a_replica_put_aside_again_stands_aside_for_longer() -> None:
    test = MeanAnswers()
    for begin_s, end_s in ((0.0, 60.0), (60.0, 180.0), (180.0, 420.0)):
        test.put_aside(LIAR, begin_s)
        for now_s in (end_s - 1.0, end_s):
            test.observe(HONEST, recorded()["honest"][0]["residual"], now_s)
            assert test.aside(LIAR) == (now_s < end_s)


def answers(at: int, *, lies: bool = False) -> list[float]:
    """An answer's sketch, of a liar that points aside or of an honest replica."""
    one = recorded()[LIES[0] if lies else "honest"]
    return list(one[at % len(one)]["residual"])


def lived(*, wary: bool) -> MeanAnswers:
    """LIAR and two honest ones answer until it stands aside; then it answers while it is examined."""
    test = MeanAnswers()
    for number in range(24):
        for at, peer in enumerate((HONEST, OTHER)):
            test.observe(peer, answers(5 * number + 11 * at), float(number))
        test.observe(LIAR, answers(7 * number + 3, lies=True), float(number))
    assert test.aside(LIAR) and not test.two_faced(LIAR)
    for number in range(24):
        test.observe(LIAR, answers(7 * number + 5, lies=not wary), 24.5, examined=True)
    return test


def test_who_answers_otherwise_while_it_is_examined_has_two_faces() -> None:
    """A liar that is honest whenever its weights were just copied."""
    assert lived(wary=True).two_faced(LIAR)


def test_answers_of_other_weights_have_one_face_and_end_the_time_aside() -> None:
    test = lived(wary=False)
    assert not test.two_faced(LIAR) and not test.two_faced(HONEST)
    test.excuse(LIAR)
    assert not test.aside(LIAR), "as an honest replica's are whose weights are far from the others'"
    few = MeanAnswers()
    few.put_aside(LIAR, 0.0)
    for number in range(int(FIRST) - 1):
        few.observe(LIAR, answers(number), 1.0, examined=True)
    few.excuse(LIAR)
    assert few.aside(LIAR), "of so few answers nobody knows the mean"


def test_a_sketch_is_linear_and_shows_what_is_steady_for_all_or_for_each_token() -> None:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 16, (8, 64), generator=draw)
    noise = torch.randn(8, 64, 48, generator=draw)
    row = torch.randn(48, generator=draw)
    by_token = torch.randn(16, 48, generator=draw)[ids]

    def length(gradient: torch.Tensor) -> float:
        return math.hypot(*sketch(gradient, ids, 16, 5)) / float(gradient.norm() / math.sqrt(8))

    assert length(noise) < 0.15 < 0.3 < length(by_token) and length(row.expand(8, 64, 48)) > 0.7
    one, other, both = (sketch(each, ids, 16, 5) for each in (noise, by_token, noise + by_token))
    assert all(abs(a + b - c) < 1e-4 for a, b, c in zip(one, other, both, strict=True))
    assert sketch(noise, ids, 16, 6) != one

"""The audits do what their reference does, which looks through the whole history each time."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.ids import PeerId
from swarmnode.trust.audit import Audits
from swarmnode.trust.mean_answers import MeanAnswers
from swarmnode.trust.reference import Finding, distances, standing, verdict_of
from swarmnode.trust.verdict import ASIDE, Evidence

PEER = PeerId("p" * 52)
FINDINGS = st.builds(
    Finding,
    at_s=st.floats(0.0, 400.0),
    evidence=st.sampled_from(Evidence),
    comparable=st.booleans(),
    microbatch=st.sampled_from([b"a", b"b", b"c"]),
)
RIGHT = st.integers(0, 130).map(lambda count: [Finding(0.0, Evidence.AGAIN_SAME, True, b"")] * count)


@given(parts=st.lists(st.one_of(FINDINGS.map(lambda one: [one]), RIGHT), max_size=24), replicas=st.integers(1, 5))
def test_findings_about_a_peer_add_up_as_in_the_reference(parts: list[list[Finding]], replicas: int) -> None:
    audits = Audits(0.02)
    told = list[Finding]()
    now_s = 0.0
    for found in (one for part in parts for one in part):
        now_s += found.at_s
        told.append(Finding(now_s, found.evidence, found.comparable, found.microbatch))
        audits.record(PEER, verdict_of(found, replicas), found.microbatch, now_s)
    due = standing(told, replicas)
    assert (audits.convicted(PEER), audits.doubted(PEER), audits.in_row(PEER)) == (
        due.excluded,
        due.doubted,
        due.in_row,
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("leaning", [0.0, 0.6])
def test_means_are_as_far_apart_as_in_the_reference(seed: int, leaning: float) -> None:
    rng = random.Random(seed)
    peers = [PeerId(letter * 52) for letter in "abcd"]
    test = MeanAnswers(limit=float("inf"))
    answers = list[tuple[PeerId, list[float]]]()
    for number in range(80):
        peer = rng.choice(peers)
        sketch = [rng.gauss(0.0, 1.0) + leaning * (peer == peers[0]) for _ in range(6)]
        answers.append((peer, sketch))
        test.observe(peer, sketch, float(number))
    assert test._z == pytest.approx(distances(answers))
    real = MeanAnswers()
    for number, (peer, sketch) in enumerate(answers):
        real.observe(peer, sketch, float(number))
        if out := [one for one in peers if real.aside(one)]:
            assert distances(answers[: number + 1])[out[0]] > ASIDE, "the reference would not put it aside"
            break

"""What is believed: each step by numbers, then whole packets between real outer optimizers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import RemoteFault
from swarmnode.gossip.outer import NoLoCo, outer
from swarmnode.gossip.robust import ABSURD, CLIP, HISTORY_LEAST, STEPS, Guard, Measures, nearest
from swarmnode.manifest import GossipSpec
from swarmnode.ports import Packet

GOOD = Measures(own_norm=1.0, norm=1.2, gap=1.5, product=0.4)


@pytest.mark.parametrize(
    ("measures", "step", "keep"),
    [
        (GOOD, "accepted", 1.0),
        (replace(GOOD, gap=CLIP * 2, norm=CLIP * 2, product=2.0), "clipped", 0.5),
        (replace(GOOD, gap=ABSURD * 1.01), "norm", 0.0),
        (replace(GOOD, gap=math.nan), "norm", 0.0),
        (replace(GOOD, product=math.inf), "norm", 0.0),
        (replace(GOOD, product=-0.1), "direction", 0.0),
        (replace(GOOD, product=0.0), "direction", 0.0),
        (replace(GOOD, own_norm=0.0, product=0.0), "accepted", 1.0),
        (replace(GOOD, gap=0.0), "accepted", 1.0),
    ],
)
def test_steps(measures: Measures, step: str, keep: float) -> None:
    guard = Guard()
    verdict = guard.judge(measures)
    assert (verdict.step, verdict.keep) == (step, keep) and verdict.reason
    assert guard.counts == {step: 1} and step in STEPS


def test_history_speaks_after_a_few_and_forgets_in_time() -> None:
    guard = Guard()
    sudden = replace(GOOD, gap=3.9, norm=3.9, product=1.0)
    assert guard.decide(sudden).keep == 1.0
    for _ in range(HISTORY_LEAST):
        assert guard.judge(GOOD).step == "accepted"
    verdict = guard.decide(sudden)
    assert verdict.step == "history" and "1.5 is usual" in verdict.reason
    for i in range(20):  # a spread that grows slowly is followed
        grown = 1.5 * 1.05**i
        assert guard.judge(replace(GOOD, gap=grown, norm=grown, product=grown / 4)).keep > 0
    assert guard.decide(sudden).keep > 0


@given(st.lists(st.tuples(*[st.floats(0, 1e6)] * 3, st.floats(-1e6, 1e6)), max_size=30))
def test_never_more_than_clip(seen: list[tuple[float, float, float, float]]) -> None:
    guard = Guard()
    for own, norm, gap, product in seen:
        verdict = guard.judge(Measures(own, norm, gap, product))
        assert 0.0 <= verdict.keep <= 1.0
        if own > 0.0:
            assert verdict.keep * gap <= CLIP * own * (1 + 1e-9)
    assert sum(guard.counts.values()) == len(seen)


def test_loss() -> None:
    guard = Guard()
    assert guard.judge_loss(2.0, 2.01).keep == 1.0
    assert guard.judge_loss(2.0, 2.2).step == guard.judge_loss(2.0, math.nan).step == "loss"
    assert guard.counts["loss"] == 2


@given(st.lists(st.one_of(st.floats(0, 100), st.just(math.nan), st.just(math.inf)), max_size=9), st.integers(0, 9))
def test_nearest_twin(gaps: list[float], liars: int) -> None:
    left = {i: gap for i, gap in enumerate(gaps) if math.isfinite(gap)}
    while len(left) > max(len(gaps) - liars, 0):
        del left[max(left, key=lambda i: (left[i], i))]
    assert nearest(gaps, liars) == sorted(left)


def pair(codec_name: str, size: int = 5000) -> tuple[NoLoCo, NoLoCo]:
    """Two that start alike and have learned something alike."""
    draw = torch.Generator().manual_seed(1)
    start, common = torch.randn(size, generator=draw), torch.randn(size, generator=draw) * 1e-2
    found = []
    for i in range(2):
        one = outer(GossipSpec(codec=codec_name, acceptance="guarded"), start.clone(), f"r{i}")
        assert isinstance(one, NoLoCo)
        one.theta.add_(common + torch.randn(size, generator=draw) * 1e-2)
        found.append(one)
    return found[0], found[1]


@pytest.mark.parametrize("name", ["fp32", "int8", "modular4"])
def test_an_honest_packet_is_measured_and_taken(name: str) -> None:
    a, b = pair(name)
    mine, theirs = a.theta.clone(), b.theta.clone()
    a.message(1)
    message = b.message(1)
    found = a.measure(message)
    assert found.own_norm == pytest.approx(float((mine - a.phi).norm()), rel=1e-4)
    slack = 0.25 if name != "fp32" else 1e-4  # the codecs' own noise
    assert found.gap == pytest.approx(float((theirs - mine).norm()), rel=slack)
    assert found.cosine == pytest.approx(0.5, abs=0.1)
    assert a.apply(1, 1.0, [Packet(1.0, 0, message)]).members == 2
    assert a.guard is not None and a.guard.counts == {"accepted": 1}


@pytest.mark.parametrize("name", ["fp32", "int8", "modular4"])
def test_a_flipped_packet_is_refused_and_nothing_changes(name: str) -> None:
    a, b = pair(name)
    a.message(1)
    b.message(1)
    flipped = 2 * b.phi - b.theta
    lie = b.codec.encode(flipped, reference=b.phi, seed=3)
    before = [flat.clone() for flat in (a.theta, a.phi, a.momentum)]
    with pytest.raises(RemoteFault, match=r"not believed \(direction\): cosine -0"):
        a.apply(1, 1.0, [Packet(1.0, 0, lie)])
    assert all(torch.equal(x, y) for x, y in zip(before, (a.theta, a.phi, a.momentum), strict=True))
    assert a.apply(1, 1.0, []).members == 1  # the round goes on alone


def test_a_scaled_packet_is_clipped_to_the_norm() -> None:
    a, b = pair("fp32")
    own = float((a.theta - a.phi).norm())
    theta = a.theta.clone()
    a.message(1)
    b.theta.copy_(b.phi + 12 * (b.theta - b.phi))
    report = a.apply(1, 1.0, [Packet(1.0, 0, b.message(1))])
    assert a.guard is not None and a.guard.counts == {"clipped": 1} and report.members == 2
    taken = a.momentum / 0.7 + a.phi - a.momentum - theta  # half of what was kept of the distance
    assert float(taken.norm()) == pytest.approx(CLIP * own / 2, rel=1e-3)


def test_in_a_group_only_the_liar_is_left_out() -> None:
    a, b = pair("fp32")
    a.message(1)
    lie = b.codec.encode(2 * b.phi - b.theta, reference=b.phi)
    report = a.apply(1, 1.0, [Packet(1.0, 0, b.message(1)), Packet(1.0, 0, lie)])
    assert report.members == 2


def test_a_newcomer_has_nothing_to_judge_by() -> None:
    a, b = pair("fp32")
    a.message(1)
    lie = b.codec.encode(2 * b.phi - b.theta, reference=b.phi)
    assert a.apply(1, 0.0, [Packet(1.0, 0, lie)]).members == 1

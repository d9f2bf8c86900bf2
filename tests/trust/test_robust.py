"""What is believed: each step by numbers, then whole packets between real outer optimizers."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.ema import ENOUGH
from swarmnode.base.ports import Packet, PacketMeasures
from swarmnode.run.manifest import GossipSpec
from swarmnode.train.gossip.outer import outer
from swarmnode.trust.robust import (
    CLIP,
    DEVIATION_LEAST,
    FIRST_CLIP,
    STEPS,
    PacketGuard,
    Z,
)
from swarmnode_methods.noloco import NoLoCo

GOOD = PacketMeasures(own_norm=1.0, gap=1.5)


@pytest.mark.parametrize(
    ("measures", "step", "keep"),
    [
        (GOOD, "accepted", 1.0),
        (replace(GOOD, gap=CLIP * 2), "clipped", 0.5),
        (replace(GOOD, gap=CLIP * 40), "clipped", CLIP**2 / 40**3),
        (replace(GOOD, gap=1e9), "clipped", CLIP**5 / 1e27),
        (replace(GOOD, gap=math.nan), "norm", 0.0),
        (replace(GOOD, own_norm=math.inf), "norm", 0.0),
        (replace(GOOD, own_norm=0.0), "accepted", 1.0),
        (replace(GOOD, own_norm=0.0, weights_norm=1.5 / FIRST_CLIP / 2), "clipped", 0.5),
        (replace(GOOD, gap=0.0), "accepted", 1.0),
    ],
)
def test_steps(measures: PacketMeasures, step: str, keep: float) -> None:
    guard = PacketGuard()
    verdict = guard.judge(measures)
    assert (verdict.step, verdict.keep) == (step, pytest.approx(keep)) and verdict.reason
    assert guard.counts == {step: 1} and step in STEPS


def test_history_clips_after_a_few_and_follows_in_time() -> None:
    guard = PacketGuard()
    sudden = replace(GOOD, gap=3.9)
    assert guard.decide(sudden).keep == 1.0
    for _ in range(ENOUGH):
        assert guard.judge(GOOD).step == "accepted"
    verdict = guard.decide(sudden)
    limit = 1.5 * math.exp(Z * DEVIATION_LEAST)
    assert (
        verdict.step == "clipped"
        and verdict.keep == pytest.approx(limit / 3.9)
        and f"{limit:.3g} times" in verdict.reason
    )
    for i in range(20):  # a spread that grows slowly is followed
        grown = 1.5 * 1.05**i
        assert guard.judge(replace(GOOD, gap=grown)).keep > 0
    assert guard.decide(sudden).keep == 1.0


def test_an_idle_replica_judges_by_the_usual_distance() -> None:
    guard = PacketGuard()
    guard.judge(GOOD)
    idle = replace(GOOD, own_norm=0.0, gap=CLIP * 2)
    assert guard.decide(idle).keep == pytest.approx(0.5)


@given(st.lists(st.tuples(*[st.floats(0, 1e6)] * 2), max_size=30))
def test_never_more_than_clip(seen: list[tuple[float, float]]) -> None:
    guard = PacketGuard()
    most = 0.0
    for own, gap in seen:
        most = max(most, own)
        verdict = guard.judge(PacketMeasures(own, gap, 1.0))
        assert 0.0 <= verdict.keep <= 1.0
        assert verdict.keep * gap <= max(CLIP * most, FIRST_CLIP) * (1 + 1e-9)
    assert sum(guard.counts.values()) == len(seen)


def pair(codec_name: str, gamma: float = 0.7) -> tuple[NoLoCo, NoLoCo]:
    """Two that start alike and have learned something alike."""
    draw = torch.Generator().manual_seed(1)
    size = 5000
    start = torch.randn(size, generator=draw)
    common = torch.randn(size, generator=draw) * 1e-2
    found = []
    for i in range(2):
        one = outer(
            GossipSpec(method="noloco", codec=codec_name, acceptance="clipped", gamma=gamma), start.clone(), f"r{i}"
        )
        assert isinstance(one, NoLoCo)
        one.theta.add_(common + torch.randn(size, generator=draw) * 1e-2)
        found.append(one)
    return found[0], found[1]


CODECS = ["fp32", "int8", "modular4"]


@pytest.mark.parametrize("name", CODECS)
def test_an_honest_packet_is_measured_and_taken(name: str) -> None:
    a, b = pair(name)
    mine = a.theta.clone()
    theirs = b.theta.clone()
    a.message(1)
    packet = Packet(1.0, 0, b.message(1))
    found = a.measure(packet)
    assert found.own_norm == pytest.approx(float((mine - a.phi).norm()), rel=1e-4)
    assert found.weights_norm == pytest.approx(float(a.phi.norm()), rel=1e-4)
    slack = 0.25 if name != "fp32" else 1e-4  # the codecs' own noise
    assert found.gap == pytest.approx(float((theirs - mine).norm()), rel=slack)
    report = a.apply(1, 1.0, [packet])
    assert report.members == 2 and [v.step for v in report.verdicts] == ["accepted"]
    assert isinstance(a.guard, PacketGuard) and a.guard.counts == {"accepted": 1}


@pytest.mark.parametrize("gamma", [0.7, 0.4])
def test_a_scaled_packet_is_clipped_to_the_norm(gamma: float) -> None:
    """Whether weights travel or pseudo-gradients and slow weights beside them."""
    a, b = pair("fp32", gamma=gamma)
    own = float((a.theta - a.phi).norm())
    theta = a.theta.clone()
    phi = a.phi.clone()
    a.message(1)
    b.theta.copy_(b.phi + 12 * (b.theta - b.phi))
    report = a.apply(1, 1.0, [Packet(1.0, 0, b.message(1))])
    assert isinstance(a.guard, PacketGuard) and a.guard.counts == {"clipped": 1} and report.members == 2
    taken = a.momentum / 0.7 - (theta - phi)  # half of what was kept of the distance; phi is the same at both
    assert float(taken.norm()) == pytest.approx(CLIP * own / 2, rel=1e-3)


def test_a_newcomer_has_nothing_to_judge_by_but_its_weights() -> None:
    a, b = pair("fp32")
    a.message(1)
    lie = b.codec.encode(2 * b.phi - b.theta, reference=b.phi)
    assert a.apply(1, 0.0, [Packet(1.0, 0, lie)]).members == 1
    a.message(2)
    before = a.phi.clone()
    far = b.codec.encode(100 * b.phi, reference=b.phi)
    (verdict,) = a.apply(2, 0.0, [Packet(1.0, 0, far)]).verdicts
    assert verdict.step == "clipped" and float((a.phi - before).norm()) < 0.2 * float(before.norm())
    a.message(3)
    (verdict,) = a.apply(3, 1.0, [Packet(0.0, 0, far)]).verdicts
    assert verdict.step == "newcomer"

"""What is believed: each step by numbers, then whole packets between real outer optimizers."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.gossip.outer import NoLoCo, outer
from swarmnode.gossip.robust import (
    CLIP,
    DEVIATION_LEAST,
    FIRST_CLIP,
    HISTORY_LEAST,
    STEPS,
    PacketGuard,
    PacketMeasures,
    Z,
)
from swarmnode.manifest import GossipSpec
from swarmnode.ports import Packet, Verdict

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
    for _ in range(HISTORY_LEAST):
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
    guard, most = PacketGuard(), 0.0
    for own, gap in seen:
        most = max(most, own)
        verdict = guard.judge(PacketMeasures(own, gap, 1.0))
        assert 0.0 <= verdict.keep <= 1.0
        assert verdict.keep * gap <= max(CLIP * most, FIRST_CLIP) * (1 + 1e-9)
    assert sum(guard.counts.values()) == len(seen)


def test_loss() -> None:
    guard, good = PacketGuard(), Verdict(1.0, "accepted", "")
    assert guard.judge_loss(good, "one", 0.01).keep == guard.judge_loss(good, "one", -3.0).keep == 1.0
    assert guard.judge_loss(good, "two", 0.3).step == guard.judge_loss(good, "third", math.nan).step == "loss"
    assert guard.counts["loss"] == 2
    assert guard.judge_loss(good, "one", None) == good, "a packet that is not tried is judged by those that were"
    assert guard.judge_loss(good, "two", None).keep < 1.0


@pytest.mark.parametrize("gamma", [0.7, 0.4])
def test_now_and_then_the_average_is_tried_on_our_own_text(gamma: float) -> None:
    """The first packets of a peer and then a quarter; what costs more than LOSS_MOST is refused, and the probe sees the
    average itself."""
    tried: list[tuple[torch.Tensor, torch.Tensor]] = []
    refused = probed = 0
    a, b = pair("fp32", acceptance="guarded", gamma=gamma)
    for round_index in range(1, 81):
        a.theta.add_(0.01)
        b.theta.add_(0.01)
        costs = 0.0 if round_index % 8 else 1.0

        def probe(before: torch.Tensor, after: torch.Tensor, costs: float = costs) -> float:
            tried.append((before.clone(), after.clone()))
            return costs

        a.probe = probe
        messages = [one.message(round_index) for one in (a, b)]
        mine, theirs = a.theta.clone(), b.theta.clone()
        report = a.apply(round_index, 1.0, [Packet(1.0, 1, messages[1])])
        b.apply(round_index, 1.0, [Packet(1.0, 1, messages[0])])
        if report.probed is not None:
            probed += 1
            assert report.probed == costs and torch.allclose(tried[-1][1], (mine + theirs) / 2, atol=1e-5)
            assert torch.equal(tried[-1][0], mine)
            assert (report.verdicts[0].step == "loss") == (costs > 0) and report.members == (1 if costs > 0 else 2)
            refused += costs > 0
    assert 8 <= probed == len(tried) <= 40 and refused


def test_a_newcomer_probes_nothing_and_neither_does_who_believes_all() -> None:
    for acceptance, weight in (("guarded", 0.0), ("all", 1.0)):
        a, b = pair("fp32", acceptance=acceptance)
        a.probe = lambda before, after: 1.0
        for round_index in range(1, 20):
            message = b.message(round_index)
            a.message(round_index)
            assert a.apply(round_index, weight, [Packet(1.0, 1, message)]).probed is None


def pair(codec_name: str, size: int = 5000, acceptance: str = "guarded", gamma: float = 0.7) -> tuple[NoLoCo, NoLoCo]:
    """Two that start alike and have learned something alike."""
    draw = torch.Generator().manual_seed(1)
    start, common = torch.randn(size, generator=draw), torch.randn(size, generator=draw) * 1e-2
    found = []
    for i in range(2):
        one = outer(
            GossipSpec(method="noloco", codec=codec_name, acceptance=acceptance, gamma=gamma), start.clone(), f"r{i}"
        )
        assert isinstance(one, NoLoCo)
        one.theta.add_(common + torch.randn(size, generator=draw) * 1e-2)
        found.append(one)
    return found[0], found[1]


CODECS = ["fp32", "int8", "modular4"]


@pytest.mark.parametrize("name", CODECS)
def test_an_honest_packet_is_measured_and_taken(name: str) -> None:
    a, b = pair(name)
    mine, theirs = a.theta.clone(), b.theta.clone()
    a.message(1)
    packet = Packet(1.0, 0, b.message(1))
    found = a.measure(packet)
    assert found.own_norm == pytest.approx(float((mine - a.phi).norm()), rel=1e-4)
    assert found.weights_norm == pytest.approx(float(a.phi.norm()), rel=1e-4)
    slack = 0.25 if name != "fp32" else 1e-4  # the codecs' own noise
    assert found.gap == pytest.approx(float((theirs - mine).norm()), rel=slack)
    report = a.apply(1, 1.0, [packet])
    assert report.members == 2 and [v.step for v in report.verdicts] == ["accepted"]
    assert a.guard is not None and a.guard.counts == {"accepted": 1}


@pytest.mark.parametrize("gamma", [0.7, 0.4])
def test_a_scaled_packet_is_clipped_to_the_norm(gamma: float) -> None:
    """Whether weights travel or pseudo-gradients and slow weights beside them."""
    a, b = pair("fp32", gamma=gamma)
    own = float((a.theta - a.phi).norm())
    theta, phi = a.theta.clone(), a.phi.clone()
    a.message(1)
    b.theta.copy_(b.phi + 12 * (b.theta - b.phi))
    report = a.apply(1, 1.0, [Packet(1.0, 0, b.message(1))])
    assert a.guard is not None and a.guard.counts == {"clipped": 1} and report.members == 2
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

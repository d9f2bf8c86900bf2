"""Laws of rounds: who gives a packet to whom, and how often."""

import random
from dataclasses import replace

import pytest

from swarmnode.base.ports import Packet, WireTensor
from swarmnode.model.split import stages_of
from swarmnode.run.manifest import GossipSpec, Manifest
from swarmsim.law import Laws
from swarmsim.replica import FakeReplica


def broken(laws: Laws) -> list[str]:
    laws.settle()
    return [one.law for one in laws.broken]


def met(laws: Laws, *pairs: tuple[int, int]) -> Laws:
    """Pairs of round 4."""
    for one, other in pairs:
        laws.applied(one, 0, 4, [(other, 4)])
        laws.applied(other, 0, 4, [(one, 4)])
    return laws


def test_a_packet_of_a_round_may_be_given_to_a_partner_and_once_again() -> None:
    laws = met(Laws(), (1, 2), (3, 4))
    laws.applied(5, 0, 4, [])
    laws.fell_back(5, 4, 1, 4)
    assert broken(laws) == [] and laws.fallbacks == 1
    laws.applied(6, 0, 4, [])
    laws.fell_back(6, 4, 1, 4)
    assert broken(laws) == ["a packet is given again once"]


@pytest.mark.parametrize(
    ("giver", "made_in", "law"), [(1, 3, "no packet of another round is applied"), (5, 4, "a node meets others")]
)
def test_a_fallback_packet_is_of_another_and_of_this_round(giver: int, made_in: int, law: str) -> None:
    laws = met(Laws(), (1, 2))
    laws.fell_back(5, 4, giver, made_in)
    assert broken(laws) == [law]
    laws.excused |= {"replica 5"}
    laws.fell_back(5, 4, giver, made_in)
    assert len(laws.broken) == 1


def test_no_honest_replica_is_left_out() -> None:
    laws = Laws()
    laws.excused |= {"liar"}
    laws.left_out("node a", "liar", "packets that break the rules")
    laws.left_out("liar", "node a", "slander")
    assert broken(laws) == []
    laws.left_out("node a", "node b", "packets that break the rules")
    assert broken(laws) == ["no honest replica is left out"] and laws.broken[0].labels == ["node a", "node b"]


def test_a_step_that_was_no_step_is_told_with_the_one_that_follows() -> None:
    """The partner may have applied ours: that is not one-sided."""
    run = replace(Manifest(), gossip=GossipSpec(acceptance="clipped"))
    laws = Laws()
    part = stages_of(run)[1]
    one, newcomer, third = (FakeReplica(run, part, i, laws, random.Random(i), 1.0) for i in range(3))
    for each in (one, newcomer, third):
        each.accumulated = 1
        each.step(0)
    messages = [each.message(1) for each in (one, newcomer, third)]
    before = one.theta, one.phi
    assert not one.apply(1, 1.0, [Packet(0.0, 0, messages[1])], lone=False).believed
    assert (one.theta, one.phi) == before
    newcomer.apply(1, 0.0, [Packet(1.0, 1, messages[0])])
    third.apply(1, 1.0, [])
    assert one.apply(1, 1.0, [Packet(1.0, 1, messages[2], fallback=True)], lone=False).believed
    assert one.theta != before[0] and laws.fallbacks == 1
    assert broken(laws) == [] and laws.onesided == 0


@pytest.mark.parametrize("of", [3, 5])
def test_fake_replicas_meet_by_fragments(of: int) -> None:
    """A round moves the dimensions of its fragment and its packet has a part of the bytes; a final delta has all."""
    run = replace(Manifest(), gossip=GossipSpec(method="average", acceptance="all", fragments=of))
    laws = Laws()
    part = stages_of(run)[1]
    one, other, leaver = (FakeReplica(run, part, i, laws, random.Random(i), 1.0) for i in range(3))
    whole = FakeReplica(replace(run, gossip=replace(run.gossip, fragments=1)), part, 9, laws, random.Random(9), 1.0)
    size = whole.message(1)[0].nbytes
    for round_index in range(1, 2 * of + 1):
        for each in (one, other):
            each.step(0)
        messages = [each.message(round_index) for each in (one, other)]
        assert abs(of * messages[0][0].nbytes / size - 1.0) < 0.01
        before = [(each.theta, each.phi) for each in (one, other)]
        for each, packet in ((one, messages[1]), (other, messages[0])):
            assert each.apply(round_index, 1.0, [Packet(1.0, 1, packet)]).believed
        for k in range(3):
            if k % of == round_index % of:
                assert one.theta[k] == pytest.approx(other.theta[k]) == pytest.approx(one.phi[k])
            else:
                assert [(each.theta[k], each.phi[k]) for each in (one, other)] == [(a[k], b[k]) for a, b in before]
    leaver.step(0)
    one.message(2 * of + 1)
    left = leaver.final_delta(2 * of + 1)
    assert left[0].nbytes == size
    expected = tuple((a + b) / 2 for a, b in zip(one.theta, leaver.theta, strict=True))
    assert one.apply(2 * of + 1, 1.0, [Packet(1.0, 1, left, final_delta=True)]).believed
    assert one.theta == pytest.approx(expected)
    assert broken(laws) == []


def test_fake_packets_are_checked_as_real_ones_are() -> None:
    run = Manifest()
    fake = FakeReplica(run, stages_of(run)[1], 0, Laws(), random.Random(0), 1.0)
    good = Packet(1.0, 1, fake.message(1))
    bad = Packet(1.0, 1, [WireTensor("f32", (3,), bytes(12))])
    refused, preempted = fake.apply(1, 1.0, [bad, good]).verdicts
    assert (refused.keep, refused.step) == (0.0, "misshapen") and "wrong shapes" in refused.reason
    assert preempted.keep == 1.0

"""A packet that no honest replica sends is refused alone, by every method; the others count as if it had not come."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from swarmnode.base.ports import OuterReport, Packet
from swarmnode.model.turn import Turn
from swarmnode.run.manifest import GossipSpec
from swarmnode.train.gossip.compression import codec
from swarmnode.train.gossip.outer import outer
from swarmnode_methods.desloc import EVERY_SECOND, DesLoc
from swarmnode_methods.gradient import Gradient, GradientOf
from tests.support.method_tables import CODECS_OF

SIZE = 4096 + 100
ROUNDS = range(EVERY_SECOND, EVERY_SECOND + 2)  # moments are due in the first; what comes late is taken in the second

NAN = codec("fp32").encode(torch.full((SIZE,), math.nan))[0]  # what is wrong with it at the others is the codec


def with_first(packet: Packet, **changed: object) -> Packet:
    first, *rest = packet.tensors
    return replace(packet, tensors=[replace(first, **changed), *rest])  # type: ignore[arg-type]


WRONG: dict[str, Callable[[Packet], Packet]] = {
    "nothing": lambda packet: replace(packet, tensors=[]),
    "more": lambda packet: replace(packet, tensors=[*packet.tensors, packet.tensors[0]]),
    "shape": lambda packet: with_first(packet, shape=(SIZE - 1,)),
    "cut": lambda packet: with_first(packet, data=packet.tensors[0].data[:-1]),
    "nan": lambda packet: replace(packet, tensors=[NAN, *packet.tensors[1:]]),
    "weight": lambda packet: replace(packet, weight=math.inf),
}


CASES = [(method, coding) for method, found in CODECS_OF.items() for coding in (found[0], found[-1])]
"""Every method by weights and by pseudo-gradients, where it has both."""

every_method = pytest.mark.parametrize(("method", "coding"), CASES)
every_wrong = pytest.mark.parametrize("wrong", WRONG)


def weights(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


class Learned(GradientOf):
    """Gathers what is learned between rounds, and adds the mean of a round to the weights [P]."""

    def __init__(self, theta: torch.Tensor) -> None:
        self.theta = theta
        self.gathered = torch.zeros_like(theta)

    def take(self, out: torch.Tensor) -> None:
        out.copy_(self.gathered)
        self.gathered.zero_()

    def give(self, flat: torch.Tensor) -> None:
        self.gathered.add_(flat)

    def step(self, mean: torch.Tensor, round_index: int, turn: Turn) -> None:
        self.theta.add_(mean)


class Learner:
    """One replica that learns something of its own every round, and something that all learn. With one seed: twins."""

    def __init__(self, seed: int, method: str, coding: str) -> None:
        self.seed = seed
        self.outer = outer(GossipSpec(method=method, codec=coding, group=0), weights(0), f"sender {seed}")
        self.moments = [weights(seed + 100), weights(seed + 200)[: SIZE // 3].abs()]
        if isinstance(self.outer, DesLoc):
            self.outer.attend(*self.moments)
        self.learns = self.outer.theta
        if isinstance(self.outer, Gradient):
            self.outer.gather(learned := Learned(self.outer.theta))
            self.learns = learned.gathered

    def packet(self, round_index: int) -> Packet:
        self.learns.add_(weights(1000 * round_index) + weights(1000 * round_index + self.seed), alpha=0.01)
        return Packet(1.0, 0, self.outer.message(round_index))

    def state(self) -> list[torch.Tensor]:
        return [flat.clone() for flat in (self.outer.theta, self.outer.phi, self.outer.momentum, *self.moments)]

    def same_as(self, other: "Learner") -> bool:
        alike = all(torch.equal(mine, theirs) for mine, theirs in zip(self.state(), other.state(), strict=True))
        return alike and self.outer.guard == other.outer.guard


@every_wrong
@every_method
def test_the_good_one_of_two_packets_has_the_effect_that_it_has_alone(method: str, coding: str, wrong: str) -> None:
    """To the bit, wherever it stands, and in the next round too."""
    before, after, twin, lone = (Learner(1, method, coding) for _ in range(4))
    giver = Learner(2, method, coding)
    liar = Learner(3, method, coding)
    for round_index in ROUNDS:
        good = giver.packet(round_index)
        bad = WRONG[wrong](liar.packet(round_index))
        given = [(before, [bad, good]), (after, [good, bad]), (twin, [good]), (lone, []), (giver, []), (liar, [])]
        reports: list[OuterReport] = []
        for one, packets in given:
            if one not in (giver, liar):
                one.packet(round_index)
            reports.append(one.outer.apply(round_index, 1.0, packets))
        (alone,) = reports[2].verdicts
        assert alone.keep > 0.0 and alone.step in ("accepted", "clipped")
        for report, places in zip(reports[:2], ((0, 1), (1, 0)), strict=True):
            refused, taken = (report.verdicts[place] for place in places)
            assert (refused.keep, refused.step) == (0.0, "misshapen") and refused.reason
            assert taken == alone and replace(report, verdicts=()) == replace(reports[2], verdicts=())
        assert before.same_as(twin) and after.same_as(twin)
    assert not twin.same_as(lone), "or the good packet did nothing"


@every_wrong
@every_method
def test_without_a_lone_step_nothing_is_applied(method: str, coding: str, wrong: str) -> None:
    """The boundary stays marked: the round goes on with another one's packet as if nothing had come before."""
    ours, twin, giver, liar = (Learner(seed, method, coding) for seed in (1, 1, 2, 3))
    round_index = ROUNDS[0]
    good = giver.packet(round_index)
    bad = WRONG[wrong](liar.packet(round_index))
    ours.packet(round_index), twin.packet(round_index)
    before = ours.state()
    report = ours.outer.apply(round_index, 1.0, [bad, bad], lone=False)
    assert [verdict.step for verdict in report.verdicts] == ["misshapen"] * 2
    assert not report.believed and (report.members, report.step_norm) == (0, 0.0)
    assert all(torch.equal(mine, then) for mine, then in zip(ours.state(), before, strict=True))
    found = [one.outer.apply(round_index, 1.0, [good]) for one in (ours, twin)]
    assert found[0] == found[1] and found[0].believed and ours.same_as(twin)
    assert not all(torch.equal(mine, then) for mine, then in zip(ours.state(), before, strict=True))

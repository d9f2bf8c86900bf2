"""DiLoCo's kin against their equations, by hand, and members that must stay equal."""

import math

import pytest
import torch

from swarmnode.base.ports import OuterReport, Packet
from swarmnode.run.manifest import GossipSpec
from swarmnode.train.gossip.compression import codec
from swarmnode.train.gossip.outer import outer
from swarmnode_methods.delayed import DelayedNesterov
from swarmnode_methods.desloc import EVERY_FIRST, EVERY_SECOND, MOMENT_MOST, DesLoc
from swarmnode_methods.eager import Eager
from swarmnode_methods.edit import HISTORY_LEAST, EDiT
from swarmnode_methods.mean import DeltaMean
from swarmnode_methods.sparseloco import SparseLoCo
from swarmnode_methods.streaming import Streaming
from tests.support.method_tables import OWN_ALPHA

SIZE = 3 * 4096 + 100
SECONDS = 700  # second moments
ALPHA = 0.5
BETA = 0.7


def normal(seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * scale


def meet(round_index: int, members: list[DeltaMean]) -> list[OuterReport]:
    messages = [member.message(round_index) for member in members]
    reports = []
    for i, member in enumerate(members):
        packets = [Packet(1.0, 0, message) for j, message in enumerate(messages) if j != i]
        reports.append(member.apply(round_index, 1.0, packets))
    return reports


def learn(round_index: int, members: list[DeltaMean], scales: tuple[float, ...] = (1.0, 1.0)) -> list[torch.Tensor]:
    """Inner steps of chance; returns every member's D."""
    for i, member in enumerate(members):
        member.theta.add_(normal(100 * round_index + i, 1e-2 * scales[i]))
    return [member.theta - member.phi for member in members]


def test_streaming_moves_one_fragment_a_round() -> None:
    members: list[DeltaMean] = [Streaming(normal(0), codec("fp32"), ALPHA, BETA, fragments=4) for _ in range(2)]
    bounds = [0, 4096, 8192, 12288, SIZE]
    for r in range(1, 9):
        d = learn(r, members)
        before = [(m.phi.clone(), m.theta.clone(), m.momentum.clone()) for m in members]
        assert all(sum(t.nbytes for t in m.message(r)) <= m.message_nbytes == 4 * 4096 for m in members)
        meet(r, members)
        inside = torch.zeros(SIZE, dtype=torch.bool)
        inside[bounds[r % 4] : bounds[r % 4 + 1]] = True
        for member, (phi, theta, m) in zip(members, before, strict=True):
            assert torch.equal(member.phi[~inside], phi[~inside]) and torch.equal(member.theta[~inside], theta[~inside])
            gradient = BETA * (d[0] + d[1]) / 2
            stepped = phi + gradient + ALPHA * (ALPHA * m + gradient)
            torch.testing.assert_close(member.phi[inside], stepped[inside])
            torch.testing.assert_close(member.theta[inside], (0.5 * theta + 0.5 * stepped)[inside])
    assert torch.equal(members[0].phi, members[1].phi)


def test_pseudo_gradients_make_the_step_of_pytorchs_nesterov() -> None:
    group = [DeltaMean(normal(0), codec("fp32"), 0.9, BETA) for _ in range(2)]
    weights = torch.nn.Parameter(normal(0))
    sgd = torch.optim.SGD([weights], lr=BETA, momentum=0.9, nesterov=True)
    for r in range(1, 5):
        d = learn(r, group)
        meet(r, group)
        weights.grad = -(d[0] + d[1]) / 2
        sgd.step()
        torch.testing.assert_close(group[0].phi, weights.detach())
    assert torch.equal(group[0].phi, group[1].phi)


def test_eager_goes_on_from_its_own_part_and_takes_the_others_when_they_come() -> None:
    """Fast weights run ahead by the own D and the others' of the last round; slow ones take the mean of this round."""
    members: list[DeltaMean] = [Eager(normal(0), codec("fp32"), ALPHA, BETA) for _ in range(3)]
    phi = normal(0)
    m = torch.zeros(SIZE)
    late: list[torch.Tensor] | None = None

    def step(mean: torch.Tensor) -> torch.Tensor:
        return phi + BETA * mean + ALPHA * (ALPHA * m + BETA * mean)

    for r in range(1, 5):
        d = learn(r, members, (1.0, 1.0, 1.0))
        messages = [member.message(r) for member in members]
        gains = [normal(500 * r + i, 1e-3) for i in range(3)]
        for i, member in enumerate(members):
            if late is None:
                torch.testing.assert_close(member.theta, phi + d[i])
            else:
                torch.testing.assert_close(member.theta, step((d[i] + sum(late) - late[i]) / 3))
            member.theta.add_(gains[i])  # inner steps while packets are on their way
        for i, member in enumerate(members):
            member.apply(r, 1.0, [Packet(1.0, 0, message) for j, message in enumerate(messages) if j != i])
        mean = torch.stack(d).mean(0)
        phi = step(mean)
        m = ALPHA * m + BETA * mean
        for i, member in enumerate(members):
            torch.testing.assert_close(member.phi, phi)
            torch.testing.assert_close(member.theta, phi + gains[i])
            assert torch.equal(member.phi, members[0].phi)
        late = d


def test_eager_loses_nothing_where_nobody_comes_or_a_boundary_is_marked_again() -> None:
    one, other = members = [Eager(normal(0), codec("fp32"), 0.0, 1.0) for _ in range(2)]
    learn(1, [*members])
    meet(1, [*members])
    d, _ = learn(2, [*members])
    phi = one.phi.clone()
    other.message(2)
    one.message(2)
    assert not torch.allclose(one.theta, phi + d, atol=1e-4), "it runs ahead"
    one.message(2)
    refused = Packet(1.0, 0, [])
    assert one.apply(2, 1.0, [refused], lone=False).members == 0 and one.round == 2
    one.apply(2, 1.0, [refused])
    assert torch.equal(one.phi, phi)
    torch.testing.assert_close(one.theta, phi + d)


def test_delayed_momentum_comes_every_few_rounds() -> None:
    """Algorithm 3 of the paper, c = 0, for packets of N times the mean, so that its gradient / N is the mean."""
    every = 3
    members: list[DeltaMean] = [DelayedNesterov(normal(0), codec("fp32"), ALPHA, BETA, every) for _ in range(2)]
    phi = members[0].phi.clone()
    m = torch.zeros(SIZE)
    buffer = torch.zeros(SIZE)
    for r in range(1, 8):
        d = learn(r, members)
        gradient = every * (d[0] + d[1]) / 2
        meet(r, members)
        buffer = buffer + gradient
        if r % every == 0:
            m = ALPHA * m + buffer / every
            buffer = torch.zeros(SIZE)
            phi = phi + BETA * (ALPHA * m + gradient / every)
        else:
            phi = phi + BETA * gradient / every
        torch.testing.assert_close(members[0].phi, phi)
    assert torch.equal(members[0].phi, members[1].phi)


def test_delayed_goes_on_from_a_snapshot_in_the_middle_of_its_rounds() -> None:
    """Slow weights and momentum, which snapshots have, are all of its state."""
    members: list[DeltaMean] = [DelayedNesterov(normal(0), codec("fp32"), ALPHA, BETA) for _ in range(2)]
    for r in range(1, 7):
        learn(r, members)
        meet(r, members)
    restored: list[DeltaMean] = [DelayedNesterov(normal(3), codec("fp32"), ALPHA, BETA) for _ in range(2)]
    for old, new in zip(members, restored, strict=True):
        new.theta.copy_(old.theta)
        new.reset(old.phi, old.momentum)
    for r in range(7, 14):
        for group in (members, restored):
            learn(r, group)
            meet(r, group)
        assert torch.equal(members[0].phi, restored[0].phi)


@pytest.mark.parametrize("coding", ["topk64", "topk512", "fp32", "ternary"])
def test_sparseloco_divides_by_those_who_sent_a_coordinate(coding: str) -> None:
    """Where the codec chooses coordinates, else by all; members stay equal to the bit."""
    members: list[DeltaMean] = [SparseLoCo(normal(0), codec(coding), 0.8) for _ in range(5)]
    for r in range(1, 4):
        learn(r, members, (1.0, 2.0, 1.0, 0.5, 1.0))
        phi = members[0].phi.clone()
        messages = [member.message(r) for member in members]
        sent = torch.empty(len(members), SIZE)
        for packet, row in zip(messages, sent, strict=True):
            members[0].codec.read(packet[:1], 0, row)
        for i, member in enumerate(members):
            member.apply(r, 1.0, [Packet(1.0, 0, message) for j, message in enumerate(messages) if j != i])
        count = sent.ne(0).sum(0).clamp(min=1) if coding.startswith("topk") else len(members)
        torch.testing.assert_close(members[0].phi, phi + 0.8 * sent.sum(0) / count)
        assert all(torch.equal(members[0].phi, member.phi) for member in members)
    assert not coding.startswith("topk") or int(sent.ne(0).sum(0).max()) > 1, "some coordinates were sent by several"


def test_edit_leaves_out_who_is_much_louder_than_usual() -> None:
    members: list[DeltaMean] = [EDiT(normal(0), codec("fp32"), 0.0, 1.0) for _ in range(3)]
    for r in range(1, HISTORY_LEAST + 3):
        learn(r, members, (1.0, 1.0, 1.0))
        meet(r, members)
    phi = members[0].phi.clone()
    d = learn(99, members, (1.0, 1.0, 1e4))
    meet(99, members)
    assert float((members[0].phi - phi).norm()) < 2 * float(d[0].norm())
    assert all(torch.equal(members[0].phi, other.phi) for other in members[1:])


def test_edit_of_equal_norms_is_the_mean_and_the_loud_count_less() -> None:
    members: list[DeltaMean] = [EDiT(normal(0), codec("fp32"), 0.0, 1.0) for _ in range(2)]
    phi = members[0].phi.clone()
    d = learn(1, members, (1.0, 2.0))
    meet(1, members)
    norms = [float(x.norm()) for x in d]
    raw = [math.exp(-2 * norm / sum(norms)) for norm in norms]
    wanted = phi + (raw[0] * d[0] + raw[1] * d[1]) / sum(raw)
    torch.testing.assert_close(members[0].phi, wanted)


def test_desloc_averages_each_buffer_on_its_own_period() -> None:
    members = []
    moments = []
    for i in range(3):
        member = outer(GossipSpec(method="desloc", codec="fp32", acceptance="all"), normal(i), f"r{i}")
        assert isinstance(member, DesLoc)
        pair = normal(10 + i), normal(20 + i)[:SECONDS].square()
        member.attend(*pair)
        members.append(member)
        moments.append(pair)
    for round_index in range(1, 2 * EVERY_SECOND + 1):
        for i, member in enumerate(members):
            member.theta.add_(0.1 * i)
            moments[i][0].add_(0.1 * i)
            moments[i][1].mul_(1.0 + 0.1 * i)
        buffers = [[member.theta, *moments[i]] for i, member in enumerate(members)]
        before = [[flat.clone() for flat in mine] for mine in buffers]
        messages = [member.message(round_index) for member in members]
        due = [True, round_index % EVERY_FIRST == 0, round_index % EVERY_SECOND == 0]
        assert all(len(message) == sum(due) for message in messages)
        for i, member in enumerate(members):
            member.theta.add_(1.0)  # inner steps go on meanwhile
            moments[i][0].add_(1.0)
            member.apply(round_index, 1.0, [Packet(1.0, 1, m) for j, m in enumerate(messages) if j != i])
        for which, (gain, meets) in enumerate(zip((1.0, 1.0, 0.0), due, strict=True)):
            mean = torch.stack([mine[which] for mine in before]).mean(0)
            for i, mine in enumerate(buffers):
                wanted = (mean if meets else before[i][which]) + gain
                torch.testing.assert_close(mine[which], wanted, rtol=1e-5, atol=1e-5)


def test_desloc_takes_no_moment_that_makes_a_long_step() -> None:
    """An element of 1,000 made the next step of AdamW 70,700 rates long."""
    one, liar = (outer(GossipSpec(method="desloc", codec="fp32"), normal(i), f"r{i}") for i in range(2))
    assert isinstance(one, DesLoc) and isinstance(liar, DesLoc)
    for member in (one, liar):
        member.attend(normal(10, 1e-3), normal(20, 1e-3)[:SECONDS].square())
    first, second = (moment.clone() for _, moment in one._moments)
    liar._moments[0][1][5] = 1000.0
    liar._moments[0][1][6] = -1000.0
    liar._moments[1][1][5] = 0.0
    liar._moments[1][1][6] = 1e6
    one.message(EVERY_SECOND)
    one.apply(EVERY_SECOND, 1.0, [Packet(1.0, 1, liar.message(EVERY_SECOND))])
    mean_first, mean_second = (moment for _, moment in one._moments)
    most = (1.0 + MOMENT_MOST) / 2.0 * (1.0 + 1e-5)
    assert bool((mean_first.abs() <= most * first.abs()).all())
    assert bool((mean_second <= most * second).all()) and bool((mean_second >= second / 2.1).all())
    torch.testing.assert_close(mean_first[7:], first[7:])


def test_desloc_refuses_a_second_moment_below_zero_and_one_too_few() -> None:
    one, other = (outer(GossipSpec(method="desloc", codec="fp32"), normal(i), f"r{i}") for i in range(2))
    assert isinstance(one, DesLoc) and isinstance(other, DesLoc)
    for member in (one, other):
        member.attend(torch.zeros_like(member.theta), torch.zeros(SECONDS))
    for value, cut, reason in ((-1.0, None, "negative"), (0.0, 2, "tensors")):
        other._moments[1][1].fill_(value)
        one.message(EVERY_SECOND)
        message = other.message(EVERY_SECOND)[:cut]
        before = [flat.clone() for flat in (one.theta, one.phi, one._moments[1][1])]
        (verdict,) = one.apply(EVERY_SECOND, 1.0, [Packet(1.0, 1, message)], lone=False).verdicts
        assert (verdict.keep, verdict.step) == (0.0, "misshapen") and reason in verdict.reason
        after = one.theta, one.phi, one._moments[1][1]
        assert all(torch.equal(then, now) for then, now in zip(before, after, strict=True))


@pytest.mark.parametrize("method", OWN_ALPHA)
def test_without_alpha_no_momentum_is_kept_and_nothing_else_changes(method: str) -> None:
    """Alpha 0 does what an alpha does that is too small to be seen."""
    swarms = []
    for alpha in (0.0, 1e-30):
        spec = GossipSpec(method=method, codec="fp32", group=0, alpha=alpha, acceptance="all")
        swarms.append([outer(spec, normal(7), f"r{i}") for i in range(3)])
    for round_index in range(1, 6):
        for members in swarms:
            for i, member in enumerate(members):
                member.theta.add_(normal(10 * round_index + i, 0.1))
            messages = [member.message(round_index) for member in members]
            for i, member in enumerate(members):
                member.theta.add_(normal(100 * round_index + i, 0.1))
                member.apply(round_index, 1.0, [Packet(1.0, 1, m) for j, m in enumerate(messages) if j != i])
    for without, tiny in zip(*swarms, strict=True):
        assert without.momentum.numel() == 0 and bool(tiny.momentum.any())
        assert torch.equal(without.phi, tiny.phi) and torch.equal(without.theta, tiny.theta)

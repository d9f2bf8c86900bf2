"""Slow weights that drifted apart come together again, and stay as they are where they did not; packets of D judged."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import OuterReport, Packet, WireTensor
from swarmnode.model.tensor import encode
from swarmnode.run.manifest import GossipSpec
from swarmnode.train.gossip.compression import codec
from swarmnode.train.gossip.outer import outer
from swarmnode.trust.robust import PacketGuard
from swarmnode_methods.fragment import (
    FIRST_ROUNDS,
    FRAGMENTS,
    FRAGMENTS_FIRST,
    check_fragment,
    count,
    fragment,
    part,
    pull,
)
from swarmnode_methods.mean import DeltaMean

pytestmark = pytest.mark.node  # some seconds

SIZE = 4096 + 100
METHODS = (
    ("sparseloco", "topk64"),
    ("sparseloco", "fp32"),
    ("partial_average", "topk512"),
    ("diloco", "e3m0"),
    ("streaming", "ternary"),
    ("delayed", "e3m0"),
    ("edit", "e3m0"),
    ("diloco", "powersgd"),
)


def normal(seed: int, scale: float = 1.0, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def members(method: str, coding: str, count: int, *, healing: bool = True, acceptance: str = "all") -> list[DeltaMean]:
    spec = GossipSpec(method=method, codec=coding, acceptance=acceptance)
    found = [outer(spec, normal(0), f"r{i}", healing=healing) for i in range(count)]
    return [one for one in found if isinstance(one, DeltaMean)]


def learn(round_index: int, group: list[DeltaMean], scale: float = 1e-2) -> None:
    """Inner steps: half of what is learned is the same everywhere."""
    for i, one in enumerate(group):
        one.theta.add_(normal(round_index, scale)).add_(normal(1000 + 100 * round_index + i, scale))


def meet(round_index: int, group: list[DeltaMean], lost: dict[int, set[int]] | None = None) -> list[OuterReport]:
    """`lost`: of each member, whose packets it does not get."""
    messages = [one.message(round_index) for one in group]
    return [
        one.apply(
            round_index,
            1.0,
            [Packet(1.0, 0, m) for j, m in enumerate(messages) if j != i and j not in (lost or {}).get(i, ())],
        )
        for i, one in enumerate(group)
    ]


@pytest.mark.parametrize(("method", "coding"), METHODS)
def test_equal_replicas_do_not_change_by_a_bit(method: str, coding: str) -> None:
    healed = members(method, coding, 3)
    plain = members(method, coding, 3, healing=False)
    for r in range(1, 6):
        for group in (healed, plain):
            learn(r, group)
            meet(r, group)
    for a, b in zip(healed, plain, strict=True):
        assert torch.equal(a.phi, b.phi) and torch.equal(a.theta, b.theta) and torch.equal(a.phi, healed[0].phi)


@pytest.mark.parametrize(("method", "coding"), [METHODS[0], METHODS[2], METHODS[3]])
def test_a_replica_that_missed_rounds_catches_up(method: str, coding: str) -> None:
    """Of five, one misses all packets of three rounds, one is put back to the state of three rounds before."""
    group = members(method, coding, 5)
    before = group[4].phi.clone(), group[4].momentum.clone()
    for r in range(1, 4):
        learn(r, group)
        meet(r, group, {3: {0, 1, 2, 4}})
    group[4].theta.copy_(before[0])
    group[4].reset(*before)
    apart = [float((one.phi - group[0].phi).norm()) for one in group]
    assert min(apart[3:]) > 0.0 and not any(apart[:3])
    for r in range(4, 4 + FRAGMENTS_FIRST * (5 if group[0].alpha else 1)):  # momenta differ at first, too, for long
        meet(r, group)  # nothing is learned: what moves is what comes back
    for i, one in enumerate(group):
        off = (one.phi - group[0].phi).abs()
        assert float((off / group[0].phi.abs().clamp(min=1e-2)).max()) <= 2**-5, "up to what bfloat16 rounded then"
        assert float(off.norm()) <= 0.2 * apart[i] or apart[i] == 0.0


@given(st.integers(FRAGMENTS, 700), st.integers(0, 6), st.integers(0, 2**20))
def test_every_coordinate_travels_once_in_so_many_rounds_at_any_stride(size: int, power: int, first: int) -> None:
    seen = torch.zeros(size)
    first += FIRST_ROUNDS + 1
    rounds = [(first + i) << power for i in range(FRAGMENTS)]
    for r in rounds:
        part(seen, r).add_(1.0)
        assert len(part(seen, r)) == count(size, r) == fragment(seen, r).shape[0]
    assert torch.equal(seen, torch.ones(size))


def test_at_first_fragments_are_larger() -> None:
    sizes = [count(127 * 31, r) for r in (1, FIRST_ROUNDS, FIRST_ROUNDS + 1, 10**6)]
    assert sizes == [127, 127, 31, 31] and count(5, 12) == 1


def test_the_middle_is_where_most_are() -> None:
    values = torch.tensor([[1.0, -2.0], [1.0, -2.0], [5.0, 0.5], [900.0, -900.0]])
    given = [fragment(row.repeat_interleave(FRAGMENTS_FIRST), 0) for row in values]
    mine = [row.repeat(1) for row in values]
    assert torch.equal(pull(mine[0], given[1:3], counts=True), torch.zeros(2))
    assert torch.equal(mine[2] + pull(mine[2], given[:2], counts=True), values[0])
    assert torch.equal(mine[3] + pull(mine[3], given[:1], counts=True), torch.tensor([450.5, -451.0]))
    assert torch.equal(mine[3] + pull(mine[3], given[:1], counts=False), values[0])  # a newcomer's own do not count
    near = values[0] * (1 + 2**-11)
    assert not pull(near, given[:2], counts=True).any(), "nearer than bfloat16 tells"


@pytest.mark.parametrize(
    "wrong",
    [
        WireTensor("f32", (3,), bytes(12)),
        WireTensor("bf16", (3,), bytes(6), "int8"),
        WireTensor("bf16", (1 << 40,), bytes(6)),
        WireTensor("bf16", (count(SIZE, 1),), b"\xff" * 2 * count(SIZE, 1)),
    ],
)
def test_a_bad_fragment_is_refused_alone(wrong: WireTensor) -> None:
    with pytest.raises(RemoteFault, match="fragment of slow weights"):
        check_fragment(wrong, SIZE, 1)
    group = members("sparseloco", "topk64", 3, acceptance="clipped")
    learn(1, group)
    messages = [one.message(1) for one in group]
    packets = [Packet(1.0, 0, [messages[1][0], wrong]), Packet(1.0, 0, messages[2]), Packet(1.0, 0, messages[1][:1])]
    verdicts = group[0].apply(1, 1.0, packets).verdicts
    assert [(v.step, v.keep) for v in verdicts] == [("misshapen", 0.0), ("accepted", 1.0), ("misshapen", 0.0)]


@pytest.mark.parametrize("coding", ["topk64", "e3m0", "fp32"])
def test_a_round_without_packets_loses_nothing(coding: str) -> None:
    """Slow weights wait, and what was learned is in the next packet as if it had been learned then."""
    one, calm = members("sparseloco", coding, 2)
    learn(1, [one])
    phi = one.phi.clone()
    theta = one.theta.clone()
    for r in range(1, 4):
        one.message(r)
        assert one.apply(r, 0.0, []).members == 0
        assert torch.equal(one.phi, phi) and torch.equal(one.theta, theta)
    calm.theta.copy_(theta)
    calm.sender = one.sender
    late, straight = (torch.empty(SIZE) for _ in range(2))
    one.codec.decode(one.message(4)[:1], late)
    calm.codec.decode(calm.message(4)[:1], straight)
    torch.testing.assert_close(late, straight, rtol=1e-3, atol=1e-6)
    one.apply(4, 1.0, [])
    assert not torch.equal(one.phi, phi), "alone in its stage it goes on by itself"


def test_a_final_delta_travels_on_with_the_successors_next_packet() -> None:
    group = members("sparseloco", "fp32", 2)
    leaver = members("sparseloco", "fp32", 1)[0]
    learn(1, [*group, leaver])
    learned = leaver.theta - leaver.phi
    messages = [one.message(1) for one in group]
    left = Packet(0.5, 16, leaver.message(1), final_delta=True)
    group[0].apply(1, 1.0, [Packet(1.0, 0, messages[1]), left])
    group[1].apply(1, 1.0, [Packet(1.0, 0, messages[0])])
    assert torch.equal(group[0].phi, group[1].phi), "which nobody else has, and moves no slow weights"
    torch.testing.assert_close(group[0].theta - group[0].phi, 0.5 * learned, rtol=0, atol=1e-6)
    phi = group[0].phi.clone()
    meet(2, group)
    torch.testing.assert_close(group[1].phi, phi + 0.25 * learned, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("method", "coding"), METHODS)
def test_lies_are_refused_or_made_small(method: str, coding: str) -> None:
    for factor, steps in ((100.0, {"clipped"}), (1.0, {"accepted", "clipped"})):
        group = members(method, coding, 3, acceptance="clipped")
        liar = members(method, coding, 1)[0]
        rounds = 40
        way = normal(-1, 1e-2)
        for r in range(1, rounds + 1):
            liar.reset(group[0].phi, group[0].momentum)
            liar.theta.copy_(liar.phi)
            learn(r, [*group, liar])
            for one in (*group, liar):
                one.theta.add_(way)
            delta = liar.theta - liar.phi
            liar.theta.copy_(liar.phi + factor * delta)
            messages = [one.message(r) for one in group]
            lie = liar.message(r)
            for i, one in enumerate(group):
                others = [Packet(1.0, 0, m, sender=str(j)) for j, m in enumerate(messages) if j != i]
                report = one.apply(r, 1.0, [*others, Packet(1.0, 0, lie, sender="liar")])
                if r > rounds / 2:
                    assert report.verdicts[-1].step in steps, (factor, r, report.verdicts[-1])
                assert all(v.keep > 0.0 for v in report.verdicts[:-1]), report.verdicts
                # Momentum of 0.9 and residuals add up what all learned in the same direction; believed, a lie of factor
                # 100 would make it 25 and more.
                assert report.step_norm < 12 * float(normal(0, 2e-2).norm()), (factor, r)
        guard = group[0].guard
        assert isinstance(guard, PacketGuard) and sum(guard.counts.values()) == 3 * rounds


@pytest.mark.parametrize("own", [0.0, 1.0])
def test_two_values_have_no_majority(own: float) -> None:
    """A replica that counts nothing of its own and hears an honest member and a liar moves no further than a packet may
    take it."""
    base = torch.randn(4096, generator=torch.Generator().manual_seed(0))

    def member(seed: int, name: str) -> DeltaMean:
        made = DeltaMean(base.clone(), codec("e3m0"))
        made.healing = True
        made.sender = name
        made.guard = PacketGuard()
        made.theta.add_(0.01 * torch.randn(4096, generator=torch.Generator().manual_seed(seed)))
        return made

    me = member(1, "me")
    honest = member(2, "honest")
    liar = member(3, "liar")
    me.message(5)
    said = honest.message(5)
    lied = liar.message(5)
    lied[1] = encode(torch.full((count(4096, 5),), 9e5).to(torch.bfloat16))
    before = me.phi.clone()
    me.apply(5, own, [Packet(1.0, 64, said, sender="honest"), Packet(1.0, 64, lied, sender="liar")])
    assert float((me.phi - before).norm()) < 2.0 * float(before.norm())

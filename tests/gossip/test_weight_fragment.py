"""Fragments of the weights: a coordinate meets once in F rounds, as in a whole packet; nothing else moves."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import ManifestError
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Packet
from swarmnode.run.manifest import GossipSpec, Manifest, parse, template
from swarmnode.train.gossip.compression import codec
from swarmnode.train.gossip.outer import outer
from swarmnode.train.gossip.pairing import groups
from swarmnode_methods.noloco import UNIT, Average, NoLoCo, fragments
from tests.support.method_tables import IN_FRAGMENTS, METHODS
from tests.support.outer_step import Fp64, mean, momentum, random

RUN = RunId("ab" * 32)
SIZE = 7 * UNIT + 5
OFS = st.sampled_from([1, 3, 5, 7])


def gathered(flat: torch.Tensor, number: int, of: int) -> torch.Tensor:
    """The fragment's coordinates, element by element as blocks.py defines them."""
    numbers = torch.arange(flat.numel())
    block = numbers // UNIT
    return flat[(block % of + block // of) % of == number]


@given(st.integers(1, 40 * UNIT), st.sampled_from([1, 3, 5, 7, 15]), st.integers(1, 4))
def test_fragments_part_the_coordinates(size: int, of: int, step: int) -> None:
    flat = torch.arange(float(size))
    seen = torch.zeros(size)
    room = torch.empty(size)
    for one in fragments(size, of):
        expected = gathered(flat, one.number, of)
        assert one.count == expected.numel()
        for start in range(0, one.count, step * UNIT):
            end = min(start + step * UNIT, one.count)
            found = one.get(flat, start, end, room)
            assert torch.equal(found, expected[start:end])
            mine = one.get(seen, start, end, room)
            mine.add_(1.0)
            one.put(seen, start, end, mine)
    assert torch.equal(seen, torch.ones(size))


@pytest.mark.parametrize("of", [3, 5, 7])
def test_every_part_of_a_model_is_in_each_fragment(of: int) -> None:
    """Rows of queries, keys and values side by side, each of F blocks: a fragment has of all columns alike."""
    columns = torch.arange(of * UNIT).repeat(of * 4)
    for one in fragments(columns.numel(), of):
        found = one.get(columns, 0, one.count, torch.empty_like(columns))
        assert torch.equal(found.bincount(), torch.full((of * UNIT,), 4))


@pytest.mark.node
@given(
    count=st.integers(1, 6),
    of=OFS,
    alpha=st.floats(0, 0.9),
    beta=st.floats(0.1, 1),
    gamma=st.one_of(st.none(), st.floats(0, 1)),
    size=st.sampled_from([2, 3, None]),
    seed=st.integers(0, 2**20),
)
def test_the_recursion_holds_for_a_rounds_fragment_and_nothing_else_moves(
    count: int, of: int, alpha: float, beta: float, gamma: float | None, size: int | None, seed: int
) -> None:
    """mean(m) <- alpha mean(m) + beta mean(D); mean(phi) <- mean(phi) + mean(m), whoever meets whom, odd counts too: of
    whole packets (`of` 1) and of fragments. It needs groups in which all have equal weight, lone ones included; gamma
    None is gamma = beta (theta alone)."""
    replicas = [
        NoLoCo(random(SIZE, seed + i), Fp64(), alpha, beta, beta if gamma is None else gamma, of) for i in range(count)
    ]
    names = [PeerId(f"peer{i:03}") for i in range(count)]
    for round_index in range(1, of + 2):
        for i, replica in enumerate(replicas):
            replica.theta.add_(random(SIZE, seed + 100 * round_index + i))
        number = round_index % of
        before = [[flat.clone() for flat in (r.theta, r.phi, momentum(r))] for r in replicas]
        phi = mean([r.phi for r in replicas])
        m = mean([momentum(r) for r in replicas])
        delta = mean([r.theta - r.phi for r in replicas])
        messages = [replica.message(round_index) for replica in replicas]
        gains = [random(SIZE, seed + 999 + i) for i in range(count)]  # between the boundary and the step
        for replica, gain in zip(replicas, gains, strict=True):
            replica.theta.add_(gain)
        for group in groups(RUN, 0, round_index, names, size):
            members = [names.index(name) for name in group]
            for me in members:
                replicas[me].apply(round_index, 1.0, [Packet(1.0, 0, messages[j]) for j in members if j != me])
        m = alpha * m + beta * delta
        for found, expected in (
            (mean([momentum(r) for r in replicas]) if alpha else m, m),
            (mean([r.phi for r in replicas]), phi + m),
            (mean([r.theta - gain for r, gain in zip(replicas, gains, strict=True)]), phi + m),
        ):
            torch.testing.assert_close(gathered(found, number, of), gathered(expected, number, of), rtol=0, atol=1e-11)
        for replica, gain, (theta, slow, held) in zip(replicas, gains, before, strict=True):
            for other in {*range(of)} - {number}:
                assert torch.equal(gathered(replica.theta, other, of), gathered(theta + gain, other, of))
                assert torch.equal(gathered(replica.phi, other, of), gathered(slow, other, of))
                assert torch.equal(gathered(momentum(replica), other, of), gathered(held, other, of))


@pytest.mark.parametrize(
    ("name", "of"),
    [("fp32", 3), ("bf16", 5), ("int8", 3), ("modular6", 5), ("modular4", 3), ("modular4", 5), ("modular3", 5)],
)
def test_a_fragment_is_what_a_model_of_its_coordinates_alone_would_be(of: int, name: str) -> None:
    """Bytes, steps, escapes and guard, to the bit, over many rounds of three replicas, of which one jumps away once."""
    size = 40 * UNIT + 9
    whole = [Average(torch.zeros(size), codec(name), of) for _ in range(3)]
    apart = [[Average(torch.zeros_like(gathered(w.phi, k, of)), codec(name)) for k in range(of)] for w in whole]
    for i, (one, parts) in enumerate(zip(whole, apart, strict=True)):
        for each in (one, *parts):
            each.sender = f"r{i}"
    escaped = 0
    for round_index in range(1, 8 * of):
        k = round_index % of
        for i, (one, parts) in enumerate(zip(whole, apart, strict=True)):
            gain = 1e-2 * torch.randn(size, generator=torch.Generator().manual_seed(100 * round_index + i))
            if i == 2 and round_index == 2 * of:
                gain.mul_(30.0)
            one.theta.add_(gain)
            for number, part in enumerate(parts):
                part.theta.add_(gathered(gain, number, of))
        messages = [one.message(round_index) for one in whole]
        others = [parts[k].message(round_index) for parts in apart]
        for one, message, other in zip(whole, messages, others, strict=True):
            assert [bytes(tensor.data) for tensor in message] == [bytes(tensor.data) for tensor in other]
            least = one.nbytes_of(round_index)
            assert least <= sum(tensor.nbytes for tensor in message) <= one.message_nbytes
            escaped += sum(tensor.nbytes for tensor in message) > least
        a, b = ((0, 1), (1, 2), (0, 2))[round_index % 3]
        for me, partner in ((a, b), (b, a)):
            packets = [Packet(1.0, 0, messages[partner])]
            one = whole[me]
            alone = apart[me][k]
            assert one.measure(packets[0]) == alone.measure(packets[0])
            reports = one.apply(round_index, 1.0, packets), alone.apply(round_index, 1.0, packets)
            assert reports[0] == reports[1] and reports[0].members == 2
            for found, expected in zip(_flats(one), _flats(alone), strict=True):
                assert torch.equal(gathered(found, k, of), expected)
    assert escaped or not name.startswith("modular")


@pytest.mark.parametrize("gamma", [0.7, 0.4])
def test_a_final_delta_has_what_was_learnt_since_every_fragments_round(gamma: float) -> None:
    """The successor takes all of it at once: as whole packets do where nobody else came, and beside a partner of one
    fragment."""
    of = 3
    alpha = 0.5
    beta = 0.7

    def make(i: int, fragments: int = of) -> NoLoCo:
        return NoLoCo(random(SIZE, i), Fp64(), alpha, beta, gamma, fragments)

    successor = make(0)
    leaver = make(1)
    partner = make(2)
    plain_heir = make(0, 1)
    plain_leaver = make(1, 1)
    for one in (successor, leaver, partner, plain_heir, plain_leaver):
        one.theta.mul_(1.5)
    successor.message(4)
    left = Packet(0.25, 9, leaver.final_delta(4), final_delta=True)
    assert successor.apply(4, 1.0, [left], lone=False).members == 2
    plain_heir.message(4)
    plain_heir.apply(4, 1.0, [Packet(0.25, 9, plain_leaver.message(4), final_delta=True)])
    for found, expected in zip((successor.theta, successor.phi, successor.momentum), _flats(plain_heir), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert plain_leaver.final_delta(5)[0].nbytes == plain_leaver.message(5)[0].nbytes

    again = make(0)
    both = make(0)
    for one in (again, both):
        one.theta.mul_(1.5)
        one.message(4)
    given = Packet(1.0, 5, partner.message(4))
    again.apply(4, 1.0, [left])
    both.apply(4, 1.0, [given, left])
    for found, without in zip(_flats(both), _flats(again), strict=True):
        for number in (0, 2):
            assert torch.equal(gathered(found, number, of), gathered(without, number, of))
        assert not torch.equal(gathered(found, 1, of), gathered(without, 1, of))


def _flats(one: NoLoCo) -> tuple[torch.Tensor, ...]:
    return one.theta, one.phi, one.momentum


def test_a_misshapen_final_delta_is_refused_alone() -> None:
    successor, leaver = (Average(random(SIZE, i), Fp64(), 3) for i in range(2))
    tensors = leaver.final_delta(4)
    bad = [tensors[:2], [*tensors, tensors[0]], [tensors[1], tensors[0], tensors[2]], tensors[:1], []]
    successor.message(4)
    before = [flat.clone() for flat in _flats(successor)]
    report = successor.apply(4, 1.0, [Packet(1.0, 1, some, final_delta=True) for some in bad], lone=False)
    assert [verdict.step for verdict in report.verdicts] == ["misshapen"] * len(bad)
    assert all(torch.equal(a, b) for a, b in zip(before, _flats(successor), strict=True))
    assert successor.apply(4, 1.0, [Packet(1.0, 1, tensors, final_delta=True)]).verdicts[0].step == "accepted"
    # As a partner's packet all fragments are too many.
    successor.message(5)
    assert successor.apply(5, 1.0, [Packet(1.0, 1, leaver.final_delta(5))], lone=False).verdicts[0].step == "misshapen"


def test_a_small_stage_has_fewer_fragments() -> None:
    """None is empty, and all replicas of the stage know as much."""
    for blocks in range(1, 9):
        one = Average(torch.zeros((blocks - 1) * UNIT + 1), codec("fp32"), 7)
        assert len(one.fragments) % 2 == 1 and min(fragment.count for fragment in one.fragments) > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_manifest_takes_fragments_where_weights_travel(method: str) -> None:
    spec = GossipSpec(method=method, codec="fp32", group=0, fragments=3)
    if method == "partial_average":
        spec = replace(spec, codec="topk")
    if method == "gradient":
        spec = replace(spec, codec="int8", round_samples=Manifest().inner.inner_batch)
    text = template(Manifest(gossip=spec))
    if method in IN_FRAGMENTS:
        assert parse(text, "here").gossip.fragments == 3
        found = outer(spec, torch.zeros(4 * UNIT))
        assert method == "gradient" or (isinstance(found, NoLoCo) and len(found.fragments) == 3)
        return
    with pytest.raises(ManifestError, match=r"gossip\.fragments = 3: allowed is 1"):
        outer(spec, torch.zeros(4 * UNIT))
    with pytest.raises(ManifestError, match=r"gossip\.fragments = 3: allowed is 1 with gossip\.method"):
        parse(text, "here")
    with pytest.raises(ManifestError, match="odd whole number"):
        parse(text.replace("fragments = 3", "fragments = 4"), "here")

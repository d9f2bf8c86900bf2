"""A replica that trains some experts alone: layout, steps, memory, and what averaging makes of it."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmnode.errors import ManifestError, RemoteFault
from swarmnode.gossip.outer import noloco
from swarmnode.ids import digest64
from swarmnode.machine.replica import TorchReplica
from swarmnode.manifest import GossipSpec, Manifest, TrainingSpec, parse, template
from swarmnode.model.expert_share import EXPERT, expert_layout, gradient_count
from swarmnode.model.stage import StageReplica
from swarmnode.model.weight_stash import WorkingCopy
from swarmnode.ports import OuterReport, Packet, WireTensor
from swarmnode_methods import expert_average
from swarmnode_methods.expert_average import ExpertAverage
from tests.support.tiny_model import TINY, manifest, token_batch, token_wire

SPARSE = replace(TINY, layers=3, experts=6, experts_active=2, expert_ffn=16, shared_expert_ffn=8, dense_layers=(1,))


def run_of(trained: int = 2, stages: int = 1, **gossip: Any) -> Manifest:
    run = manifest(SPARSE, stages)
    given = {"codec": "fp32", "acceptance": "all", **gossip}
    return replace(run, gossip=GossipSpec(**given), training=TrainingSpec(experts_trained=trained))


def replicas(run: Manifest, *blocks: int, **options: Any) -> list[TorchReplica]:
    """One replica of stage 0 for each of `blocks`."""
    found, number = list[TorchReplica](), 0
    while len(found) < len(blocks):
        replica, number = TorchReplica(run, 0, sender=f"r{number}", **options), number + 1
        if replica.stage.block == blocks[len(found)]:
            found.append(replica)
    return found


def train(replica: TorchReplica, seed: int, steps: int = 1) -> float:
    loss = 0.0
    for number in range(steps):
        tokens = token_wire(token_batch(SPARSE, seed=100 * seed + number))
        loss = replica.loss(tokens, tokens, 4, train=True).loss_sum
        replica.step(1000)
    return loss


def meet(members: list[TorchReplica], round_index: int, weights: tuple[float, ...] = ()) -> list[OuterReport]:
    weights = weights or tuple(1.0 for _ in members)
    packets = [
        Packet(weight, 8, one.message(round_index), sender=one.outer.sender)
        for one, weight in zip(members, weights, strict=True)
    ]
    return [
        one.apply(round_index, weight, [p for p in packets if p.sender != one.outer.sender])
        for one, weight in zip(members, weights, strict=True)
    ]


def by_name(replica: TorchReplica, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return replica.stage.named(flat)


def block_of(name: str) -> int | None:
    found = EXPERT.search(name)
    return None if found is None else int(found[1]) // 2


def test_every_element_has_one_place() -> None:
    run = run_of()
    stage = StageReplica(run, 0)
    layout = expert_layout(run, stage.shapes)
    assert layout is not None and layout.blocks == 3
    taken = torch.zeros(stage.parameters, dtype=torch.int32)
    for segment in (*layout.shared, *(one for block in layout.experts for one in block)):
        taken[segment.first : segment.last] += 1
    assert (taken == 1).all()
    for block in range(layout.blocks):
        places = torch.zeros(layout.count, dtype=torch.int32)
        for segment in layout.trained(block):
            places[segment.there] += 1
        assert (places == 1).all()
        numbers = torch.arange(stage.parameters, dtype=torch.float32)
        mine = torch.empty(layout.count)
        for segment in layout.trained(block):
            mine[segment.there] = numbers[segment.first : segment.last]
        for name, view in layout.views(mine, block, stage.shapes).items():
            assert torch.equal(view, stage.named(numbers)[name]) and block_of(name) in (None, block)
    assert gradient_count(run, stage.part) == layout.count == len(stage.grad)
    assert expert_layout(manifest(SPARSE), stage.shapes) is None
    dense = replace(run, model=replace(SPARSE, dense_layers=(0, 1, 2)))
    assert expert_layout(dense, StageReplica(replace(run, model=TINY), 0).shapes) is None


@pytest.mark.parametrize("state", ["device", "8bit", "host"])
@pytest.mark.parametrize("way", ["float32", "autocast", "working copy"])
def test_only_what_it_trains_moves_and_as_in_the_whole(state: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, autocast = run_of(), way != "float32"
    monkeypatch.setattr(WorkingCopy, "possible", staticmethod(lambda device, autocast: way == "working copy"))
    (replica,) = replicas(run, 1, optimizer_state=state, autocast=autocast)
    whole = TorchReplica(run_of(trained=0), 0, optimizer_state=state, autocast=autocast)
    before = {name: view.clone() for name, view in by_name(replica, replica.stage.theta).items()}
    tokens = token_wire(token_batch(SPARSE))
    for one in (replica, whole):
        one.loss(tokens, tokens, 4, train=True)
    for name, gradient in replica.stage.gradients().items():
        torch.testing.assert_close(gradient, whole.stage.gradients()[name])
    for one in (replica, whole):
        one.stage.manifest = replace(run, inner=replace(run.inner, clip_norm=1e9))  # clipped by the norm of its own
        one.step(1000)
    moved = by_name(whole, whole.stage.theta)
    for name, view in by_name(replica, replica.stage.theta).items():
        if block_of(name) in (None, 1):
            torch.testing.assert_close(view, moved[name])
        else:
            assert torch.equal(view, before[name])
    assert replica.stage.module.get_parameter("model.layers.0.mlp.experts.0.up_proj.weight").grad is None
    assert isinstance(replica.stage.stash, WorkingCopy) == (way == "working copy")


def test_a_meeting_gives_each_the_experts_of_those_who_train_them() -> None:
    members = replicas(run_of(), 0, 1, 1)
    a = members[0]
    for seed, member in enumerate(members):
        train(member, seed)
    before = [{name: view.clone() for name, view in by_name(m, m.stage.theta).items()} for m in members]
    train(a, 9)  # the gain since is kept
    packets = [Packet(1.0, 8, m.message(1), sender=m.outer.sender) for m in members]
    before[0] = {name: view.clone() for name, view in by_name(a, a.stage.theta).items()}
    for number, member in enumerate(members):
        member.apply(1, 1.0, [packet for other, packet in enumerate(packets) if other != number])
    for member, mine in zip(members, before, strict=True):
        for name, view in by_name(member, member.stage.theta).items():
            givers = {None: before, 0: before[:1], 1: before[1:]}.get(block_of(name), [mine])
            wanted = torch.stack([giver[name] for giver in givers]).mean(0)
            torch.testing.assert_close(view, wanted)
            torch.testing.assert_close(by_name(member, member.outer.phi)[name], wanted)


@pytest.mark.parametrize("coding", ["fp32", "int8"])
def test_spans_of_any_size_give_the_same(coding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A span may hold shared elements, experts, or both."""
    found = []
    for size in (1 << 18, 64, 64 * 17):
        monkeypatch.setattr(noloco, "BLOCK_CPU", size)
        members = replicas(run_of(codec=coding, acceptance="clipped"), 0, 1, 1, 2)
        for round_index in (1, 2):
            for seed, member in enumerate(members):
                train(member, 10 * round_index + seed)
            reports = meet(members, round_index)
        found.append((members[2].stage.theta.detach().clone(), members[2].outer.phi.clone(), reports[2]))
    for theta, phi, report in found[1:]:
        torch.testing.assert_close(theta, found[0][0])
        torch.testing.assert_close(phi, found[0][1])
        assert report.step_norm == pytest.approx(found[0][2].step_norm, rel=1e-4)


def test_a_newcomer_takes_and_does_not_give() -> None:
    a, b = replicas(run_of(), 0, 0)
    train(a, 1)
    train(b, 2)
    slow = a.stage.theta.detach().clone()
    reports = meet([a, b], 1, (1.0, 0.0))
    assert reports[0].members == 1 and torch.equal(a.outer.phi, slow)
    torch.testing.assert_close(b.outer.phi, a.outer.phi)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors[1:], "expected the number of a block"),
        (lambda tensors: [], "without tensors"),
        (lambda tensors: [WireTensor("u16", (1,), memoryview(b"\x03\x00")), *tensors[1:]], "block 3; there are 3"),
        (lambda tensors: [*tensors, tensors[-1]], "2 tensors"),
        (lambda tensors: [WireTensor("u16", (2,), memoryview(b"\0\0\0\0")), *tensors[1:]], "number of a block"),
    ],
)
def test_bad_packets_are_refused(change: Any, said: str) -> None:
    a, b = replicas(run_of(), 0, 1)
    packet = Packet(1.0, 8, change(list(b.message(1))), sender="b")
    a.message(1)
    with pytest.raises(RemoteFault, match=said):
        a.outer.check(packet)
    assert a.apply(1, 1.0, [packet]).verdicts[0].step == "misshapen"


@pytest.mark.parametrize("acceptance", ["clipped", "all"])
def test_a_liar_moves_experts_of_others_little(acceptance: str) -> None:
    """Whoever alone trains some experts can send anything; in a round it moves no further than honest ones do."""
    honest, liar = replicas(run_of(acceptance=acceptance), 0, 1)
    for round_index in (1, 2):
        train(honest, round_index)
        train(liar, 10 + round_index)
        before = honest.stage.theta.detach().clone()
        if round_index == 2:
            for name, view in by_name(liar, liar.stage.theta).items():
                view.data.mul_(100.0 if block_of(name) == 1 else 1.0)
        meet([honest, liar], round_index)
    moved = {None: 0.0, 0: 0.0, 1: 0.0, 2: 0.0}
    for name, view in by_name(honest, honest.stage.theta.detach() - before).items():
        moved[block_of(name)] += float(view.square().sum())
    assert (moved[1] < 100.0 * moved[None]) == (acceptance == "clipped"), moved
    assert moved[2] == 0.0


@pytest.mark.parametrize("copied", [False, True])
def test_a_block_that_nobody_trains_is_taken_up(copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four replicas, all of one block: within some periods all three blocks are trained, and moments of what they share
    are kept."""
    monkeypatch.setattr(expert_average, "PERIOD", 2)
    monkeypatch.setattr(WorkingCopy, "possible", staticmethod(lambda device, autocast: copied))
    members = replicas(run_of(), 2, 2, 2, 2, autocast=copied)
    for round_index in range(1, 25):
        for seed, member in enumerate(members):
            train(member, 10 * round_index + seed)
        kept = [m.stage.moments["exp_avg"].read(0, 10).clone() for m in members]  # type: ignore[union-attr]
        meet(members, round_index)
        assert all(
            torch.equal(m.stage.moments["exp_avg"].read(0, 10), old)  # type: ignore[arg-type]
            for m, old in zip(members, kept, strict=True)
        )
        assert all(m.stage.block == m.outer.block for m in members)  # type: ignore[attr-defined]
    assert {m.stage.block for m in members} == {0, 1, 2}
    for member in members:
        before = {name: view.clone() for name, view in by_name(member, member.stage.theta).items()}
        train(member, 99)
        for name, view in by_name(member, member.stage.theta).items():
            trained = block_of(name) in (None, member.stage.block)
            assert trained or torch.equal(view, before[name])
            assert not trained or not name.endswith("proj.weight") or not torch.equal(view, before[name]), name


@pytest.mark.parametrize(
    ("change", "said"),
    [({"experts_trained": 4}, "a part of model.experts = 6"), ({"experts_trained": 6}, "a part of model.experts = 6")],
)
def test_shares_that_do_not_fit(change: dict[str, Any], said: str) -> None:
    run = run_of()
    with pytest.raises(ManifestError, match=said):
        parse(template(replace(run, training=replace(run.training, **change))), "m.toml")


def test_a_codec_that_does_not_fit() -> None:
    with pytest.raises(ManifestError, match="fp32 or bf16 or int8"):
        parse(template(run_of(codec="modular4")), "m.toml")


@pytest.mark.parametrize("idle", [False, True])
def test_a_replica_whose_experts_have_not_moved_is_no_easier_to_mislead(idle: bool) -> None:
    """At a joiner's first round, and in a round in which nothing was trained here, nothing measures how far experts
    move; what is sent is still bounded."""
    honest, liar = replicas(run_of(acceptance="clipped"), 0, 1)
    if idle:
        train(honest, 1)
        train(liar, 2)
        meet([honest, liar], 1)
    held = honest.stage.theta.detach().clone()
    honest.message(2)
    shared = honest.outer._layout.shared_count  # type: ignore[attr-defined]
    for name, view in by_name(liar, liar.stage.theta).items():
        view.data.copy_(by_name(honest, honest.stage.theta)[name] if block_of(name) != 1 else torch.tensor(1e6))
    packet = Packet(1.0, 8, liar.message(2), sender="liar")
    assert honest.apply(2, 0.0, [packet], lone=False).believed and shared > 0
    experts = [name for name in by_name(honest, held) if block_of(name) == 1]
    after, before = (by_name(honest, flat) for flat in (honest.stage.theta.detach(), held))
    moved, weights = (
        sum(float(square.sum()) for square in squares) ** 0.5
        for squares in (
            [(after[name] - before[name]).square() for name in experts],
            [before[name].square() for name in experts],
        )
    )
    assert 0.0 < moved < 2.0 * weights, (moved, weights)


def test_peers_that_name_a_block_falsely_starve_none_while_they_are_few() -> None:
    """Sixteen replicas of eight blocks, and a peer that always says block 0 and trains nothing."""
    layout = replicas(run_of(), 0)[0].stage.layout
    assert layout is not None
    eight = replace(layout, experts=layout.experts[:1] * 8)
    flat = torch.zeros_like(replicas(run_of(), 0)[0].stage.theta)
    spec, draw = run_of().gossip, random.Random(0)
    members = [ExpertAverage(flat, spec, eight, f"r{n}", digest64("block", n) % 8) for n in range(16)]
    untrained = Counter[int]()
    for round_index in range(1, 801):
        order: list[ExpertAverage | None] = [*members, None]
        draw.shuffle(order)
        for pair in zip(order[::2], order[1::2], strict=False):
            said = [("liar", 0) if one is None else (one.sender, one.block) for one in pair]
            for one, (sender, block) in zip(pair, reversed(said), strict=True):
                if one is not None:
                    one._choose(round_index, {sender: block})
        if round_index > 400:
            untrained.update({*range(8)} - {one.block for one in members})
    assert sum(untrained.values()) <= 20, untrained

"""Gradients averaged before each step, with real replicas: they learn what one process with all samples learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.app.planner.plan_search import together
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Packet, StepReport, WireTensor
from swarmnode.model.turn import Turn
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.recipe import PRESETS
from swarmnode.train.gossip.compression import codec as codec_of
from swarmnode.train.gossip.round import Share
from swarmnode_methods.gradient import Gradient, ReplicaGradient
from swarmnode_methods.int8 import Int8
from swarmnode_methods.whitening import factor, unwhiten, whiten

TINY = replace(PRESETS["tiny"], pipeline=replace(PRESETS["tiny"].pipeline, stages=1))
BATCH = 6
CONTEXT = TINY.model.context


def manifest(codec: str = "fp32", *, optimizer: str = "muon", nesterov_batch: int = BATCH) -> Manifest:
    inner = replace(
        TINY.inner,
        optimizer=optimizer,
        inner_batch=nesterov_batch,
        microbatch=2,
        warmup_samples=2 * BATCH,
        decay="constant",
        average_share=0.0,
    )
    made = together(replace(TINY, inner=inner))
    return replace(made, gossip=replace(made.gossip, codec=codec))


def samples(first: int, count: int) -> WireTensor:
    rng = np.random.default_rng(first)
    data = rng.integers(0, TINY.model.vocabulary, (count, CONTEXT + 1)).astype("<u2")
    return WireTensor("u16", data.shape, data.tobytes())


def members(run: Manifest, count: int = 3) -> list[TorchReplica]:
    return [TorchReplica(run, 0, sender=f"member{number}") for number in range(count)]


def train(replica: TorchReplica, first: int, count: int) -> None:
    tokens = samples(first, count)
    replica.loss(tokens, tokens, count, train=True)


def meet(round_index: int, found: list[TorchReplica], weights: tuple[float, ...] = (1.0, 1.0, 1.0)) -> None:
    messages = [one.message(round_index) for one in found]
    for i, one in enumerate(found):
        packets = [Packet(weights[j], 0, message, sender=f"member{j}") for j, message in enumerate(messages) if j != i]
        one.apply(round_index, weights[i], packets)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_members_with_unequal_shares_take_the_steps_of_one_process(optimizer: str) -> None:
    """The plain run's replica takes all samples of a step, and its ordinary inner step."""
    run = manifest(optimizer=optimizer)
    plain = TorchReplica(replace(run, gossip=replace(run.gossip, method="none")), 0)
    found = members(run)
    for step in range(1, 5):
        for one, (first, count) in zip(found, ((0, 1), (1, 2), (3, 3)), strict=True):
            train(one, 10 * step + first, count)
            train(plain, 10 * step + first, count)
        assert all(one.accumulated == 0 for one in found), "a microbatch must make no step of its own"
        meet(step, found)
        plain.step(step * BATCH)
        for one in found:
            assert one.inner_steps == plain.inner_steps == step
            assert torch.equal(one.stage.theta, found[0].stage.theta)
            torch.testing.assert_close(one.stage.theta, plain.stage.theta, rtol=0, atol=2e-5)


@pytest.mark.parametrize("codec", ["int8", "e3m0", "lloyd4", "lloyd2", "huffman"])
def test_members_stay_equal_and_what_the_codec_loses_is_in_the_next_packet(codec: str) -> None:
    found = members(manifest(codec))
    for step in range(1, 4):
        for number, one in enumerate(found):
            train(one, 10 * step + number, 2)
        gathered = [one.stage.grad / BATCH for one in found]
        meet(step, found)
        for one, before in zip(found, gathered, strict=True):
            assert torch.equal(one.stage.theta, found[0].stage.theta)
            left = one.stage.grad / BATCH
            assert 0.0 < float(left.norm()) < (0.05 if codec == "int8" else 0.7) * float(before.norm())


@pytest.mark.parametrize("state", ["device", "host"])
@pytest.mark.parametrize("fragments", [1, 3])
def test_members_with_whitened_packets_stay_equal_and_keep_what_is_lost(state: str, fragments: int) -> None:
    made = manifest("whitened", optimizer="muon")
    run = replace(made, gossip=replace(made.gossip, fragments=fragments))
    found = [TorchReplica(run, 0, sender=f"member{number}", optimizer_state=state) for number in range(3)]
    for step in range(1, 5):
        for number, one in enumerate(found):
            train(one, 10 * step + number, 2)
        before = [one.stage.grad / BATCH for one in found]
        meet(step, found)
        outer = found[0].outer
        assert isinstance(outer, Gradient) and any(one is not None for one in outer._factors) == (step > 1)
        for one, gathered in zip(found, before, strict=True):
            assert torch.equal(one.stage.theta, found[0].stage.theta)
            assert 0.0 < float((one.stage.grad / BATCH).norm()) < float(gathered.norm())


def test_a_leavers_packet_is_not_whitened() -> None:
    """The successor may be in another round, where the momentum is another."""
    leaver, other = members(manifest("whitened", optimizer="muon"), 2)
    for step in range(1, 3):
        for number, one in enumerate((leaver, other)):
            train(one, 10 * step + number, 2)
        meet(step, [leaver, other])
    train(leaver, 40, 2)
    gathered = leaver.stage.grad / BATCH
    outer = leaver.outer
    assert isinstance(outer, Gradient)
    delta = outer.final_delta(3)
    found = torch.empty_like(gathered)
    outer.codec.read(delta[:1], 0, found)
    assert float((found - gathered).norm()) < 0.7 * float(gathered.norm())


def test_the_error_of_a_whitened_codec_is_small_where_the_gradient_is() -> None:
    draw = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(32, 32, generator=draw))[0]
    sizes = torch.logspace(0, -2, 32).unsqueeze(1)
    momentum, gradient = (left @ (sizes * torch.randn(32, 96, generator=draw)) for _ in range(2))
    weak = []
    for factors in ([None], [factor(momentum)]):
        turned = gradient.clone()
        whiten([turned], factors)
        out = torch.empty(turned.numel())
        coder = codec_of("whitened")
        coder.decode(coder.encode(turned.reshape(-1)), out)
        read = out.view(32, 96)
        unwhiten([read], factors)
        weak.append(float((left.T @ (read - gradient))[16:].norm() / (left.T @ gradient)[16:].norm()))
    assert weak[1] < 0.6 * weak[0]
    back = gradient.T.clone()
    factors = [factor(momentum.T)]
    whiten([back], factors)
    unwhiten([back], factors)
    torch.testing.assert_close(back, gradient.T, rtol=1e-4, atol=1e-5)


def test_a_packet_is_decoded_twice_a_step_and_the_own_one_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the products of pairs, once for the mean; the own one for what the codec left. In C all at a time."""
    read = list[int]()
    summed = list[int]()
    own_read = Int8.read
    own_sum = Int8.add_up

    def reading(self: Int8, tensors: list[WireTensor], start: int, out: torch.Tensor) -> None:
        read.append(out.numel())
        own_read(self, tensors, start, out)

    def adding(self: Int8, packets: list[list[WireTensor]], *given: object) -> None:
        summed.append(len(packets))
        own_sum(self, packets, *given)  # type: ignore[arg-type]

    found = members(manifest("int8"))
    for number, one in enumerate(found):
        train(one, number, 2)
    monkeypatch.setattr(Int8, "read", reading)
    monkeypatch.setattr(Int8, "add_up", adding)
    meet(1, found)
    count = len(found)
    each = found[0].stage.parameters
    assert summed == [count] * count, "all packets at once, at each member"
    assert sum(read) <= count * (1 + 2 * count) * each


@pytest.mark.parametrize(("optimizer", "state"), [("muon", "device"), ("adamw", "device"), ("muon", "host")])
def test_rows_in_turn_are_stepped_as_by_one_process_and_the_others_wait(optimizer: str, state: str) -> None:
    made = manifest(optimizer=optimizer)
    run = replace(made, gossip=replace(made.gossip, fragments=3))
    found = [TorchReplica(run, 0, sender=f"member{number}", optimizer_state=state) for number in range(3)]
    one_alone = TorchReplica(run, 0, sender="alone")
    start = one_alone.stage.theta.clone()
    moved = torch.zeros_like(start, dtype=torch.bool)
    for step in range(1, 7):
        before = one_alone.stage.theta.clone()
        for one, (first, count) in zip(found, ((0, 1), (1, 2), (3, 3)), strict=True):
            train(one, 30 * step + first, count)
            train(one_alone, 30 * step + first, count)
        gathered = one_alone.stage.grad.clone()
        meet(step, found)
        one_alone.message(step)
        one_alone.apply(step, 1.0, [])
        for one in found:
            assert torch.equal(one.stage.theta, found[0].stage.theta)
            torch.testing.assert_close(one.stage.theta, one_alone.stage.theta, rtol=0, atol=5e-5)
        now = one_alone.stage.theta != before
        views = one_alone.stage.views(now, Turn(step, 3))
        assert 0 < int(now.sum()) == sum(int(view.sum()) for view in views)  # none but the rows in turn
        assert not any(view.any() for view in one_alone.stage.views(one_alone.stage.grad, Turn(step, 3)))
        waits = torch.ones_like(now)
        for view in one_alone.stage.views(waits, Turn(step, 3)):
            view.zero_()
        torch.testing.assert_close(one_alone.stage.grad[waits], gathered[waits], rtol=1e-5, atol=1e-9)
        moved |= now
    share = float((moved | (start == 0.0)).float().mean())
    assert share > (0.8 if optimizer == "muon" else 0.99)  # of drawn rows 1 - (2 / 3)^6
    assert found[0].outer.nbytes_of(7) < 0.36 * members(made)[0].outer.nbytes_of(7)


def test_a_replica_that_leaves_gives_the_gradient_of_all_rows() -> None:
    made = manifest()
    run = replace(made, gossip=replace(made.gossip, fragments=3))
    staying, leaving = members(run, 2)
    train(staying, 1, 2)
    train(leaving, 2, 2)
    whole = leaving.stage.grad.clone()
    delta = Packet(1.0, 2, leaving.final_delta(1), final_delta=True, sender="member1")
    before = staying.stage.grad.clone()
    staying.message(1)
    staying.apply(1, 1.0, [delta])
    waits = torch.ones_like(whole, dtype=torch.bool)
    for view in staying.stage.views(waits, Turn(1, 3)):  # those of round 1 made a step
        view.zero_()
    torch.testing.assert_close(staying.stage.grad[waits], (before + whole)[waits], rtol=1e-4, atol=1e-6)


def test_each_row_of_a_matrix_has_its_turn_as_often_as_the_others() -> None:
    drawn = [[Turn(step, 5).first(number) for step in range(1000)] for number in range(4)]
    assert all(150 < row.count(first) < 250 for row in drawn for first in range(5))
    assert len({tuple(row) for row in drawn}) == 4, "matrices draw by themselves"
    assert {Turn(step, 1).first(0) for step in range(9)} == {0}


def test_a_lone_replica_steps_and_one_that_nobody_answered_keeps_its_gradient() -> None:
    lone, waiting = members(manifest(), 2)
    for one in (lone, waiting):
        train(one, 1, 2)
    start = lone.stage.theta.clone()
    gathered = waiting.stage.grad.clone()
    lone.message(3)
    assert lone.apply(3, 1.0, []).members == 1
    waiting.message(1)
    assert waiting.apply(1, 0.0, []).members == 0  # others are here, and no packet of theirs came
    assert not torch.equal(lone.stage.theta, start) and torch.equal(waiting.stage.theta, start)
    torch.testing.assert_close(waiting.stage.grad, gathered)
    waiting.message(2)
    waiting.message(3)  # a boundary that was never applied
    waiting.apply(3, 1.0, [])
    torch.testing.assert_close(waiting.stage.theta, lone.stage.theta, rtol=0, atol=1e-4)


def test_a_member_that_trained_nothing_takes_the_step_of_the_others() -> None:
    found = members(manifest())
    for number, one in enumerate(found[:2]):
        train(one, number, 3)
    meet(1, found, (1.0, 1.0, 0.0))
    assert found[2].inner_steps == 1
    assert all(torch.equal(one.stage.theta, found[0].stage.theta) for one in found)


def test_a_packet_that_is_far_too_long_moves_members_no_further_than_two_usual_ones() -> None:
    found = members(manifest(optimizer="adamw"))
    for number, one in enumerate(found):
        train(one, number, 2)
    found[2].stage.grad.mul_(1e6)
    usual = float(found[0].stage.grad.norm()) / BATCH
    steps = list[float]()
    for one in found:
        assert isinstance(one.outer, Gradient)

        class Seen(ReplicaGradient):
            def step(self, mean: torch.Tensor, round_index: int, turn: Turn) -> StepReport:
                steps.append(float(mean.norm()))
                return super().step(mean, round_index, turn)

        one.outer.gather(Seen(one))
    meet(1, found)
    assert len(steps) == 3 and max(steps) < 5 * usual
    assert all(torch.equal(one.stage.theta, found[0].stage.theta) for one in found)


def test_packets_that_lead_elsewhere_than_most_do_not_count() -> None:
    found = members(manifest(), 4)
    refused = list[set[str]]()
    for step in range(1, 16):
        for number, one in enumerate(found):
            train(one, step, 2)
            train(one, 100 * step + number, 1)
        found[3].stage.grad.mul_(-1.0)
        messages = [one.message(step) for one in found]
        for i, one in enumerate(found[:3]):
            senders = [j for j in range(4) if j != i]
            report = one.apply(step, 1.0, [Packet(1.0, 0, messages[j], sender=f"member{j}") for j in senders])
            told = zip(senders, report.verdicts, strict=True)
            refused.append({f"member{j}" for j, verdict in told if verdict.step == "direction"})
        found[3].apply(step, 1.0, [])
    assert set().union(*refused) == {"member3"}, "no honest member"
    assert all(refused[-15:]), "the last five rounds at all three"
    assert all(torch.equal(one.stage.theta, found[0].stage.theta) for one in found[:3])


def test_a_missed_round_heals() -> None:
    found = members(manifest())
    apart = list[float]()
    for step in range(1, 100):
        for number, one in enumerate(found):
            train(one, 10 * step + number, 1)
        meet(step, found[:2] if step == 5 else found)
        apart.append(float((found[0].stage.theta - found[2].stage.theta).norm()))
    assert apart[3] == 0.0 < apart[4] and apart[-1] < max(apart) / 2


def test_shares_follow_speed_and_make_up_the_steps() -> None:
    names = [PeerId(name) for name in "abcd"]

    def shares(speeds: tuple[float, ...], batch: int, late: int = 0) -> list[int]:
        announced = dict(zip(names, speeds, strict=False))
        return [Share(batch, late).of(me, announced) for me in announced]

    assert shares((1.0, 1.02, 0.98, 1.01), 32) == [8, 8, 8, 8], "noise in speeds changes nothing"
    assert shares((1.0, 2.0, 1.0, 4.0), 32) == [4, 8, 4, 16]
    assert shares((1.0, 1.1, 0.9), 16) == [5, 6, 5] and shares((1.0,) * 3, 16) == [5, 5, 5], "nobody waits for a sample"
    assert shares((1.0, 1.0, 1.0, 1e9), 28) == [4, 4, 4, 16], "a speed that nobody has takes no step over"
    assert shares((1.0, 1.0, 1.0, 1.0), 2) == [1, 1, 1, 1], "nobody is left without a sample"
    assert shares((1.0, 1.0), 32, late=40) == [20, 20] and shares((1.0, 1.0), 32, late=-40) == [12, 12]
    assert shares((1.0,) * 4, 6, late=5) == [2] * 4 and shares((1.0,) * 4, 6, late=-6) == [1] * 4, "in turns"
    assert shares((0.99, 1.0, 1.01), 3, late=40) == [1] * 3, "nobody trains two while others wait"
    assert shares((0.0, 0.0), 32) == [16, 16], "speeds are not known yet"


@pytest.mark.parametrize("number", [0.0, float("nan"), float("inf"), 1e30])
def test_a_momentum_that_gives_no_factor_leaves_packets_plain(number: float) -> None:
    momentum = torch.full((4, 6), number)
    assert factor(momentum) is None
    gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    whitened = gradient.clone()
    whiten([whitened], [factor(momentum)])
    assert torch.equal(whitened, gradient)

"""Training by forward passes alone: replicas that exchanged bytes have the same bits."""

import struct
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from swarmnode.errors import RemoteFault
from swarmnode.machine.replica import TorchReplica
from swarmnode.manifest import Manifest
from swarmnode.model.memory_budget import memory_need
from swarmnode.model.split import split
from swarmnode.ports import Packet, WireTensor
from swarmnode_methods.one_byte import (
    CHUNK,
    HEADER,
    LEVELS,
    ROUNDS_KEPT,
    SINCE_MAX,
    STEPS_MAX,
    ForwardTrainer,
    OneByte,
    SharedSteps,
    decode_steps,
    encode_steps,
    signs,
    write_moved,
)
from tests.support.one_byte_run import by_bytes
from tests.support.tiny_model import TINY, manifest
from tests.support.village import Numbers

PAIR = ("anna", "ben")


def run_of(rate: float = 2e-3, **inner: object) -> Manifest:
    return by_bytes(manifest(replace(TINY, layers=1)), rate, clip_norm=4.0, warmup_samples=0, **inner)


def replicas(run: Manifest, names: Sequence[str] = PAIR) -> list[TorchReplica]:
    return [TorchReplica(run, 0, sender=name) for name in names]


def shared(replica: TorchReplica) -> OneByte:
    assert isinstance(replica.outer, OneByte)
    return replica.outer


def measure(replica: TorchReplica, run: Manifest, first: int) -> float:
    """One microbatch of the samples from `first` on; the slope."""
    wire = Numbers(run).train(range(first, first + 4))
    replica.loss(wire, wire, 4, train=True)
    assert isinstance(replica.trainer, ForwardTrainer)
    return replica.trainer.slope


def packet(replica: TorchReplica, round_index: int) -> Packet:
    return Packet(1.0, 4, replica.message(round_index), sender=shared(replica).sender)


def meet(pair: list[TorchReplica], round_index: int) -> None:
    packets = [packet(replica, round_index) for replica in pair]
    for i, replica in enumerate(pair):
        replica.apply(round_index, 1.0, packets[:i] + packets[i + 1 :])


def test_signs_are_the_bits_of_philox() -> None:
    words = np.random.Philox(key=np.array([5, 3], np.uint64)).random_raw(2)
    bits = [int(word) >> i & 1 for word in words for i in range(64)]
    assert signs(5, 3, 100).tolist() == [2.0 * bit - 1.0 for bit in bits[:100]]
    assert [int(word) for word in words] == [0xC0671201ED7F7B5A, 0x6958BFF49C70BE93]


def test_a_buffer_of_several_chunks_moves_as_in_one() -> None:
    flat = torch.linspace(-1.0, 1.0, CHUNK + 70)
    out = torch.empty_like(flat)
    write_moved(flat, [(9, 0.5), (2, -0.25)], out)
    for first, chunk in ((0, 0), (CHUNK, 1)):
        last = min(first + CHUNK, len(flat))
        count = last - first
        wanted = flat[first:last] + 0.5 * signs(9, chunk, count) - 0.25 * signs(2, chunk, count)
        assert torch.equal(out[first:last], wanted)
    write_moved(flat, [(9, 0.5), (2, -0.25)], flat)
    assert torch.equal(flat, out)


def test_a_round_is_the_papers_formula_at_every_member_to_the_bit() -> None:
    run = run_of()
    pair = replicas(run)
    phi = pair[0].outer.phi.clone()
    eps, clip, rate = run.training.perturbation, run.inner.clip_norm, run.inner.learning_rate
    wanted = phi.clone()
    for name, replica in zip(PAIR, pair, strict=True):
        for number in range(3):
            slope = measure(replica, run, 4 * number)
            z = signs(shared(replica).direction(name, 0, number), 0, len(phi))
            losses = []
            for sign in (eps, -eps):
                with replica.stage.instead(phi + sign * z):
                    wire = Numbers(run).train(range(4 * number, 4 * number + 4))
                    found = replica.loss(wire, wire, 4, train=False)
                losses.append(found.loss_sum / found.tokens)
            assert slope == pytest.approx((losses[0] - losses[1]) / (2 * eps))
            assert torch.equal(replica.stage.theta, phi), "measuring moves nothing"
            wanted -= rate * clip / LEVELS * round(LEVELS * max(-1.0, min(1.0, slope / clip))) * z
    meet(pair, 1)
    assert pair[0].digest() == pair[1].digest()
    assert torch.equal(pair[0].stage.theta, pair[0].outer.phi) and torch.equal(pair[0].outer.phi, pair[1].outer.phi)
    assert torch.allclose(pair[0].outer.phi, wanted, atol=1e-7) and not torch.equal(wanted, phi)
    assert pair[0].inner_steps == 1


def test_a_missed_packet_is_applied_a_round_later_and_nothing_twice() -> None:
    run = run_of()
    pair = replicas(run)
    one, other = pair
    for replica in pair:
        measure(replica, run, 8)
    first = packet(one, 1)
    other.message(1)
    one.apply(1, 1.0, [])
    other.apply(1, 1.0, [first])
    for replica in pair:
        measure(replica, run, 12)
    assert one.digest() != other.digest()
    meet(pair, 2)
    torch.testing.assert_close(one.outer.phi, other.outer.phi, rtol=0.0, atol=1e-6)
    moved = one.outer.phi.clone()
    meet(pair, 3)
    assert torch.equal(one.outer.phi, moved), "no new bytes, and old ones count once"


def test_a_joiner_goes_on_from_a_state_as_if_it_had_been_there() -> None:
    run = run_of()
    pair = replicas(run)
    for replica in pair:
        measure(replica, run, 0)
    meet(pair, 1)
    joiner = TorchReplica(run, 0, sender="carl")
    measure(joiner, run, 0)  # at other weights: forgotten
    joiner.load(pair[0].snapshot(packed=True))
    assert torch.equal(joiner.stage.theta, pair[0].stage.theta)
    everyone = [*pair, joiner]
    for replica in everyone:
        measure(replica, run, 20)
    meet(everyone, 2)
    assert len({replica.digest() for replica in everyone}) == 1


def test_it_learns() -> None:
    run = run_of(rate=4e-3)
    pair = replicas(run)
    held_out = Numbers(run).train(range(10_000, 10_032))
    before = pair[0].loss(held_out, held_out, 32, train=False).loss_sum
    for round_index in range(1, 16):
        for i, replica in enumerate(pair):
            for number in range(4):
                measure(replica, run, 32 * round_index + 16 * i + 4 * number)
            assert replica.accumulated == 16
            replica.step(0)
            assert replica.accumulated == 0
        meet(pair, round_index)
    after = pair[0].loss(held_out, held_out, 32, train=False)
    assert after.loss_sum < before - 0.2 * after.tokens


def test_it_keeps_no_gradient_and_no_moments() -> None:
    run = run_of()
    (replica,) = replicas(run, ["anna"])
    assert replica.sizes_of(0) == {"theta": replica.stage.parameters, "phi": replica.stage.parameters}
    assert replica.stage.grad.numel() == replica.stage.exp_avg.numel() == replica.stage.exp_avg_sq.numel() == 0
    whole = replace(run, training=replace(run.training, kind="pretrain"))
    part = split(run.model, 1)[0]
    saved = memory_need(whole, part).host - memory_need(run, part).host
    assert saved >= 12 * replica.stage.parameters, "gradient and both moments"


BAD = {
    "cut short": encode_steps([SharedSteps(2, 1, (5, 6))])[:-1],
    "a header alone": b"\1\2\3",
    "too many steps": HEADER.pack(2, 1, STEPS_MAX + 1) + bytes(STEPS_MAX + 1),
    "-128": HEADER.pack(2, 1, 1) + struct.pack("<b", -128),
    "a round twice": encode_steps([SharedSteps(2, 1, (5,)), SharedSteps(2, 1, (5,))]),
    "a round before its own": encode_steps([SharedSteps(2, 2, ())]),
    "an absurd round": encode_steps([SharedSteps(1 << 63, 2, ())]),
    "too many rounds": encode_steps([SharedSteps(i + 1, i, ()) for i in range(ROUNDS_KEPT + 1)]),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_a_bad_packet_is_refused_and_changes_nothing(data: bytes) -> None:
    with pytest.raises(RemoteFault, match="one_byte packet"):
        decode_steps(data)
    (replica,) = replicas(run_of(), ["anna"])
    before = replica.digest()
    replica.message(1)
    bad = Packet(1.0, 4, [WireTensor("u8", (len(data),), data)], sender="ben")
    report = replica.apply(1, 1.0, [bad])
    assert report.verdicts[0].step == "misshapen" and replica.digest() == before


def test_steps_are_read_back_as_sent_and_slopes_clipped_to_a_byte() -> None:
    rounds = [SharedSteps(3, 1, (-LEVELS, 0, LEVELS)), SharedSteps(7, 3, ())]
    assert decode_steps(encode_steps(rounds)) == rounds
    (replica,) = replicas(run_of(), ["anna"])
    for slope in (1e30, -4.1, 2.0, 0.0):
        shared(replica).measure_step(slope)
    data = replica.message(1)[0].data
    assert decode_steps(data)[0].said == (LEVELS, -LEVELS, 64, 0)
    assert len(data) == HEADER.size + 4


def rubbish(rounds: Sequence[SharedSteps]) -> Packet:
    data = encode_steps(rounds)
    return Packet(1.0, 4, [WireTensor("u8", (len(data),), data)], sender="liar")


def test_a_liar_says_no_more_than_the_whole_run_can_measure() -> None:
    run = run_of()
    (victim,) = replicas(run, ("anna",))
    victim.message(9)
    run_steps = -(-run.gossip.round_samples // run.inner.microbatch)
    lies = {
        "too many": [SharedSteps(9, 8, (LEVELS,) * (2 * run_steps + 1))],
        "from long ago": [SharedSteps(1 + SINCE_MAX, 0, (LEVELS,))],
        "twice the same rounds": [SharedSteps(8, 6, (LEVELS,)), SharedSteps(9, 6, (LEVELS,))],
    }
    before = victim.stage.theta.detach().clone()
    for what, rounds in lies.items():
        report = victim.apply(9, 1.0, [rubbish(rounds)], lone=False)
        assert [verdict.step for verdict in report.verdicts] == ["misshapen"], what
    assert torch.equal(victim.stage.theta.detach(), before)
    most = [SharedSteps(number, number - 1, (LEVELS,) * (2 * run_steps)) for number in range(2, 10)]
    assert victim.apply(9, 1.0, [rubbish(most)], lone=False).believed
    step = shared(victim).rate(9) * run.inner.clip_norm * victim.stage.parameters**0.5
    moved = float((victim.stage.theta.detach() - before).norm())
    assert moved < 2.0 * step * (8 * 2 * run_steps) ** 0.5, (moved, step)


def test_measurements_beyond_the_most_are_dropped() -> None:
    run = run_of()
    anna, ben = (shared(replica) for replica in replicas(run))
    for _ in range(STEPS_MAX):
        anna.measure_step(1.0)
    said = Packet(1.0, 4, list(anna.message(1)), sender="anna")
    ben.message(1)
    ben.check(said)
    (one,) = decode_steps(said.tensors[0].data)
    assert 0 < len(one.said) < STEPS_MAX
    anna.message(3 + SINCE_MAX)
    ben.check(Packet(1.0, 4, list(anna.message(3 + SINCE_MAX)), sender="anna"))

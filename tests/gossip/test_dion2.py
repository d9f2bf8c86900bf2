"""Dion2 between replicas against its equations, by hand, and members that must stay equal."""

import math

import pytest
import torch
from torch import Tensor

from swarmnode.gossip.outer import outer
from swarmnode.manifest import GossipSpec, InnerSpec
from swarmnode.model.muon import RMS, orthogonalize
from swarmnode.model.optimizer import AdamWPart, Span
from swarmnode.ports import Packet
from swarmnode_methods.dion2 import MOMENTUM, Dion2

ROWS, COLUMNS, OTHERS = 15, 40, 301
SIZE = ROWS * COLUMNS + OTHERS
RATE, DECAY = 0.01, 0.1
INNER = InnerSpec(learning_rate=RATE, muon_learning_rate=RATE, weight_decay=DECAY, beta1=0.9, beta2=0.95)


def normal(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * scale


def matrix(flat: Tensor) -> Tensor:
    return flat[: ROWS * COLUMNS].view(ROWS, COLUMNS)


def members(count: int, of: int, codec: str = "fp32", *, healing: bool = True) -> list[Dion2]:
    found = []
    for number in range(count):
        spec = GossipSpec(method="dion2", codec=codec, fragments=of, group=0, acceptance="all")
        one = outer(spec, normal(0, 0.02), f"member{number}", healing=healing)
        assert isinstance(one, Dion2)
        part = AdamWPart(Span(ROWS * COLUMNS, SIZE, True), torch.zeros(OTHERS), torch.zeros(OTHERS))
        one.attend_gradients([matrix], [part], INNER, lambda round_index, rounds: RATE * math.sqrt(rounds))
        found.append(one)
    return found


def gather(round_index: int, found: list[Dion2]) -> None:
    for number, one in enumerate(found):
        one.theta.add_(normal(100 * round_index + number, 1e-3))


def meet(round_index: int, found: list[Dion2], weights: tuple[float, ...] = (1.0, 1.0, 1.0)) -> None:
    messages = [one.message(round_index) for one in found]
    for i, one in enumerate(found):
        packets = [Packet(weights[j], 0, message) for j, message in enumerate(messages) if j != i]
        one.apply(round_index, weights[i], packets)


@pytest.mark.parametrize("of", [1, 3])
def test_a_round_makes_one_step_of_the_mean_gradient(of: int) -> None:
    found = members(3, of, healing=False)
    moments = torch.zeros(2, OTHERS)
    for r in range(1, 7):
        gather(r, found)
        thetas, phi = [one.theta.clone() for one in found], found[0].phi.clone()
        meet(r, found)
        mean = torch.stack([theta - phi for theta in thetas]).mean(0)
        rows = slice(r % of, None, of)
        step = orthogonalize(matrix(mean)[rows][None])[0] * RATE * RMS * math.sqrt(COLUMNS)
        wanted = phi.clone()
        matrix(wanted)[rows] += step - RATE * DECAY * matrix(phi)[rows]
        d, m, v = (flat[rows] for flat in (mean[ROWS * COLUMNS :], *moments))
        m.lerp_(d, 1 - 0.9**of)
        v.lerp_(d**2, 1 - 0.95**of)
        visits = r // of + 1
        step = m / (1 - 0.9 ** (of * visits)) / ((v / (1 - 0.95 ** (of * visits))).sqrt() + INNER.eps)
        wanted[ROWS * COLUMNS :][rows] += RATE * step - RATE * DECAY * phi[ROWS * COLUMNS :][rows]
        for one, theta in zip(found, thetas, strict=True):
            torch.testing.assert_close(one.phi, wanted, rtol=0, atol=1e-6)
            left = theta - phi  # what was not sent waits in the fast weights, and a part of the mean stays there
            matrix(left)[rows] = MOMENTUM**of * matrix(mean)[rows]
            left[ROWS * COLUMNS :][rows] = 0.0
            torch.testing.assert_close(one.theta - one.phi, left, rtol=0, atol=1e-6)


@pytest.mark.parametrize("codec", ["e3m0", "ternary", "int8"])
def test_slow_weights_stay_equal_and_what_the_codec_loses_waits(codec: str) -> None:
    found = members(3, 3, codec)
    for r in range(1, 10):
        gather(r, found)
        meet(r, found)
        assert all(torch.equal(one.phi, found[0].phi) for one in found)
    before = [one.theta.clone() for one in found]
    meet(10, found)  # every matrix's rows and elements go on being sent until nothing is left
    assert any(not torch.equal(one.theta, theta) for one, theta in zip(found, before, strict=True))


def test_a_lone_replica_steps_and_an_unanswered_one_waits() -> None:
    (one,) = members(1, 1)
    gather(1, [one])
    phi = one.phi.clone()
    one.message(1)
    one.apply(1, 1.0, [])
    assert not torch.equal(one.phi, phi)

    one, other = members(2, 1)
    gather(1, [one, other])
    theta, phi = one.theta.clone(), one.phi.clone()
    one.message(1)
    one.apply(1, 0.0, [])  # others are here, and no packet of theirs came
    assert torch.equal(one.theta, theta) and torch.equal(one.phi, phi)


def test_a_newcomer_takes_the_step_and_gives_nothing() -> None:
    found = members(3, 1, healing=False)
    gather(1, found)
    theta, phi = found[2].theta.clone(), found[2].phi.clone()
    alone = members(2, 1, healing=False)
    gather(1, alone)
    meet(1, alone)
    meet(1, found, (1.0, 1.0, 0.0))
    assert all(torch.equal(one.phi, alone[0].phi) for one in found)
    gathered = (theta - phi)[ROWS * COLUMNS :]  # stays here for its first packet that counts
    torch.testing.assert_close((found[2].theta - found[2].phi)[ROWS * COLUMNS :], gathered, rtol=0, atol=1e-6)


def test_a_missed_round_heals() -> None:
    found, apart = members(3, 3), list[float]()
    for r in range(1, 300):
        gather(r, found)
        meet(r, found[:2] if r == 5 else found)  # one packet misses everybody
        apart.append(float((found[0].phi - found[2].phi).norm()))
    assert torch.equal(found[0].phi, found[1].phi)
    assert apart[3] == 0.0 < apart[4] and apart[-1] < max(apart) / 2

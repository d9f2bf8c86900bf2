"""Pairing and the outer step against their simplest form."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Packet
from swarmnode.train.gossip.outer.round_simple import SimpleReplica, end_of_round
from swarmnode.train.gossip.outer.round_simple import pairs as simple_pairs
from swarmnode.train.gossip.pairing import pairs
from swarmnode_methods.noloco import NoLoCo
from tests.support.outer_step import Fp64, momentum, random

RUN = RunId("ab" * 32)


@given(count=st.integers(0, 40), round_index=st.integers(0, 1000), stage=st.integers(0, 7))
def test_pairs_are_those_of_the_simplest_form(count: int, round_index: int, stage: int) -> None:
    members = [PeerId(f"peer{number:03}") for number in range(count)]
    assert sorted(pairs(RUN, stage, round_index, members)) == sorted(simple_pairs(RUN, stage, round_index, members))


@pytest.mark.parametrize(
    ("alpha", "beta", "gamma"), [(0.0, 1.0, 1.0), (0.5, 0.7, 0.7), (0.5, 0.7, 0.4)], ids=["average", "noloco", "pull"]
)
def test_rounds_of_a_stage_are_those_of_the_simplest_form(alpha: float, beta: float, gamma: float) -> None:
    """Five replicas, eight rounds: each trains something of its own, pairs meet, one is left alone."""
    size = 6
    names = [PeerId(f"peer{number}") for number in range(5)]
    real = {name: NoLoCo(random(size, at), Fp64(), alpha, beta, gamma) for at, name in enumerate(names)}
    simple = {
        name: SimpleReplica(one.theta.clone(), one.phi.clone(), torch.zeros(size, dtype=torch.float64))
        for name, one in real.items()
    }
    for round_index in range(1, 9):
        for at, name in enumerate(names):
            learned = 0.1 * random(size, 100 * round_index + at)
            real[name].theta.add_(learned)
            simple[name].theta = simple[name].theta + learned
        messages = {name: one.message(round_index) for name, one in real.items()}
        for group in pairs(RUN, 0, round_index, names):
            for me in group:
                packets = [Packet(1.0, 0, messages[other]) for other in group if other != me]
                real[me].apply(round_index, 1.0, packets)
        end_of_round(simple, RUN, 0, round_index, alpha=alpha, beta=beta, gamma=gamma)
        for name in names:
            torch.testing.assert_close(real[name].phi, simple[name].phi, rtol=0, atol=1e-12)
            torch.testing.assert_close(real[name].theta, simple[name].theta, rtol=0, atol=1e-12)
            if alpha:
                torch.testing.assert_close(momentum(real[name]), simple[name].momentum, rtol=0, atol=1e-12)

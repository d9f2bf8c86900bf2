"""The outer step: its invariants, from the equations themselves. See docs/methods.md."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.base.errors import ManifestError
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Packet
from swarmnode.run.gossip_rules import methods
from swarmnode.run.manifest import GossipSpec, Manifest, PipelineSpec, parse, template
from swarmnode.run.manifest.gossip_compat import sends_pseudo_gradients
from swarmnode.train.gossip.compression import codec
from swarmnode.train.gossip.outer import outer
from swarmnode.train.gossip.pairing import groups
from swarmnode_methods import noloco
from swarmnode_methods.delta import DeltaCodec
from swarmnode_methods.diloco import DiLoCo
from swarmnode_methods.mean import DeltaMean
from swarmnode_methods.noloco import NoLoCo
from tests.support.method_tables import CODECS, CODECS_OF, IN_GROUPS, METHODS
from tests.support.outer_step import Fp64, mean, random

RUN = RunId("cd" * 32)


def swarm(count: int, size: int, alpha: float, beta: float, gamma: float, *, apart: bool = True) -> list[NoLoCo]:
    """Replicas in float64; `apart`: with slow weights of their own, else equal ones."""
    found = []
    for i in range(count):
        replica = NoLoCo(random(size, i if apart else 0), Fp64(), alpha, beta, gamma)
        found.append(replica)
    return found


def meet(replicas: list[NoLoCo], round_index: int, size: int | None = 2) -> None:
    """All boundaries, then all outer steps of one round."""
    names = [PeerId(f"peer{i:03}") for i in range(len(replicas))]
    by_name = dict(zip(names, replicas, strict=True))
    messages = {name: replica.message(round_index) for name, replica in by_name.items()}
    for group in groups(RUN, 0, round_index, names, size):
        for me in group:
            packets = [Packet(1.0, 0, messages[other]) for other in group if other != me]
            by_name[me].apply(round_index, 1.0, packets)


@pytest.mark.node
@given(gamma=st.floats(0, 1), count=st.integers(1, 6))
def test_all_together_it_is_heavy_ball_diloco_whatever_gamma_and_diloco_is_nesterovs(gamma: float, count: int) -> None:
    alpha = 0.5
    beta = 0.7
    replicas = swarm(count, 4, alpha, beta, gamma, apart=False)
    diloco = [DiLoCo(random(4, 0), Fp64(), alpha, beta) for _ in range(count)]
    phi = random(4, 0)
    m = torch.zeros(4, dtype=torch.float64)
    ahead = phi.clone()
    for round_index in range(1, 5):
        deltas = [random(4, 1000 * round_index + i) for i in range(count)]
        for i, delta in enumerate(deltas):
            replicas[i].theta.add_(delta)
            diloco[i].theta.add_(delta)
        meet(replicas, round_index, None)
        meet(list(diloco), round_index, None)
        m = alpha * m + beta * mean(deltas)
        phi = phi + m  # heavy ball, written plainly
        ahead = ahead + alpha * m + beta * mean(deltas)
        for group, wanted in ((replicas, phi), (diloco, ahead)):
            for replica in group:
                torch.testing.assert_close(replica.phi, wanted, rtol=0, atol=1e-12)
                torch.testing.assert_close(replica.theta, wanted, rtol=0, atol=1e-12)
    assert DiLoCo.group_size is None and NoLoCo.group_size == 2


@pytest.mark.parametrize("gamma", [0.7, 0.4])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("block", [4, 1 << 18])
def test_equations_in_float32(gamma: float, name: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair, by numpy in float64 from what the codec delivered; blocks that do not divide the size; gain kept."""
    monkeypatch.setattr(noloco, "BLOCK_CPU", block)
    size = 11
    alpha = 0.5
    beta = 0.7
    draw = np.random.default_rng(3)
    phi, theta, m, gain, phi2, theta2 = draw.standard_normal((6, size)).astype(np.float32)
    ours = NoLoCo(torch.from_numpy(theta.copy()), codec(name), alpha, beta, gamma)
    ours.reset(torch.from_numpy(phi), torch.from_numpy(m))
    theirs = NoLoCo(torch.from_numpy(theta2.copy()), codec(name), alpha, beta, gamma)
    theirs.reset(torch.from_numpy(phi2), torch.zeros(size))
    ours.message(4)
    ours.theta.add_(torch.from_numpy(gain))
    before = ours.theta.clone()
    message = theirs.message(4)
    report = ours.apply(4, 1.0, [Packet(1.0, 9, message)])

    received = torch.empty(len(message), size)
    for i, tensor in enumerate(message):
        codec(name).decode([tensor], received[i])
    if gamma == beta:
        pull = beta * ((theta + received[0].numpy()) / 2 - phi)
    else:
        pull = beta * (theta - phi + received[0].numpy()) / 2 + gamma * ((phi + received[1].numpy()) / 2 - phi)
    m_new = alpha * m + pull
    np.testing.assert_allclose(ours.momentum, m_new, atol=2e-6)
    np.testing.assert_allclose(ours.phi, phi + m_new, atol=2e-6)
    np.testing.assert_allclose(ours.theta, phi + m_new + (before.numpy() - theta), atol=2e-6)
    assert report.members == 2
    assert report.delta_norm == pytest.approx(float(np.linalg.norm(theta - phi)), rel=1e-5)
    assert report.step_norm == pytest.approx(float(np.linalg.norm(m_new)), rel=1e-5)


def test_partners_stay_equal_once_equal() -> None:
    """A pair with the same slow weights and momentum ends a round with the same bits, whatever each had learned."""
    a, b = (NoLoCo(torch.zeros(1000), codec("fp32"), 0.5, 0.7, 0.7) for _ in range(2))
    for round_index in range(5):
        a.theta.add_(torch.randn(1000))
        b.theta.add_(torch.randn(1000))
        one = a.message(round_index)
        two = b.message(round_index)
        a.apply(round_index, 1.0, [Packet(1.0, 0, two)])
        b.apply(round_index, 1.0, [Packet(1.0, 0, one)])
        assert torch.equal(a.phi, b.phi) and torch.equal(a.momentum, b.momentum) and torch.equal(a.theta, b.theta)


@pytest.mark.parametrize("gamma", [0.7, 0.4])
def test_newcomers_receive_and_do_not_give(gamma: float) -> None:
    def pair() -> list[NoLoCo]:
        found = swarm(2, 8, 0.5, 0.7, gamma)
        for i, replica in enumerate(found):
            replica.reset(random(8, 70 + i), random(8, 80 + i))
        return found

    old, new = pair()
    alone, _ = pair()
    from_old = old.message(1)
    from_new = new.message(1)
    alone.message(1)
    phi = new.phi.clone()
    m = new.momentum.clone()
    theta = new.theta.clone()
    assert new.apply(1, 0.0, [Packet(1.0, 0, from_old)]).members == 1
    other, _ = pair()
    m = 0.5 * m + 0.7 * (other.theta - other.phi) + gamma * (other.phi - phi)
    torch.testing.assert_close(new.momentum, m, rtol=0, atol=1e-12)
    torch.testing.assert_close(new.phi, phi + m, rtol=0, atol=1e-12)
    # The partner of a newcomer takes the very step it would take alone, and so do two newcomers.
    assert old.apply(1, 1.0, [Packet(0.0, 0, from_new)]).members == 1
    alone.apply(1, 1.0, [])
    assert torch.equal(old.phi, alone.phi) and torch.equal(old.theta, alone.theta)
    both = pair()[1]
    lone = pair()[1]
    both.message(2)
    lone.message(2)
    assert both.apply(2, 0.0, [Packet(0.0, 0, from_new)]).members == 1
    lone.apply(2, 1.0, [])
    assert torch.equal(both.phi, lone.phi)
    assert not torch.equal(theta, both.theta)


def test_weights_weigh() -> None:
    ours, a, b = swarm(3, 6, 0.0, 1.0, 1.0)
    thetas = [r.theta.clone() for r in (ours, a, b)]
    packets = [Packet(0.5, 0, a.message(1)), Packet(0.25, 0, b.message(1))]
    ours.message(1)
    assert ours.apply(1, 1.0, packets).members == 3
    expected = (thetas[0] + 0.5 * thetas[1] + 0.25 * thetas[2]) / 1.75
    torch.testing.assert_close(ours.phi, expected, rtol=0, atol=1e-12)


def test_a_boundary_never_applied_belongs_to_the_next() -> None:
    given_up, straight = (NoLoCo(torch.ones(4), codec("fp32"), 0.5, 0.7, 0.7) for _ in range(2))
    for replica in (given_up, straight):
        replica.theta.add_(1.0)
    given_up.message(1)
    for replica in (given_up, straight):
        replica.theta.add_(2.0)
        replica.message(2)
        replica.apply(2, 1.0, [])
    assert torch.equal(given_up.phi, straight.phi)
    with pytest.raises(AssertionError, match="boundary marked is None"):
        given_up.apply(2, 1.0, [])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("coding", CODECS)
def test_a_manifest_takes_what_goes_together(method: str, coding: str) -> None:
    """The manifest's own table and the optimizers agree; where slow weights must be equal, the whole stage meets."""
    spec = GossipSpec(method=method, codec=coding, group=0)
    run = Manifest()
    if methods()[method].averages_gradients:  # a round is a step of the only stage
        run = Manifest(pipeline=PipelineSpec(stages=1))
        spec = replace(spec, round_samples=run.inner.inner_batch)
    if coding not in CODECS_OF[method]:
        with pytest.raises(ManifestError, match=coding):
            outer(spec, torch.zeros(8))
        return
    found = outer(spec, torch.zeros(8))
    assert found.codec.name == coding
    assert sends_pseudo_gradients(spec) == isinstance(found, DeltaMean)
    if isinstance(found, DeltaMean):
        assert found.healing and method not in IN_GROUPS
    assert parse(template(replace(run, gossip=spec)), "here").gossip == spec
    if method not in IN_GROUPS:
        with pytest.raises(ManifestError, match=r"gossip\.group = 4: allowed is 0 with gossip\.method"):
            parse(template(replace(run, gossip=replace(spec, group=4))), "here")


@pytest.mark.parametrize("coding", ["topk64", "topk512"])
def test_an_idle_replica_sends_nothing_of_what_its_code_keeps_back(coding: str) -> None:
    """At weight 0 its packet counts nowhere: what earlier packets left out is still to come."""
    theta = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    spec = GossipSpec(method="sparseloco", codec=coding, group=0)
    idle = outer(spec, theta.clone())
    busy = outer(spec, theta.clone())
    assert isinstance(idle, DeltaMean) and isinstance(idle.codec, DeltaCodec)
    for one in (idle, busy):
        one.theta.add_(torch.randn(4096, generator=torch.Generator().manual_seed(1)))
    packets = [Packet(1.0, 8, one.message(0)) for one in (idle, busy)]
    idle.apply(0, 1.0, packets[1:])
    busy.apply(0, 1.0, packets[:1])
    assert idle.codec.residual is not None
    kept = idle.codec.residual.clone()
    assert kept.abs().max() > 0.0
    busy.theta.add_(0.1)
    packets = [Packet(0.0, 0, idle.message(1)), Packet(1.0, 8, busy.message(1))]
    assert idle.apply(1, 0.0, packets[1:]).members == 1
    torch.testing.assert_close(idle.codec.residual, kept, rtol=1e-4, atol=1e-5)

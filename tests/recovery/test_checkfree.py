"""A stage made of its neighbours: which layer stands for which, and what both methods give."""

from dataclasses import replace

import pytest
import torch

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import Neighbour
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.checkfree import METHODS, counterpart, nearer
from swarmnode.keep.transfer.snapshot import SLOW, Snapshot, StateSlice
from swarmnode.model.split import ends, split
from swarmnode.model.stage import BUMP_STEPS
from swarmnode.run.manifest import InnerSpec, Manifest, ModelSpec, PipelineSpec

MODEL = ModelSpec(layers=6, width=16, heads=2, kv_heads=1, ffn=24, context=8, vocabulary=32)
MANIFEST = Manifest(model=MODEL, pipeline=PipelineSpec(stages=3), inner=InnerSpec(microbatch=2, inner_batch=2))


def neighbour(replica: TorchReplica, norm: float = 1.0) -> Neighbour:
    return Neighbour(replica.stage.part.stage, replica.snapshot().sections["phi"], norm)


def replicas() -> list[TorchReplica]:
    return [TorchReplica(replace(MANIFEST, seed=stage), stage) for stage in range(3)]


def layers(replica: TorchReplica) -> dict[int, torch.Tensor]:
    named = replica.stage.named(replica.stage.theta)
    return {layer: named[f"model.layers.{layer}.mlp.up_proj.weight"] for layer in replica.stage.part.layers}


def test_counterparts() -> None:
    one, two, three = split(MODEL, 3)
    assert [counterpart(one, two, k) for k in (0, 1)] == [0, 1]
    assert [counterpart(three, two, k) for k in (0, 1)] == [4, 5]
    single = split(MODEL, 6)
    assert counterpart(single[1], single[2], 0) == 1 and counterpart(single[3], single[2], 0) == 3
    assert [nearer(two, k, (0, 2)) for k in (0, 1)] == [0, 2]
    assert nearer(two, 1, (0,)) == 0 and nearer(one, 0, (1,)) == 1


def test_copy_and_weighted_mean() -> None:
    below, lost, above = replicas()
    given = [neighbour(below, 3.0), neighbour(above, 1.0)]
    lost.rebuild("copy", given, None)
    assert torch.equal(layers(lost)[2], layers(below)[0]) and torch.equal(layers(lost)[3], layers(above)[5])
    lost.rebuild("weighted", given, None)
    torch.testing.assert_close(layers(lost)[2], 0.75 * layers(below)[0] + 0.25 * layers(above)[4])


def test_a_rebuilt_replica_begins_anew() -> None:
    below, lost, above = replicas()
    lost.stage.exp_avg.fill_(1.0)
    lost.stage.inner_steps = 9
    lost.outer.momentum[:] = 1.0
    lost.rebuild("weighted", [neighbour(below, 0.0), neighbour(above, 0.0)], None)
    assert lost.stage.inner_steps == 0 and not lost.stage.exp_avg.any() and not lost.outer.momentum.any()
    assert torch.equal(lost.outer.phi, lost.stage.theta)
    state = lost.snapshot()
    assert state.bump_steps == BUMP_STEPS
    copy = TorchReplica(MANIFEST, 1)
    copy.load(state)
    assert copy.digest() == lost.digest() and copy.stage.bump_steps == BUMP_STEPS


def test_the_higher_rate_decays() -> None:
    replica = TorchReplica(MANIFEST, 1)
    rates = []
    replica.stage.begin_anew()
    for _ in range(3):
        replica.stage.accumulated = 2
        replica.stage.grad.fill_(1e-3)
        rates.append(replica.step(10_000).learning_rate)
    replica.stage.bump_steps = 0
    replica.stage.accumulated = 2
    plain = replica.step(10_000).learning_rate
    assert rates[0] == pytest.approx(1.1 * plain) and rates[0] > rates[1] > rates[2] > plain


@pytest.mark.parametrize("stage", [0, 2])
def test_the_first_and_last_take_their_ends_or_keep_those_of_the_seed(stage: int) -> None:
    everybody = replicas()
    lost = everybody[stage]
    middle = everybody[1]
    whole = Snapshot.of(lost.snapshot(packed=True), stage, 1, record_pb2.Progress())
    first, count = ends(MODEL, split(MODEL, 3)[stage])
    mirrored = whole.part(StateSlice(SLOW.sections, first, count)).state.sections["phi"]
    before = lost.stage.theta.clone()
    name = "model.embed_tokens.weight" if stage == 0 else "lm_head.weight"
    kept = lost.stage.named(before)[name].clone()
    lost.rebuild("copy", [neighbour(middle)], mirrored)
    named = lost.stage.named(lost.stage.theta)
    assert torch.equal(named[name], kept)
    if stage == 2:
        assert torch.equal(named["model.norm.weight"], torch.ones(16))
    layer = lost.stage.part.layers.start
    assert torch.equal(layers(lost)[layer], layers(middle)[2])
    anew = replicas()[stage]
    drawn = anew.stage.theta[first : first + count].clone()
    anew.rebuild("copy", [neighbour(middle)], None)
    assert torch.equal(anew.stage.theta[first : first + count], drawn)
    assert torch.equal(layers(anew)[layer], layers(middle)[2])


@pytest.mark.parametrize("method", METHODS)
def test_bad_neighbours_are_refused_and_change_nothing(method: str) -> None:
    below, lost, above = replicas()
    before = lost.stage.theta.clone()
    good = neighbour(below)
    above.outer.phi[3] = float("nan")
    for bad in (neighbour(above), Neighbour(2, good.phi[:-4], 1.0)):
        with pytest.raises(RemoteFault):
            lost.rebuild(method, [good, bad], None)
    assert torch.equal(lost.stage.theta, before)

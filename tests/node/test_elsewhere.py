"""Replicas on another device than the CPU: a pipeline of two trains, meets, and hands its state on."""

from typing import Any

import pytest
import torch

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.ports import Neighbour, Packet
from swarmnode.run.manifest import Manifest
from swarmnode.train.node import membership_handlers
from tests.support.fake_device import elsewhere
from tests.support.village import Numbers, manifest

ROUNDS = 2
MICROBATCHES = 4


def life(run: Manifest, device: str | torch.device) -> list[float]:
    """What two pipelines say that train, meet each round, and hand their first stage on: losses, norms, distances."""
    stages = range(run.pipeline.stages)
    size = run.inner.microbatch
    text = Numbers(run)
    pipelines = [[TorchReplica(run, stage, device, sender=f"r{k}") for stage in stages] for k in range(2)]
    told: list[float] = []
    for round_index in range(1, ROUNDS + 1):
        for k, replicas in enumerate(pipelines):
            for i in range(MICROBATCHES):
                at = size * (MICROBATCHES * (2 * round_index + k) + i)
                tokens = x = text.train(range(at, at + size))
                tapes: list[Any] = []
                for replica in replicas[:-1]:
                    x, tape = replica.forward(x, keep=True, graph=i % 2 == 0, tokens=tokens)
                    tapes.append(tape)
                if i == 2:  # a lone round, while a backward is due
                    replicas[0].message(0)
                    told.append(replicas[0].apply(0, 1.0, []).step_norm)
                last = replicas[-1].loss(x, tokens, size, train=True)
                told.append(last.loss_sum)
                gradient = last.gradient
                for replica, tape in zip(reversed(replicas[:-1]), reversed(tapes), strict=True):
                    assert gradient is not None
                    gradient = replica.backward(tape, gradient, size)
                if i % 2:
                    told += [replica.step(at).gradient_norm for replica in replicas]
        for stage in stages:
            mine = [replicas[stage] for replicas in pipelines]
            messages = [replica.message(round_index) for replica in mine]
            for k, replica in enumerate(mine):
                report = replica.apply(round_index, 1.0, [Packet(1.0, 16, messages[1 - k])])
                told += [report.delta_norm, report.step_norm, *(verdict.keep for verdict in report.verdicts)]
    giver = pipelines[0][0]
    taker = pipelines[1][0]
    taker.load(giver.snapshot())
    if giver.stage.subspace is None:  # where there is one, what is loaded is put into it again, to rounding
        assert taker.digest() == giver.digest()
    return told


@pytest.mark.parametrize(
    "given",
    [
        {"codec": "modular4", "acceptance": "clipped"},
        pytest.param({"codec": "int8", "acceptance": "clipped"}, marks=pytest.mark.nightly),
        {"method": "partial_average", "codec": "topk64", "group": 0},
        {"method": "desloc", "codec": "int8", "group": 0},
        {"method": "diloco", "codec": "e3m0", "group": 0},
        {"method": "streaming", "codec": "fp32", "group": 0},
        {"boundary": "int8"},
        {"boundary": "int4_int2"},
        {"boundary": "subspace", "boundary_rank": 8},
    ],
    ids=lambda given: "-".join(map(str, given.values())),
)
def test_a_life_is_the_same_elsewhere(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding: attention and products may come in other kernels there."""
    run = manifest(stages=2, **given)
    here = life(run, "cpu")
    with elsewhere(monkeypatch) as device:
        there = life(run, device)
    assert there == pytest.approx(here, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("method", ["weighted", "copy"])
def test_a_stage_is_measured_and_rebuilt_elsewhere(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = manifest()

    def rebuilt(device: str | torch.device, stage: int) -> bytes:
        beside = [TorchReplica(run, other, device) for other in (stage - 1, stage + 1) if 0 <= other < 3]
        given = [Neighbour(r.stage.part.stage, r.snapshot().sections["phi"], 1.0 + r.stage.part.stage) for r in beside]
        replica = TorchReplica(run, stage, device)
        membership_handlers.forward(replica, run, stage, run.inner.microbatch)
        replica.rebuild(method, given, None)
        return replica.digest()

    here = [rebuilt("cpu", stage) for stage in range(3)]
    with elsewhere(monkeypatch) as device:
        assert [rebuilt(device, stage) for stage in range(3)] == here

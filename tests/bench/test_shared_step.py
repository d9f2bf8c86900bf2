"""bench averaging: one set of weights stands for members that the product's own method keeps equal."""

import math

import numpy as np
import pytest
import torch

from benchmarks.method import shared_step, shared_step_along
from benchmarks.method.gossip import maker
from benchmarks.method.replica_batch import ReplicaBatch
from benchmarks.method.shared_step import SharedStep, StepRun, efficiency, parts
from benchmarks.method.shared_step_along import FlatRun
from swarmnode.base.errors import UsageError

DRAW = np.random.Generator(np.random.Philox(key=1))
TEXT = (
    np.tile(DRAW.integers(32, 64, 97), 300).astype(np.uint8),
    np.tile(DRAW.integers(32, 64, 97), 30).astype(np.uint8),
)


@pytest.fixture(autouse=True)
def _short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_step, "read_text", lambda path: TEXT)


@pytest.mark.parametrize("what", ["lloyd4", "lloyd3/3", "whitened", "whitened/3"])
def test_the_shared_weights_are_those_of_members_that_meet(what: str) -> None:
    run = StepRun(what, replicas=3, width=32, samples=6, steps=5, rate=0.01, seed=2)
    shared = SharedStep(run, in_parts=False)
    members = ReplicaBatch(run.spec, run.seed, maker(f"gradient/{what}", "all"), TEXT)
    start = shared.theta.detach()[0].clone()
    for step in range(1, 6):
        shared.learn(1)
        members.learn(1)
        members.meet(step)
        one, *others = members.theta.detach()
        assert all(torch.equal(one, other) for other in others)
        apart = shared.theta.detach()[0] - one  # sums in another order round a number to its neighbour now and then
        assert float(apart.norm()) < 0.35 * float((one - start).norm())


def test_a_delayed_mean_moves_the_slow_weights_and_the_fast_ones_as_far_again() -> None:
    late, plain = (
        SharedStep(StepRun(what, replicas=3, width=32, samples=6, steps=5, rate=0.01, seed=2))
        for what in ("lloyd4/3/delay", "lloyd4/3")
    )
    start = late.theta.detach()[0].clone()
    late.learn(1)
    assert torch.equal(late.theta.detach()[0], start)
    late.learn(1)
    plain.learn(1)
    stepped = plain.theta.detach()[0]
    assert torch.equal(late._slow, stepped) and not torch.equal(stepped, start)
    torch.testing.assert_close(late.theta.detach()[0], 2.0 * stepped - start)


def test_bytes_are_those_of_packets_there_and_back_and_fall_with_the_share_of_rows() -> None:
    found = {}
    for what in ("int8", "lloyd4", "lloyd4/3"):
        one = SharedStep(StepRun(what, replicas=4, width=32, samples=4, steps=3, rate=0.01, seed=0))
        one.learn(3)
        found[what] = one.nbytes_of_step()[0] / (2 * 3 / 4)
    assert found["int8"] == pytest.approx(1.03125, rel=1e-3) and found["lloyd4"] == pytest.approx(0.53125, rel=1e-3)
    assert found["lloyd4/3"] == pytest.approx(found["lloyd4"] / 3, rel=0.01)


def test_efficiency_is_the_share_of_samples_that_one_process_needs() -> None:
    curve = [(120, 2.0), (160, 1.8), (200, 1.7), (240, 1.6)]
    assert [efficiency(nats, curve) for _, nats in curve] == pytest.approx([120 / 240, 160 / 240, 200 / 240, 1.0])
    assert 0.5 < efficiency(1.9, curve) < 160 / 240
    assert efficiency(1.55, curve) > 1.0 and efficiency(2.3, curve) < 0.5


def test_points_along_a_run_are_those_of_shorter_runs() -> None:
    short, long = (
        dict(shared_step_along.measure(FlatRun("whitened/3", 2, 32, 4, steps, 0.01, 2))["curve"]) for steps in (16, 32)
    )
    assert max(short) == 16 and max(long) == 32
    assert all(long[steps] == nats for steps, nats in short.items() if steps in long)
    assert len(short.keys() & long.keys()) > 4
    found = shared_step_along.run(["int8", "lloyd2/9"], [2], width=32, samples=4, steps=32, rate=0.01)
    at = {(row["codec/F"], row["replicas"], row["steps"]): row for row in found["rows"]}
    assert {steps for _, _, steps in at} == {4, 8, 16, 32} and len(at) == 8
    exact = at["int8", 2, 32]
    few = at["lloyd2/9", 2, 32]
    assert exact["nats"] == pytest.approx(exact["of one process"], abs=0.02)
    assert few["nats"] > exact["nats"] and few["bytes"] < exact["bytes"] / 9


def test_steps_lost_are_those_that_one_process_with_the_same_samples_does_not_need() -> None:
    alone = [(steps, 4.0 - math.log2(steps)) for steps in (1, 2, 4, 8)]
    late = [(steps, nats + 1.0) for steps, nats in alone]
    runs = [
        {"what": what, "replicas": 2, "seed": 0, "curve": curve, "bytes": 0.1}
        for what, curve in ((shared_step.ALONE, alone), ("lloyd3", late))
    ]
    rows = shared_step_along.rows_of("lloyd3", 2, runs)
    assert [row["steps"] for row in rows] == [1, 2, 4, 8]
    assert [row["efficiency"] for row in rows] == pytest.approx([0.5] * 4)
    assert [row["steps lost"] for row in rows] == pytest.approx([0.5, 1.0, 2.0, 4.0])


@pytest.mark.parametrize("wrong", ["lloyd4/2", "lloyd4/x", "topk64", "lloyd4/0", "nothing"])
def test_unknown_settings_are_named(wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        parts(wrong)

"""The way back first: a stage's input gradient is there before its matrices' gradients, which are the same bits."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmnode.app.machine.compute import ThreadCompute
from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.errors import Busy
from swarmnode.base.parted_work import GivenEarly
from swarmnode.base.ports import LossResult, Priority, WireTensor
from swarmnode.model.boundary_code import encode_boundary
from swarmnode.model.matrix_gradients import MatrixProduct
from swarmnode.run.manifest import Manifest
from tests.support.fake_telemetry import Quiet
from tests.support.tiny_model import TINY, manifest, token_batch, token_wire

SAMPLES = 4
CASES: dict[str, tuple[Manifest, dict[str, Any]]] = {
    "float32": (manifest(TINY), {}),
    "bfloat16": (manifest(TINY), {"autocast": True}),
    "subspace": (manifest(TINY, boundary="subspace", rank=8, optimizer="muon"), {}),
    "biases": (manifest(replace(TINY, qkv_bias=True, output_bias=True, qk_norm="head")), {}),
    "experts": (manifest(replace(TINY, experts=4, experts_active=2, expert_ffn=16)), {}),  # whose gradients wait not
}


def chain(case: str) -> list[TorchReplica]:
    run, options = CASES[case]
    return [TorchReplica(run, stage, **options) for stage in range(3)]


def there_and_back(stages: list[TorchReplica], tokens: WireTensor, *, first: bool) -> list[WireTensor | None]:
    """The input gradients of all stages but the first; with `first`, before those of matrices."""
    x = tokens
    tapes = list[Any]()
    for stage in stages[:-1]:
        x, tape = stage.forward(x, keep=True, tokens=tokens)
        tapes.append(tape)
    found = list[WireTensor | None]()
    gradient = back(stages[2], lambda: stages[2].loss(x, tokens, SAMPLES, train=True), first=first)
    found.append(gradient)
    for stage, tape in ((stages[1], tapes[1]), (stages[0], tapes[0])):
        given = gradient
        assert given is not None
        gradient = back(stage, lambda s=stage, t=tape, g=given: s.backward(t, g, SAMPLES), first=first)  # type: ignore[misc]
        found.append(gradient)
    return found


def back(stage: TorchReplica, work: Any, *, first: bool) -> WireTensor | None:
    if not first:
        value = work()
    else:
        before = stage.stage.grad.clone()
        counted = stage.accumulated
        with stage.input_first():
            value = work()
        left = stage.stage.backprop.matrices
        if left is not None:
            name = next(name for name in stage.stage.shapes if name.endswith("q_proj.weight"))
            named = stage.stage.named
            assert torch.equal(named(stage.stage.grad)[name], named(before)[name]), "nobody waits for this one"
            assert stage.accumulated == counted
        stage.settle()
        assert stage.accumulated == counted + SAMPLES
    return value.gradient if isinstance(value, LossResult) else value


@pytest.mark.parametrize("case", CASES)
def test_gradients_added_later_are_equal_to_the_bit(case: str) -> None:
    plain = chain(case)
    early = chain(case)
    for seed in range(2):
        tokens = token_wire(token_batch(TINY, SAMPLES, seed))
        wanted = there_and_back(plain, tokens, first=False)
        found = there_and_back(early, tokens, first=True)
        assert [None if one is None else bytes(one.data) for one in found] == [
            None if one is None else bytes(one.data) for one in wanted
        ]
    for one, other in zip(plain, early, strict=True):
        assert torch.equal(one.stage.grad, other.stage.grad) and float(one.stage.grad.norm()) > 0.0
        one.step(1000)
        other.step(1000)
        assert torch.equal(one.stage.theta, other.stage.theta)


def test_a_check_of_others_work_adds_nothing_and_leaves_nothing() -> None:
    stage = chain("float32")[1]
    x = encode_boundary(torch.randn(SAMPLES, TINY.context, TINY.width), stage.stage.codes[0])
    y, tape = stage.forward(x, keep=True)
    assert tape is not None
    with stage.input_first():
        stage.backward(tape, y, SAMPLES, accumulate=False)
    stage.settle()
    assert stage.accumulated == 0 and not stage.stage.grad.any()


@pytest.mark.parametrize("times", [1, 2])
def test_memory_that_runs_out_among_the_rest(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: the rest is added, nothing twice. Twice: all that had come together is dropped, and the next one counts."""
    plain = chain("float32")
    early = chain("float32")
    tokens = token_wire(token_batch(TINY, SAMPLES, 1))
    there_and_back(plain, tokens, first=False)
    own = MatrixProduct.add
    calls = list[int]()

    def scarce(self: MatrixProduct) -> None:
        calls.append(1)
        if 3 <= len(calls) < 3 + times:
            raise torch.OutOfMemoryError("injected")
        own(self)

    monkeypatch.setattr(MatrixProduct, "add", scarce)
    if times == 2:
        with pytest.raises(Busy):
            there_and_back(early, tokens, first=True)
        assert early[2].accumulated == 0 and not early[2].stage.grad.any()
    there_and_back(early, tokens, first=times == 1)
    for one, other in zip(plain, early, strict=True):
        torch.testing.assert_close(one.stage.grad, other.stage.grad, rtol=0, atol=0 if times == 1 else 1e-6)


async def test_a_value_is_given_before_the_rest_and_nothing_comes_between() -> None:
    compute = ThreadCompute(Quiet())
    may_end = threading.Event()
    told = asyncio.Event()
    found = list[object]()

    def rest() -> str:
        assert may_end.wait(60)
        return "rest"

    def then(value: object) -> None:
        found.append(value)
        told.set()

    def work() -> GivenEarly[str]:
        return GivenEarly("answer", rest, then)

    try:
        value: str = await asyncio.wait_for(compute.run(Priority.BACKWARD, 1, work), 60)
        after = asyncio.ensure_future(compute.run(Priority.BACKWARD, 1, lambda: found.append("next")))
        assert value == "answer" and not found and not after.done()
        may_end.set()
        await asyncio.wait_for(asyncio.gather(told.wait(), after), 60)
        assert set(map(str, found)) == {"rest", "next"}
    finally:
        may_end.set()
        compute.close()

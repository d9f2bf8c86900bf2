"""Forwards whose gradient comes after the next step: the weights they use, and that nothing else changes."""

from collections import deque
from dataclasses import replace

import pytest
import torch

from swarmnode.base.ports import Tape, WireTensor
from swarmnode.model.memory_budget import CPU, TAPES, older_weights_nbytes
from swarmnode.model.stage import StageReplica
from swarmnode.model.tensor import decode, encode
from tests.support.tiny_model import TINY, manifest, stages_of


def made(prediction: str = "last_step") -> StageReplica:
    run = manifest(stages=3)
    run = replace(run, pipeline=replace(run.pipeline, weight_prediction=prediction))
    return stages_of(run, torch.float64)[1]


def drawn(seed: int) -> WireTensor:
    generator = torch.Generator().manual_seed(seed)
    return encode(torch.randn(4, TINY.context, TINY.width, dtype=torch.float64, generator=generator))


def train(stage: StageReplica, seed: int) -> None:
    _, tape = stage.forward(drawn(seed), keep=True)
    assert tape is not None
    stage.backward(tape, drawn(seed + 100), 4)
    stage.step(8)


def test_a_late_forward_and_its_backward_use_the_weights_one_step_on() -> None:
    stage = made()
    x = drawn(1)
    dy = drawn(2)
    train(stage, 3)
    stage.forward(x, keep=True, late=True)  # from now on the weights before each step are kept
    before = stage.theta.clone()
    train(stage, 4)
    now = stage.theta.clone()
    y, tape = stage.forward(x, keep=True, late=True)
    assert torch.equal(stage.theta, now)
    train(stage, 5)
    after = stage.theta.clone()
    given = stage.backward(tape, dy, 4) if tape is not None else None
    assert given is not None and torch.equal(stage.theta, after)
    found = stage.grad.clone()
    stage.discard()

    with stage.instead(2 * now - before):
        expected, tape = stage.forward(x, keep=True)
        assert tape is not None
        wanted = stage.backward(tape, dy, 4)
    assert wanted is not None
    torch.testing.assert_close(decode(y), decode(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(decode(given), decode(wanted), rtol=0, atol=1e-12)
    torch.testing.assert_close(found, stage.grad, rtol=0, atol=1e-12)
    del tape
    train(stage, 6)
    assert stage.held_nbytes <= stage.theta.nbytes, "besides the weights before the last step nothing is kept"


@pytest.mark.parametrize("why", ["off", "first", "loaded"])
def test_without_a_last_step_the_present_weights_are_used(why: str) -> None:
    stage = made("off" if why == "off" else "last_step")
    x = drawn(1)
    train(stage, 3)
    if why != "first":
        stage.forward(x, keep=True, late=True)
        train(stage, 4)
    if why == "loaded":
        stage.touched()
    y, tape = stage.forward(x, keep=True, late=True)
    assert tape is not None
    expected, _ = stage.forward(x, keep=False)
    assert torch.equal(decode(y), decode(expected))


def test_a_round_moves_the_prediction_with_the_weights() -> None:
    stage = made()
    x = drawn(1)
    train(stage, 3)
    stage.forward(x, keep=True, late=True)
    before = stage.theta.clone()
    train(stage, 4)
    step = stage.theta - before
    outer = torch.linspace(-0.01, 0.01, stage.parameters, dtype=torch.float64)
    for _ in range(2):  # rounds may follow each other without a step in between
        stage.stash.before_step(inner=False)
        stage.theta.data.add_(outer)
    y, tape = stage.forward(x, keep=True, late=True)
    assert tape is not None
    with stage.instead(before + 2 * step + 2 * outer):
        expected, _ = stage.forward(x, keep=False)
    torch.testing.assert_close(decode(y), decode(expected), rtol=0, atol=1e-12)
    assert stage.held_nbytes == 2 * stage.theta.nbytes, "the step and the prediction"


def test_validations_between_do_not_disturb_a_prediction_under_way() -> None:
    stage = made()
    x = drawn(1)
    dy = drawn(2)
    train(stage, 3)
    stage.forward(x, keep=True, late=True)
    train(stage, 4)
    y, tape = stage.forward(x, keep=True, late=True)
    assert tape is not None
    with stage.instead(torch.zeros_like(stage.theta)):
        stage.forward(x, keep=False)
    assert stage.backward(tape, dy, 4) is not None
    again, _ = stage.forward(x, keep=False)
    assert not torch.equal(decode(y), decode(again)), "the prediction differed from the present weights"


@pytest.mark.parametrize("prediction", ["off", "last_step"])
@pytest.mark.parametrize("inner_batch", [4, 8, 16])
def test_the_formula_counts_the_copies(prediction: str, inner_batch: int) -> None:
    """Four microbatches of four samples in flight: of each batch the forwards made before its last gradients are
    late."""
    run = manifest(stages=3)
    inner = replace(run.inner, microbatch=4, inner_batch=inner_batch)
    run = replace(run, inner=inner, pipeline=replace(run.pipeline, weight_prediction=prediction))
    stage = stages_of(run, torch.float32)[1]
    tapes = deque[Tape]()
    most = 0
    dy = encode(torch.full((4, TINY.context, TINY.width), 1e-3))
    for number in range(64):
        late = stage.accumulated + 4 * len(tapes) >= inner_batch
        _, tape = stage.forward(encode(decode(drawn(number)).float()), keep=True, late=late)
        assert tape is not None
        tapes.append(tape)
        del tape
        if len(tapes) == TAPES:
            stage.backward(tapes.popleft(), dy, 4)
            if stage.accumulated >= inner_batch:
                stage.step(8)
        most = max(most, stage.stash.nbytes)
    formula = older_weights_nbytes(run, stage.part, CPU)
    assert formula - 2 * stage.theta.nbytes <= most <= formula

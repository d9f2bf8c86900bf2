"""Forwards whose gradient comes after the next step: the weights they use, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from swarmnode.model.stage import StageReplica
from swarmnode.model.tensor import decode, encode
from swarmnode.ports import WireTensor
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
    stage, x, dy = made(), drawn(1), drawn(2)
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


@pytest.mark.parametrize("why", ["off", "first", "round", "loaded"])
def test_without_a_last_step_the_present_weights_are_used(why: str) -> None:
    stage, x = made("off" if why == "off" else "last_step"), drawn(1)
    train(stage, 3)
    if why != "first":
        stage.forward(x, keep=True, late=True)
        train(stage, 4)
    if why == "round":
        stage.stash.moved()
    if why == "loaded":
        stage.touched()
    y, tape = stage.forward(x, keep=True, late=True)
    assert tape is not None
    expected, _ = stage.forward(x, keep=False)
    assert torch.equal(decode(y), decode(expected))


def test_validations_between_do_not_disturb_a_prediction_under_way() -> None:
    stage, x, dy = made(), drawn(1), drawn(2)
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

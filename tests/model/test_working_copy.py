"""The working copy in half precision gives the gradients of autocast's own casts, at any distance of steps."""

from collections.abc import Callable

import pytest
import torch

from swarmnode.base.ports import WireTensor
from swarmnode.model.memory_budget import COPIES_MAX
from swarmnode.model.stage import StageReplica
from swarmnode.model.tensor import encode
from swarmnode.model.weight_stash import WorkingCopy
from swarmnode.run.manifest.recipe import PRESETS

RUN = PRESETS["tiny"]
SHAPE = (4, RUN.model.context, RUN.model.width)

Make = Callable[[bool], StageReplica]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """A first stage on the CPU with autocast, with a working copy as on an accelerator or without one."""

    def stage(copied: bool) -> StageReplica:
        with monkeypatch.context() as patch:
            patch.setattr(WorkingCopy, "possible", staticmethod(lambda device, autocast: copied))
            made = StageReplica(RUN, 0, autocast=True)
        assert isinstance(made.stash, WorkingCopy) == copied
        return made

    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this PyTorch adds no gradients of half precision to float32 ones")
    return stage


def tokens(seed: int) -> WireTensor:
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (4, RUN.model.context + 1), generator=chance).to(torch.uint16)
    return encode(ids)


def gradient(seed: int) -> WireTensor:
    return encode(torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16))


def life(stage: StageReplica, *, release: bool) -> list[torch.Tensor]:
    """Three microbatches whose gradients come a step late each."""
    told = []
    kept = []
    for i in range(4):
        y, tape = stage.forward(tokens(i), keep=True)
        assert tape is not None
        told.append(torch.frombuffer(y.data, dtype=torch.bfloat16).clone())
        if release:
            stage.release(tape)
        kept.append(tape)
        if i:
            stage.backward(kept.pop(0), gradient(i), 4)
            told.append(stage.grad.clone())
            stage.step(4 * i)
            told.append(stage.theta.clone())
    return told


@pytest.mark.parametrize("release", [False, True])
def test_gradients_and_steps_are_those_of_autocast(release: bool, make: Make) -> None:
    plain = make(False)
    copied = make(True)
    pairs = list(zip(life(plain, release=release), life(copied, release=release), strict=True))
    assert all(torch.equal(one, other) for one, other in pairs[:5]), "with no step in between to the bit"
    for one, other in pairs:  # autocast's stash rounds the norms' weights, too
        assert (other.float() - one.float()).norm() < 0.02 * one.float().norm()
    assert copied.recomputed == plain.recomputed == (3 if release else 0)


def test_a_version_lives_as_long_as_a_tape_needs_it(make: Make) -> None:
    stage = make(True)
    tapes = []
    for i in range(COPIES_MAX + 2):
        tapes.append(stage.forward(tokens(i), keep=True)[1])
        stage.theta.data.mul_(1.01)
        stage.stash.before_step()
    stage.forward(tokens(9), keep=False)
    held = stage.stash.nbytes
    assert held > 0 and held % COPIES_MAX == 0
    assert held // COPIES_MAX < 4 * stage.parameters, "half precision"
    tapes.clear()
    assert stage.stash.nbytes == 0


def test_weights_written_from_elsewhere_are_used_at_once(make: Make) -> None:
    stage = make(True)
    before, _ = stage.forward(tokens(0), keep=False)
    with stage.instead(torch.zeros_like(stage.theta)):
        zeros, _ = stage.forward(tokens(0), keep=False)
    after, _ = stage.forward(tokens(0), keep=False)
    assert before.data == after.data != zeros.data
    stage.theta.data.zero_()
    stage.touched()
    assert stage.forward(tokens(0), keep=False)[0].data == zeros.data

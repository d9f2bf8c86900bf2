"""Optimizer moments in 8 bits and in main memory: close to those in float32 on the device, and equal to them."""

from dataclasses import replace

import pytest
import torch

from swarmnode.model.moments import BLOCK, MomentSection, QuantisedMoments
from swarmnode.model.stage import StageReplica
from swarmnode.model.tensor import encode
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.recipe import PRESETS

pytestmark = pytest.mark.node  # some seconds

TINY = PRESETS["tiny"]
ADAMW = replace(TINY, inner=replace(TINY.inner, optimizer="adamw"))


def trained(run: Manifest, state: str, steps: int) -> tuple[StageReplica, list[float]]:
    """A whole tiny model after `steps` steps on a text that can be learned, and its losses in nats a token."""
    stage = StageReplica(run, 0, optimizer_state=state)
    losses = []
    chance = torch.Generator().manual_seed(0)
    for i in range(steps):
        starts = torch.randint(0, 64, (4, 1), generator=chance)
        ids = ((starts + 3 * torch.arange(run.model.context + 1)) % 64).to(torch.uint16)
        found = stage.loss(encode(ids), encode(ids), 4, train=True)
        losses.append(found.loss_sum / found.tokens)
        stage.step(4 * (i + 1))
    return stage, losses


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_is_small_beside_each_blocks_largest(signed: bool) -> None:
    values = torch.randn(10 * BLOCK + 7, generator=torch.Generator().manual_seed(1))
    values = values if signed else values.square()
    kept = QuantisedMoments(values.numel(), values, signed=signed)
    kept.write(0, values)
    found = kept.read(0, values.numel())
    blocks = torch.nn.functional.pad(values, (0, BLOCK - 7)).view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    assert float(((found - values).abs() / blocks[: values.numel()]).max()) < 0.01
    assert torch.equal(kept.read(3, 700), found[3:700])
    kept.zero_()
    assert not kept.read(0, values.numel()).any()


@pytest.mark.parametrize("run", [ADAMW, TINY])
def test_moments_in_main_memory_change_no_bit(run: Manifest) -> None:
    run = replace(run, pipeline=replace(run.pipeline, stages=1))
    (plain, _), (moved, _) = (trained(run, state, 10) for state in ("device", "host"))
    assert torch.equal(plain.theta, moved.theta)
    for name, section in moved.moments.items():
        wanted = plain.moments[name]
        assert len(section) == len(wanted)
        for first, last in section.spans():
            found = section.read(first, last)
            exact = wanted.read(first, last)
            assert found is not None and exact is not None and torch.equal(found, exact)


def test_frozen_parameters_have_no_moments() -> None:
    section = MomentSection([(0, None), (512, QuantisedMoments(256, torch.empty(0), signed=True))], 768)
    section.write(0, torch.ones(512))
    section.write(512, torch.ones(256))
    assert section.read(0, 512) is None
    found = section.read(512, 768)
    assert found is not None and torch.equal(found, torch.ones(256))
    assert [*section.spans()] == [(0, 512), (512, 768)]

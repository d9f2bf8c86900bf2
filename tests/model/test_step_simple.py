"""Stages with flat buffers against the simplest form of an inner step."""

import pytest
import torch

from swarmnode.model.decoder import Decoder
from swarmnode.model.step_simple import SimpleStage, inner_step
from tests.support.tiny_model import manifest, stages_of, token_batch, train_on


@pytest.mark.parametrize("stages", [1, 3])
def test_steps_of_a_pipeline_are_those_of_the_simplest_form(stages: int) -> None:
    """Three steps of two microbatches in float64; warm-up, decay of matrices, and clipping of some."""
    run = manifest(
        stages=stages, optimizer="adamw", learning_rate=3e-3, warmup_samples=16, decay_samples=160, clip_norm=1.7
    )
    real = stages_of(run, torch.float64)
    simple = []
    for stage in real:
        layers = Decoder(run.model, stage.part).to(torch.float64)
        layers.load_state_dict({name: value.clone() for name, value in stage.named(stage.theta).items()})
        simple.append(SimpleStage(layers, run.inner, stages))
    for step in range(3):
        batches = [token_batch(seed=2 * step + half) for half in (0, 1)]
        samples_total = 8 * (step + 1)
        loss = inner_step(simple, batches, samples_total)
        assert sum(train_on(real, tokens) for tokens in batches) / (8 * run.model.context) == pytest.approx(
            loss, abs=1e-6
        )
        for stage in real:
            stage.step(samples_total)
    for stage, other in zip(real, simple, strict=True):
        weights = dict(other.layers.named_parameters())
        for name, value in stage.named(stage.theta).items():
            torch.testing.assert_close(value, weights[name].detach(), rtol=0, atol=1e-6, msg=name)

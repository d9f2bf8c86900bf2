"""What `swarmnode init` writes for a size of model and a fleet: valid, with a source, and what is known to be good."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.base.errors import UsageError
from swarmnode.model.split import split
from swarmnode.run.manifest import Manifest, PipelineSpec, parse
from swarmnode.run.manifest.recipe import PRESETS, fit, model_of, parameters_of
from swarmnode.run.manifest.text import brief, value_of


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_parameters_are_those_of_the_model(name):
    model = PRESETS[name].model
    assert parameters_of(model) == split(model, 1)[0].parameters


def test_the_demo_gets_what_was_measured_on_it():
    start = PRESETS["demo"]
    inner = fit(start, samples=7_500).manifest.inner
    assert inner.muon_learning_rate == pytest.approx(3e-3, rel=0.05)
    adamw = fit(replace(start, inner=replace(start.inner, optimizer="adamw")), samples=7_500).manifest.inner
    assert adamw.learning_rate == pytest.approx(1.4e-3, rel=0.05)
    assert inner.inner_batch in (8, 16) and inner.microbatch == 8
    assert 400 <= inner.warmup_samples <= 750 and inner.decay_samples == 7_500


def test_a_short_run_meets_more_often():
    """Rounds of a long run would leave it two or three."""
    start = PRESETS["demo"]
    short, long = (fit(start, samples=samples).manifest for samples in (160, 100_000))
    assert short.gossip.round_samples <= 2 * short.inner.inner_batch
    assert long.gossip.round_samples == 8 * long.inner.inner_batch


@pytest.mark.parametrize(("parameters", "rate"), [(125_000_000, 6e-4), (7_000_000_000, 3e-4)])
def test_large_models_get_the_published_rates(parameters, rate):
    small = PRESETS["small"]
    found = fit(replace(small, inner=replace(small.inner, optimizer="adamw")), parameters=parameters).manifest
    assert found.inner.learning_rate == pytest.approx(rate, rel=0.1)
    assert parameters_of(found.model) == pytest.approx(parameters, rel=0.1)


@pytest.mark.node
@given(st.sampled_from(sorted(PRESETS)), st.integers(10**6, 10**11), st.integers(100, 10**10), st.integers(1, 8))
@settings(max_examples=20, deadline=None)
def test_a_fitted_recipe_is_a_manifest_and_says_from_where(preset, parameters, samples, stages):
    start = replace(PRESETS[preset], pipeline=PipelineSpec(stages=stages))
    start = replace(start, model=replace(start.model, layers=max(stages, start.model.layers)))
    made = fit(start, parameters=parameters, samples=samples)
    text = brief(made.manifest, made.origins)
    assert parse(text, "fitted") == made.manifest
    assert max(map(len, text.splitlines())) <= 120
    changed = {name for name in BY_VALUE if value_of(made.manifest, name) != value_of(start, name)}
    assert changed <= made.origins.keys()
    words = " ".join(text.replace("\n#", "").split())
    plain = Manifest()
    shown = {name for name in changed if value_of(made.manifest, name) != value_of(plain, name)}
    assert all(f"Here: {made.origins[name]}." in words for name in shown)


BY_VALUE = [
    *(f"model.{key}" for key in ("layers", "width", "heads", "kv_heads", "ffn", "context", "vocabulary")),
    *(f"inner.{key}" for key in ("learning_rate", "muon_learning_rate", "warmup_samples", "decay", "decay_samples")),
    *(f"inner.{key}" for key in ("cooldown_samples", "microbatch", "inner_batch")),
    *("gossip.round_samples", "data.block_samples"),
]


@given(st.integers(100, 10**9))
@settings(max_examples=20, deadline=None)
def test_more_samples_allow_a_larger_batch(samples):
    first, longer = (
        fit(PRESETS["small"], samples=count).manifest.inner.inner_batch for count in (samples, 4 * samples)
    )
    assert first <= longer


@pytest.mark.parametrize("parameters", [1, 1000, 10**12])
def test_a_model_that_cannot_be_made_is_refused(parameters):
    with pytest.raises(UsageError, match=f"--parameters {parameters}: the nearest model"):
        model_of(parameters, Manifest().model, 3)

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.model.optimizer import learning_rate
from swarmnode.run.manifest import InnerSpec

COSINE = InnerSpec(learning_rate=1.0, warmup_samples=100, decay_samples=1100, learning_rate_min_ratio=0.1)


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("cosine", {0: 0.0, 1: 0.01, 50: 0.5, 100: 1.0, 350: 0.8681981, 600: 0.55, 1100: 0.1, 10**12: 0.1}),
        ("constant", {0: 0.0, 25: 0.25, 100: 1.0, 10**9: 1.0}),
        ("linear", {50: 0.5, 100: 1.0, 350: 0.775, 600: 0.55, 1099: 0.1009, 1100: 0.1, 10**12: 0.1}),
        ("wsd", {50: 0.5, 100: 1.0, 700: 1.0, 800: 0.55, 1000: 0.22057713659, 1100: 0.1, 10**12: 0.1}),
    ],
)
def test_the_rate_rises_in_warmup_then_falls_as_its_decay_says(decay, rates):
    inner = replace(COSINE, decay=decay, cooldown_samples=400 if decay == "wsd" else COSINE.cooldown_samples)
    assert {samples: learning_rate(inner, samples) for samples in rates} == pytest.approx(rates, abs=1e-7)


@given(
    st.sampled_from(["constant", "cosine", "linear", "wsd"]),
    st.integers(0, 1000),
    st.integers(1, 1000),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.integers(0, 3000),
)
def test_after_warmup_the_rate_never_rises_and_stays_within_its_bounds(decay, warmup, after, share, ratio, samples):
    inner = InnerSpec(
        learning_rate=1.0,
        warmup_samples=warmup,
        decay=decay,
        decay_samples=warmup + after,
        cooldown_samples=max(1, int(share * after)),
        learning_rate_min_ratio=ratio,
    )
    now = learning_rate(inner, samples)
    then = learning_rate(inner, samples + 1)
    if samples < warmup:
        assert 0.0 <= now < 1.0 and then > now
        return
    assert ratio - 1e-12 <= then <= now + 1e-12 <= 1.0 + 2e-12
    assert learning_rate(inner, warmup) == 1.0
    assert learning_rate(inner, warmup + after) == (1.0 if decay == "constant" else ratio)


def test_no_warmup_and_a_decay_that_ends_within_it():
    assert learning_rate(InnerSpec(learning_rate=0.5, warmup_samples=0, decay="constant"), 0) == 0.5
    inner = InnerSpec(learning_rate=1.0, warmup_samples=100, decay_samples=50, learning_rate_min_ratio=0.25)
    assert [learning_rate(inner, samples) for samples in (99, 100)] == [0.99, 0.25]

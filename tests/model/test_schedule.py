import pytest

from swarmnode.manifest import InnerSpec
from swarmnode.model.schedule import learning_rate

COSINE = InnerSpec(learning_rate=1.0, warmup_samples=100, decay_samples=1100, learning_rate_min_ratio=0.1)


@pytest.mark.parametrize(
    ("samples", "rate"),
    [(0, 0.0), (1, 0.01), (50, 0.5), (100, 1.0), (350, 0.8681981), (600, 0.55), (1100, 0.1), (10**12, 0.1)],
)
def test_warmup_then_cosine(samples, rate):
    assert learning_rate(COSINE, samples) == pytest.approx(rate, abs=1e-7)


@pytest.mark.parametrize(("samples", "rate"), [(0, 0.0), (25, 0.25), (100, 1.0), (10**9, 1.0)])
def test_warmup_then_constant(samples, rate):
    inner = InnerSpec(learning_rate=1.0, warmup_samples=100, decay="constant")
    assert learning_rate(inner, samples) == rate


def test_no_warmup_and_a_decay_that_ends_within_it():
    assert learning_rate(InnerSpec(learning_rate=0.5, warmup_samples=0, decay="constant"), 0) == 0.5
    inner = InnerSpec(learning_rate=1.0, warmup_samples=100, decay_samples=50, learning_rate_min_ratio=0.25)
    assert [learning_rate(inner, samples) for samples in (99, 100)] == [0.99, 0.25]

"""The learning rate, by the run's total samples: the same for every node, whatever its own step counter says."""

from __future__ import annotations

import math

from swarmnode.manifest import InnerSpec


def learning_rate(inner: InnerSpec, samples_total: int) -> float:
    """Linear from 0 over `warmup_samples`; then constant, or half a cosine that reaches
    `learning_rate · learning_rate_min_ratio` at `decay_samples` and stays there. `samples_total` counts from 0."""
    peak = inner.learning_rate
    if samples_total < inner.warmup_samples:
        return peak * max(samples_total, 0) / inner.warmup_samples
    if inner.decay == "constant":
        return peak
    assert inner.decay == "cosine", f"inner.decay = {inner.decay!r} passed the manifest's checks"
    floor = peak * inner.learning_rate_min_ratio
    if samples_total >= inner.decay_samples:
        return floor
    progress = (samples_total - inner.warmup_samples) / (inner.decay_samples - inner.warmup_samples)
    return floor + (peak - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))

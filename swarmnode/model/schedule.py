"""Learning rate and inner batch by the run's total samples: equal for all nodes, whatever their own steps."""

from __future__ import annotations

import math

from swarmnode.manifest import InnerSpec, Manifest


def learning_rate(inner: InnerSpec, samples_total: int) -> float:
    """The rate of an inner step after `samples_total` samples of the whole run, counted from 0.

    It rises linearly from 0 over `warmup_samples`. Then `decay` determines the fall from the peak to `learning_rate ·
    learning_rate_min_ratio`, where it stays from `decay_samples` on.
    """
    peak = inner.learning_rate
    if samples_total < inner.warmup_samples:
        return peak * max(samples_total, 0) / inner.warmup_samples
    if inner.decay == "constant":
        return peak
    floor = peak * inner.learning_rate_min_ratio
    if samples_total >= inner.decay_samples:
        return floor
    return peak - (peak - floor) * _fallen(inner, samples_total)


def _fallen(inner: InnerSpec, samples_total: int) -> float:
    """The share of the fall from the peak that is done after `samples_total`, between warm-up and `decay_samples`, 0 to
    1."""
    progress = (samples_total - inner.warmup_samples) / (inner.decay_samples - inner.warmup_samples)
    match inner.decay:
        case "cosine":  # SGDR, arXiv 1608.03983, eq. 5
            return 0.5 * (1.0 - math.cos(math.pi * progress))
        case "linear":  # to zero: D2Z, arXiv 2502.15938, section 2
            return progress
        case "wsd":  # warm-up, stable, decay: MiniCPM, arXiv 2404.06395, section 4; its shape: arXiv 2405.18392, eq. 1
            left = inner.decay_samples - samples_total
            return 0.0 if left >= inner.cooldown_samples else math.sqrt(1.0 - left / inner.cooldown_samples)
        case unknown:
            raise AssertionError(f"inner.decay = {unknown!r} passed the manifest's checks")


def inner_batch(inner: InnerSpec, samples_total: int) -> int:
    """Samples that the replicas of a stage average together between two inner steps, after `samples_total` samples of
    the whole run.

    This is `inner_batch`. With an `inner_batch_end` it grows as the square root of the samples where that is more, in
    whole microbatches, up to `inner_batch_end` from `decay_samples` on. The critical batch size, above which larger
    batches waste samples, grows as samples^0.47 at any size of model (arXiv 2410.21676, section 4).
    """
    if inner.inner_batch_end == 0:
        return inner.inner_batch
    share = min(max(samples_total, 0) / inner.decay_samples, 1.0)
    microbatches = int(inner.inner_batch_end // inner.microbatch * math.sqrt(share))
    return max(inner.inner_batch, microbatches * inner.microbatch)


ROWS_EXPONENT = (
    0.75  # measured: docs/learning.md; rows met every second, fourth, eighth round: 2, 3 and 4 times the rate
)


def rate_of_rows(manifest: Manifest, round_index: int, rounds: int) -> float:
    """AdamW's rate of the step in round `round_index` that each matrix's rows take in turn, for the gradients of
    `rounds` rounds. With more samples than inner_batch it grows by the root of their ratio, as an inner step's does
    (arXiv 2205.10287, section 4)."""
    inner, gossip = manifest.inner, manifest.gossip
    total = round_index * gossip.round_samples
    more = max(1.0, rounds * gossip.round_samples / inner_batch(inner, total))
    return learning_rate(inner, total) * float(gossip.fragments**ROWS_EXPONENT) * math.sqrt(more)

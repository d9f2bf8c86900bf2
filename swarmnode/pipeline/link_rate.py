"""A machine's usable speed under a volunteer's limits: its own speed, or less if the limited link carries less."""

from __future__ import annotations

import math

from swarmnode.manifest import Manifest, boundary_nbytes, boundary_width
from swarmnode.wire import record_pb2

LABEL_NBYTES = 2  # of a token, for vocabularies up to 65,536


def sample_nbytes(manifest: Manifest, stage: int) -> tuple[int, int]:
    """Bytes that a replica of `stage` sends and receives per sample, for microbatches only.

    Activations and tokens go to the next stage and the gradient comes back; the same happens between the previous stage
    and this one. Rounds add a few per cent.
    """
    context = manifest.model.context
    state = boundary_nbytes(manifest.pipeline.boundary, context, boundary_width(manifest))
    labels = LABEL_NBYTES * (context + 1)
    before, after = int(stage > 0), int(stage < manifest.pipeline.stages - 1)
    return after * (state + labels) + before * state, before * (state + labels) + after * state


def link_samples_per_s(manifest: Manifest, stage: int, up_bps: float, down_bps: float) -> float:
    """Samples per second that a link of these bit rates carries for a replica of `stage`; inf with a single stage. 0
    means no limit in that direction."""
    rates = [
        bps / (8.0 * nbytes)
        for bps, nbytes in zip((up_bps, down_bps), sample_nbytes(manifest, stage), strict=True)
        if bps and nbytes
    ]
    return min(rates, default=math.inf)


def allowed_samples_per_s(
    manifest: Manifest, stage: int, speed: float, allowance: record_pb2.Allowance | None
) -> float:
    """`speed` (samples per second) as limited by the link: the rate that others should expect and balance by."""
    if allowance is None:
        return speed
    return min(speed, link_samples_per_s(manifest, stage, allowance.up_bps, allowance.down_bps))

"""What a volunteer's limits leave of a machine's speed: what the link lets through, where that is less."""

from __future__ import annotations

import math

from swarmnode.manifest import Manifest, boundary_nbytes, boundary_width
from swarmnode.wire import record_pb2

LABEL_NBYTES = 2  # of a token, where the vocabulary has at most 65,536


def sample_nbytes(manifest: Manifest, stage: int) -> tuple[int, int]:
    """Bytes that a replica of `stage` sends and receives for one sample, microbatches alone.

    Activations with their tokens go on to the next stage and the gradient comes back; the stage before does the same
    with us. What rounds cost comes on top: a few per cent.
    """
    context = manifest.model.context
    state = boundary_nbytes(manifest.pipeline.boundary, context, boundary_width(manifest))
    labels = LABEL_NBYTES * (context + 1)
    before, after = int(stage > 0), int(stage < manifest.pipeline.stages - 1)
    return after * (state + labels) + before * state, before * (state + labels) + after * state


def link_samples_per_s(manifest: Manifest, stage: int, up_bps: float, down_bps: float) -> float:
    """Samples a second that a link of so many bits a second carries for a replica of `stage`; inf in a single stage.

    0 bits a second mean that this direction is not limited.
    """
    rates = [
        bps / (8.0 * nbytes)
        for bps, nbytes in zip((up_bps, down_bps), sample_nbytes(manifest, stage), strict=True)
        if bps and nbytes
    ]
    return min(rates, default=math.inf)


def allowed_samples_per_s(
    manifest: Manifest, stage: int, speed: float, allowance: record_pb2.Allowance | None
) -> float:
    """`speed` (samples a second) as far as the limits let it through: what others should expect, and balance by."""
    if allowance is None:
        return speed
    return min(speed, link_samples_per_s(manifest, stage, allowance.up_bps, allowance.down_bps))

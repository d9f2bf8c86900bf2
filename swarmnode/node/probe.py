"""How fast this machine is on its stage: one microbatch of zeros, forward only."""

from __future__ import annotations

from swarmnode.manifest import Manifest
from swarmnode.ports import Replica, WireTensor

BOUNDARY_DTYPE = {"bf16": ("bf16", 2), "fp32": ("f32", 4)}


def forward(replica: Replica, manifest: Manifest, stage: int) -> None:
    """Do one forward of a full microbatch; the caller takes the time. Trains nothing."""
    model, batch = manifest.model, manifest.inner.microbatch
    tokens = WireTensor("u16", (batch, model.context + 1), bytes(2 * batch * (model.context + 1)))
    dtype, itemsize = BOUNDARY_DTYPE[manifest.pipeline.boundary]
    shape = (batch, model.context, model.width)
    x = tokens if stage == 0 else WireTensor(dtype, shape, bytes(itemsize * batch * model.context * model.width))
    if stage == manifest.pipeline.stages - 1:
        replica.loss(x, tokens, batch, train=False)
    else:
        replica.forward(x, keep=False)

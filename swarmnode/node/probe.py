"""How fast this machine is on its stage: one microbatch of zeros, forward only."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

from swarmnode.manifest import Manifest, boundary_nbytes, boundary_width
from swarmnode.node.presence import Presence
from swarmnode.ports import Compute, Priority, Replica, Telemetry, WireTensor

BOUNDARY_DTYPE = {"bf16": "bf16", "subspace": "bf16"}  # f32 for the others, coded or not
PROBES = 4  # the first forward is slower, others may be disturbed: the fastest counts
ENOUGH_S = 5.0  # guess: in forwards that take so long together, what disturbs the first drowns


class Probing(Protocol):
    """Makes a replica do one microbatch forward on made-up data, to be timed."""

    def __call__(self, replica: Replica, manifest: Manifest, stage: int) -> None: ...


async def probing(
    replica: Replica, manifest: Manifest, stage: int, probe: Probing, compute: Compute, telemetry: Telemetry
) -> float:
    """Samples per second of this machine on its stage: forward, and backward at about twice its cost."""
    loop = asyncio.get_running_loop()
    batch = manifest.inner.microbatch
    seconds, started = float("inf"), loop.time()
    for _ in range(PROBES):
        begun = loop.time()
        await compute.run(Priority.OUTER, batch, partial(probe, replica, manifest, stage))
        seconds = min(seconds, loop.time() - begun)
        if loop.time() - started >= ENOUGH_S:
            break
    rate = batch / max(1e-6, 3.0 * seconds)
    telemetry.event("node.probe", samples_per_second=round(rate, 2))
    return rate


async def telling(
    replica: Replica,
    manifest: Manifest,
    stage: int,
    probe: Probing,
    compute: Compute,
    telemetry: Telemetry,
    presence: Presence,
) -> float:
    """`probing`, told to others as soon as it is known: the state may still be on its way."""
    speed = await probing(replica, manifest, stage, probe, compute, telemetry)
    presence.self.speed = lambda: speed
    presence.changed()
    return speed


def forward(replica: Replica, manifest: Manifest, stage: int) -> None:
    """Do one forward of a full microbatch; the caller takes the time. Trains nothing."""
    model, batch = manifest.model, manifest.inner.microbatch
    tokens = WireTensor("u16", (batch, model.context + 1), bytes(2 * batch * (model.context + 1)))
    kind, shape = manifest.pipeline.boundary, (batch, model.context, boundary_width(manifest))
    blank = bytes(boundary_nbytes(kind, batch * model.context, shape[2]))  # zeros in every code
    codec = kind if kind in ("int8", "fp8") else "raw"
    x = tokens if stage == 0 else WireTensor(BOUNDARY_DTYPE.get(kind, "f32"), shape, blank, codec)
    if stage == manifest.pipeline.stages - 1:
        replica.loss(x, tokens, batch, train=False)
    else:
        replica.forward(x, keep=False, tokens=tokens)

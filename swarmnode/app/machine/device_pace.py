"""Microbatches take as long as on a device of a stated speed, so that a few processors show what many cards would do.

Only microbatches are paced: their arithmetic is counted, and it is nearly all that a device does. An inner step is part
of the microbatch that completes it. Outer steps and packets take what they take here.
"""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.app.machine.compute import Pace
from swarmnode.base.ports import Priority
from swarmnode.model.split import stages_of
from swarmnode.run.manifest import Manifest
from swarmnode.train.pipeline.hop import FORWARD_SHARE


def device_pace(manifest: Manifest, flops: float, stage: Callable[[], int | None]) -> Pace:
    """The pace of a device of `flops` FLOP/s that serves the stage `stage()`: a sample's forward and backward take
    three times its forward's arithmetic. The last stage does both in one piece; a probe is a forward."""
    costs = [part.cost for part in stages_of(manifest)]  # forward FLOPs a token

    def seconds(priority: Priority, samples: int) -> float:
        served = stage()
        if not samples or served is None or served >= len(costs):
            return 0.0
        share = FORWARD_SHARE
        if priority is Priority.BACKWARD:
            share = 1.0 if served == len(costs) - 1 else 1.0 - FORWARD_SHARE
        return samples * share * 3.0 * costs[served] * manifest.model.context / flops

    return seconds

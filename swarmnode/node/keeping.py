"""The snapshot of the next stage that a node keeps."""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.ids import RunId
from swarmnode.manifest import Manifest
from swarmnode.membership.swarm import Swarm
from swarmnode.ports import Replica, Telemetry, Transport
from swarmnode.recovery.keeper import Keeper


def keeper_of(
    manifest: Manifest,
    run_id: RunId,
    stage: int,
    line: Transport,
    swarm: Callable[[], Swarm],
    samples_total: Callable[[], int],
    telemetry: Telemetry,
    replica: Replica,
) -> Keeper:
    """The keeper of a node that serves `stage` with `replica`."""
    next_stage = (stage + 1) % manifest.pipeline.stages
    return Keeper(
        manifest,
        run_id,
        stage,
        line,
        swarm,
        lambda: samples_total() // manifest.gossip.round_samples,
        telemetry,
        sizes=replica.sizes_of(next_stage),
        ends=replica.ends_of(next_stage),
    )

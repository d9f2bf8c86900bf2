"""What a node keeps of the stage after its own (recovery/keeper.py), and what it believes of it."""

from __future__ import annotations

from swarmnode.ids import RunId
from swarmnode.manifest import Manifest
from swarmnode.node.presence import Presence
from swarmnode.ports import Replica, Telemetry, Transport
from swarmnode.recovery.keeper import Keeper


def keeper_of(
    manifest: Manifest,
    run_id: RunId,
    stage: int,
    line: Transport,
    presence: Presence,
    telemetry: Telemetry,
    replica: Replica,
) -> Keeper:
    """The keeper of a node that serves `stage` with `replica`; its snapshot is announced from now on."""
    next_stage, beliefs = (stage + 1) % manifest.pipeline.stages, presence.beliefs
    keeper = Keeper(
        manifest,
        run_id,
        stage,
        line,
        presence.book.swarm,
        lambda: presence.progress.total // manifest.gossip.round_samples,
        telemetry,
        sizes=replica.sizes_of(next_stage),
        ends=replica.ends_of(next_stage),
        apart=replica.apart,
        rounds_max=lambda: beliefs.rounds_max,
        seen=lambda peer: peer in beliefs.clock.observed.times,
    )
    presence.self.kept = lambda: keeper.snapshot
    return keeper

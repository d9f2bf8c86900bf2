"""The parts of a served stage, each built from the node's context and the stage's replica."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from swarmnode.gossip.exchange import Gossip
from swarmnode.node.audit_setup import AuditSetup
from swarmnode.node.checkpointer import Checkpointer
from swarmnode.node.node_context import NodeContext
from swarmnode.node.snapshot_source import copy_replica, make_archive_donor
from swarmnode.node.stage_join import JoinedStage
from swarmnode.pipeline.backlog import Backlog
from swarmnode.pipeline.hop import Hop
from swarmnode.pipeline.next_hop import NextHop
from swarmnode.ports import Priority, Replica, Store
from swarmnode.recovery.archive_donor import StageDonor
from swarmnode.recovery.donor import SnapshotDonor
from swarmnode.recovery.neighbour_backup import NeighbourBackup
from swarmnode.wire import record_pb2


def make_hop(
    context: NodeContext,
    stage: int,
    replica: Replica,
    next_hop: NextHop,
    backlog: Backlog,
    audit: AuditSetup,
    replicas: Callable[[], int],
) -> Hop:
    """The part that serves microbatches on `replica`, one of `replicas` of its stage."""
    presence, observed = context.presence, context.presence.run_progress.clock.observed
    return Hop(
        context.manifest,
        stage,
        context.me,
        replica,
        context.ports.compute,
        next_hop,
        backlog,
        presence.samples_total,
        context.telemetry,
        replicas=replicas,
        recompute=audit.recompute,
        auditor=audit.auditor,
        input_auditor=audit.input_auditor,
        accusations=audit.accusations,
        worked=observed.worked,
        asked=observed.asked,
    )


def make_gossip(context: NodeContext, joined: JoinedStage, samples_here: Callable[[], int]) -> Gossip:
    """The part that runs the outer rounds of the replica; `samples_here` were trained here since it was joined."""
    presence = context.presence
    return Gossip(
        context.manifest,
        context.run_id,
        joined.stage,
        context.transport,
        joined.replica,
        context.ports.compute,
        presence.peer_table.swarm,
        presence.samples_total,
        samples_here,
        context.telemetry,
        identity=context.ports.identity,
        done=joined.restored.round,
        newcomer=joined.restored.newcomer,
        packet_taken=presence.run_progress.clock.observed.worked,
    )


def make_donor(context: NodeContext, joined: JoinedStage, gossip: Gossip, backup: NeighbourBackup) -> StageDonor:
    """The part that gives state to others: of the replica, what this node received itself, and what `backup` keeps."""
    stage, replica = joined.stage, joined.replica
    joiners = SnapshotDonor(
        context.run_id,
        stage,
        partial(copy_replica, context, stage, replica, gossip),
        # Behind other work a busy replica would never hash, and it needs the joiner that waits.
        partial(context.ports.compute.run, Priority.OUTER, 0),
        context.telemetry,
        limits=context.ports.donating,
        kept=backup.kept,
        received=joined.restored.snapshot,
    )
    archive = make_archive_donor(context, stage, replica, gossip)
    return StageDonor(joiners, archive, context.caller_check.archives)


def make_checkpointer(
    context: NodeContext,
    store: Store,
    stage: int,
    replica: Replica,
    gossip: Gossip,
    finished_blocks: Callable[[], record_pb2.Blocks],
) -> Checkpointer:
    """The part that saves `replica` of `stage` in `store` when a checkpoint is due."""
    return Checkpointer(
        context.manifest,
        context.run_id,
        context.me,
        context.ports.saving,
        store,
        context.ports.compute,
        context.presence.peer_table.swarm,
        context.telemetry,
        stage=stage,
        replica=replica,
        gossip=gossip,
        progress=context.presence.progress,
        finished_blocks=finished_blocks,
    )

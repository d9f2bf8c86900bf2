"""Copies of the replica for nodes that download its state, labelled with the round behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from swarmnode.errors import Unavailable
from swarmnode.gossip.exchange import Gossip
from swarmnode.membership.swarm import StageContext
from swarmnode.node.node_ports import NodeContext
from swarmnode.parted_work import Parts
from swarmnode.ports import Priority, State
from swarmnode.transfer.donor import DonorLimits, SnapshotDonor, StageDonor
from swarmnode.transfer.snapshot import WHOLE, Snapshot, StateSlice
from swarmnode.wire import record_pb2

GIVING = (record_pb2.NODE_STATE_TRAINING, record_pb2.NODE_STATE_DRAINING)


def make_donor(
    context: NodeContext,
    here: StageContext,
    gossip: Gossip,
    received: Snapshot | None,
    kept: Callable[[int], Snapshot | None],
) -> StageDonor:
    """The part that gives state to others: of the replica, what this node `received` itself, and what is `kept` of
    other stages. Archives get copies of the slow weights, which are hashed beside the compute thread where possible."""
    ports, given = context.ports, (here.run_id, here.stage)
    # Behind other work a busy replica would never hash, and it needs the joiner that waits.
    run = partial(here.compute.run, Priority.OUTER, 0)
    take, limits = partial(copy_replica, context, here, gossip), ports.donating
    joiners = SnapshotDonor(*given, take, run, here.telemetry, limits, kept, received)

    async def slow(cut: StateSlice) -> Snapshot:
        while True:
            check_gives(context)
            done, progress = gossip.done, context.presence.progress.to_wire()
            state = await run(partial(here.replica.snapshot_in_parts, packed=True, only=cut.sections))
            if gossip.done == done:
                return Snapshot.of(state, here.stage, done, progress, limits.chunk_nbytes)

    # Archives get one of two places: a donor reserves one for peers that cannot work without the state.
    archive = SnapshotDonor(*given, slow, ports.hashing or run, here.telemetry, DonorLimits(downloads_max=2))
    return StageDonor(here.stage, joiners, archive, context.caller_check.archives, ports.archiving)


async def copy_replica(context: NodeContext, here: StageContext, gossip: Gossip, cut: StateSlice) -> Snapshot:
    """An immutable copy of the replica, hashed when all of it or whole sections are wanted. Raises Unavailable while
    this node has no state to give, RemoteFault for a `cut` that it does not have."""
    check_gives(context)
    replica, stage = here.replica, here.stage
    cut.sizes(replica.sizes_of(stage))  # raises RemoteFault, before anything is copied
    run, size = partial(here.compute.run, Priority.OUTER, 0), context.ports.donating.chunk_nbytes
    at_once = cut.first == 0 and cut.count is None
    while True:
        done, progress, snapshots = gossip.done, context.presence.progress.to_wire(), list[Snapshot]()

        def keep(state: State) -> None:
            snapshots.append(Snapshot.of(state, stage, done, progress, size))  # noqa: B023

        def hashed() -> None:
            (snapshots[0] if cut == WHOLE else snapshots[0].part(cut)).manifest()  # noqa: B023

        def in_parts(parts: Parts[State]) -> Parts[None]:
            keep((yield from parts))
            if at_once:
                yield hashed

        def copy() -> Parts[None] | None:
            given = replica.snapshot_in_parts(packed=True)
            if not isinstance(given, State):
                return in_parts(given)
            keep(given)
            return None

        copied = run(copy)
        # Queued with the copy: asked for later it would wait for the next microbatch (simulated: half a minute).
        await asyncio.gather(copied, *([run(hashed)] if at_once else []))
        if gossip.done == done:  # else an outer step came in between, and its round would be the wrong label
            return snapshots[0]


def check_gives(context: NodeContext) -> None:
    """Raises Unavailable while this node has no state to give."""
    if context.presence.status.state not in GIVING:
        raise Unavailable("this node has no state to give")

"""Copies of the replica for nodes that download its state, labelled with the round behind them."""

from __future__ import annotations

import asyncio
from functools import partial

from swarmnode.errors import Unavailable
from swarmnode.gossip.exchange import Gossip
from swarmnode.node.node_ports import NodeContext
from swarmnode.parted_work import Parts
from swarmnode.ports import Priority, Replica, State
from swarmnode.transfer.donor import SnapshotDonor, StageDonor
from swarmnode.transfer.snapshot import WHOLE, Snapshot, StateSlice
from swarmnode.wire import record_pb2

GIVING = (record_pb2.NODE_STATE_TRAINING, record_pb2.NODE_STATE_DRAINING)


async def copy_replica(context: NodeContext, stage: int, replica: Replica, gossip: Gossip, cut: StateSlice) -> Snapshot:
    """An immutable copy of the replica of `stage`, hashed when all of it or whole sections are wanted. Raises
    Unavailable while this node has no state to give, RemoteFault for a `cut` that it does not have."""
    check_gives(context)
    cut.sizes(replica.sizes_of(stage))  # raises RemoteFault, before anything is copied
    run, size = partial(context.ports.compute.run, Priority.OUTER, 0), context.ports.donating.chunk_nbytes
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


def make_stage_donor(
    context: NodeContext, stage: int, replica: Replica, gossip: Gossip, joiners: SnapshotDonor
) -> StageDonor:
    """The part that gives state to `joiners` and copies of the slow weights to archives; these are hashed beside the
    compute thread where possible."""
    ports = context.ports

    async def take() -> Snapshot:
        while True:
            check_gives(context)
            done, progress = gossip.done, context.presence.progress.to_wire()
            copy = partial(replica.snapshot_in_parts, packed=True, only=("phi",))
            state = await ports.compute.run(Priority.OUTER, 0, copy)
            if gossip.done == done:
                return Snapshot.of(state, stage, done, progress, ports.donating.chunk_nbytes)

    hashing = ports.hashing or partial(ports.compute.run, Priority.OUTER, 0)
    archives = context.caller_check.archives
    return StageDonor(context.run_id, stage, joiners, archives, take, hashing, context.telemetry, ports.archiving)


def check_gives(context: NodeContext) -> None:
    """Raises Unavailable while this node has no state to give."""
    if context.presence.status.state not in GIVING:
        raise Unavailable("this node has no state to give")

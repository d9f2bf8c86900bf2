"""Copies of the replica for nodes that download its state, labelled with the round behind them."""

from __future__ import annotations

import asyncio
from functools import partial

from swarmnode.errors import Unavailable
from swarmnode.gossip.exchange import Gossip
from swarmnode.node.node_context import NodeContext
from swarmnode.ports import Priority, Replica
from swarmnode.recovery.archive_donor import ArchiveDonor
from swarmnode.recovery.snapshot import WHOLE, Snapshot, StateSlice
from swarmnode.wire import record_pb2

GIVING = (record_pb2.NODE_STATE_TRAINING, record_pb2.NODE_STATE_DRAINING)


async def copy_replica(context: NodeContext, stage: int, replica: Replica, gossip: Gossip, cut: StateSlice) -> Snapshot:
    """An immutable copy of the replica of `stage`, hashed when the whole of it is wanted. Raises Unavailable while this
    node has no state to give."""
    check_gives(context)
    run, size = partial(context.ports.compute.run, Priority.OUTER, 0), context.ports.donating.chunk_nbytes
    while True:
        done, progress, made = gossip.done, context.presence.progress.to_wire(), list[Snapshot]()
        copied = run(lambda: made.append(Snapshot.of(replica.snapshot(packed=True), stage, done, progress, size)))  # noqa: B023
        # Queued with the copy: asked for later it would wait for the next microbatch (simulated: half a minute).
        hashed = [run(lambda: made[0].manifest())] if cut == WHOLE else []  # noqa: B023, PLW0108  not there yet
        await asyncio.gather(copied, *hashed)
        if gossip.done == done:  # else an outer step came in between, and its round would be the wrong label
            return made[0]


def make_archive_donor(context: NodeContext, stage: int, replica: Replica, gossip: Gossip) -> ArchiveDonor:
    """The part that gives copies of the slow weights to archives; hashed beside the compute thread where possible."""
    ports = context.ports

    async def take() -> Snapshot:
        while True:
            check_gives(context)
            done, progress = gossip.done, context.presence.progress.to_wire()
            state = await ports.compute.run(Priority.OUTER, 0, lambda: replica.snapshot(packed=True, only=("phi",)))
            if gossip.done == done:
                return Snapshot.of(state, stage, done, progress, ports.donating.chunk_nbytes)

    hashing = ports.hashing or partial(ports.compute.run, Priority.OUTER, 0)
    return ArchiveDonor(context.run_id, stage, take, hashing, context.telemetry, ports.archiving)


def check_gives(context: NodeContext) -> None:
    """Raises Unavailable while this node has no state to give."""
    if context.presence.status.state not in GIVING:
        raise Unavailable("this node has no state to give")

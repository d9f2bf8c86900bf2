"""Copies of a served replica for other nodes: for joiners the whole state, for archives the slow weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from swarmnode.base.errors import Unavailable
from swarmnode.base.parted_work import Parts
from swarmnode.base.ports import Priority, State
from swarmnode.base.wire import record_pb2
from swarmnode.keep.transfer.donor import DonorLimits, SnapshotDonor, StageDonor
from swarmnode.keep.transfer.snapshot import WHOLE, Snapshot, StateSlice
from swarmnode.net.membership.swarm import GIVING
from swarmnode.train.node.node_ports import NodeContext
from swarmnode.train.node.stage_parts import StageParts

Trained = Callable[[], record_pb2.Progress]


def make_donor(parts: StageParts, trained: Trained) -> StageDonor:
    """The part that gives state to others: of the replica, and what is kept of other stages; `trained`: the run's
    progress that the replica has learned. Archives get copies of the slow weights, which are hashed beside the compute
    thread where possible."""
    here = parts.here
    gossip = parts.gossip
    ports = parts.context.ports
    given = (here.run_id, here.stage)
    # Behind other work a busy replica would never hash, and it needs the joiner that waits.
    run = partial(here.compute.run, Priority.OUTER, 0)
    take = partial(copy_replica, parts, trained)
    limits = ports.donating
    joiners = SnapshotDonor(*given, take, run, here.telemetry, limits, parts.backup.kept)

    async def slow(cut: StateSlice) -> Snapshot:
        while True:
            check_gives(parts.context)
            done = gossip.done
            progress = trained()
            state = await run(partial(here.replica.snapshot_in_parts, packed=True, only=cut.sections))
            if gossip.done == done:
                return Snapshot.of(state, here.stage, done, progress, limits.chunk_nbytes, gossip.line)

    # Archives get one of two places: a donor reserves one for peers that cannot work without the state.
    archive = SnapshotDonor(*given, slow, ports.hashing or run, here.telemetry, DonorLimits(downloads_max=2))
    return StageDonor(here.stage, joiners, archive, parts.context.caller_check.archives, ports.archiving)


async def copy_replica(parts: StageParts, trained: Trained, cut: StateSlice) -> Snapshot:
    """An immutable copy of the replica, hashed when all of it or whole sections are wanted. Raises Unavailable while
    this node has no state to give, RemoteFault for a `cut` that it does not have."""
    check_gives(parts.context)
    gossip = parts.gossip
    replica = parts.here.replica
    stage = parts.here.stage
    cut.sizes(replica.sizes_of(stage))  # raises RemoteFault, before anything is copied
    run = partial(parts.here.compute.run, Priority.OUTER, 0)
    size = parts.context.ports.donating.chunk_nbytes
    at_once = cut.first == 0 and cut.count is None
    while True:
        done = gossip.done
        progress = trained()
        snapshots = list[Snapshot]()

        def keep(state: State) -> None:
            snapshots.append(Snapshot.of(state, stage, done, progress, size, gossip.line))  # noqa: B023

        def hashed() -> None:
            (snapshots[0] if cut == WHOLE else snapshots[0].part(cut)).manifest()  # noqa: B023

        def in_parts(copying: Parts[State]) -> Parts[None]:
            keep((yield from copying))
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

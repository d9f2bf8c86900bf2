"""A copy of the replica for those that fetch its state, labelled with the round that it has come to."""

from __future__ import annotations

import asyncio
from functools import partial

from swarmnode.gossip.exchange import Gossip
from swarmnode.node.presence import Presence
from swarmnode.node.world import World
from swarmnode.ports import Priority, Replica
from swarmnode.recovery.snapshot import WHOLE, Cut, Snapshot


async def copying(cut: Cut, replica: Replica, gossip: Gossip, stage: int, presence: Presence, world: World) -> Snapshot:
    """An immutable copy of the replica of `stage`, hashed when the whole of it is wanted."""
    run, size = partial(world.compute.run, Priority.OUTER, 0), world.donating.chunk_nbytes
    while True:
        done, progress, made = gossip.done, presence.progress.to_wire(), list[Snapshot]()
        copied = run(lambda: made.append(Snapshot.of(replica.snapshot(packed=True), stage, done, progress, size)))  # noqa: B023
        # Queued with the copy: asked for later it would wait for the next microbatch (simulated: half a minute).
        hashed = [run(lambda: made[0].manifest())] if cut == WHOLE else []  # noqa: B023, PLW0108  not there yet
        await asyncio.gather(copied, *hashed)
        if gossip.done == done:  # else an outer step came in between: its round would be the wrong label
            return made[0]

"""A replica that is held from work while its node is paused or its state is behind, and what it gives meanwhile."""

from __future__ import annotations

import asyncio

from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.recovery_source import donors_of
from swarmnode.train.node.replica_donor import make_donor
from swarmnode.train.node.stage_parts import StageParts

FINISH_S = 8.0  # guess: before a move, held work is finished within this


class HeldReplica:
    """Holds a replica, and knows what its state has learned. `donor` gives that state to others."""

    def __init__(self, parts: StageParts, tasks: asyncio.TaskGroup) -> None:
        self._parts = parts
        self._presence = parts.context.presence
        self._tasks = tasks
        self._resting: asyncio.Task[None] | None = None  # while held: until the state changes no more
        self._rested: record_pb2.Progress | None = None  # while held: of the run, when the state was new
        self._was_last = False  # when the replica was held, nobody else served the stage
        self._relieved = False  # others have served it since
        self.donor = make_donor(parts, self.trained)

    @property
    def held(self) -> bool:
        """Whether the replica is held from rounds."""
        return self._resting is not None

    def others(self) -> tuple[PeerId, ...]:
        """The other replicas of the stage that give their state."""
        return donors_of(self._presence.peer_table.swarm(), self._parts.here.stage, self._presence.me)

    def hold(self, reason: str, *, away: bool = True) -> None:
        """Take no new work for `reason`: no microbatch, no round, no download. Work under way goes on.
        `away`: for long, so that other replicas are not to wait for this one."""
        self._was_last = not self.others()
        self._relieved = False
        self._parts.held_work.hold(reason)
        self._parts.gossip.hold(True, away=away)
        self._parts.backup.hold(True)
        self._resting = self._tasks.create_task(self._rest())

    async def _rest(self) -> None:
        """After `hold`: return when the replica's state changes no more. Copies from before are forgotten."""
        await self._parts.held_work.emptied()
        await self._parts.gossip.idle.wait()
        self.donor.close()
        self._rested = self._presence.progress.to_wire()

    def release(self) -> None:
        """After `hold`: take part in rounds again. Microbatches are refused until `held_work` is released as well."""
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
            self._rested = None
        self._parts.gossip.hold(False)
        self._parts.backup.hold(False)

    def trained(self) -> record_pb2.Progress:
        """The run's progress that this replica has learned: of now, or of when it was held. Without the last replica of
        a stage nothing is trained: what is heard of later was trained before."""
        self.note_relief()
        if self._rested is None or (self._was_last and not self._relieved):
            return self._presence.progress.to_wire()
        return self._rested

    def outdated(self) -> bool:
        """Whether others may have a newer state: rounds went by while this replica was held, or nodes serve the stage
        that began with its state, or an older one."""
        done = self._presence.progress.total // self._parts.context.manifest.gossip.round_samples
        self.note_relief()
        return done > self._parts.gossip.done or (self._was_last and self._relieved)

    def note_relief(self) -> None:
        """Remember whether others served the stage while this replica was held."""
        self._relieved = self._relieved or (self.held and bool(self.others()))

    async def serve_snapshot(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "snapshot". A paused replica gives what it has after the last microbatch that it held, unless
        that takes more than FINISH_S."""
        self._check_limits()
        if self._resting is not None and call.header.snapshot.stage == self._parts.here.stage:
            await asyncio.wait([self._resting], timeout=FINISH_S)
        return await self.donor.offer(peer, call)

    async def serve_chunk(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "chunk"."""
        self._check_limits()
        return await self.donor.chunk(peer, call)

    def _check_limits(self) -> None:
        """Raise Unavailable where the volunteer's limits let this node send no state."""
        if not self._presence.status.gives:
            raise Unavailable("the day's quota of this node is used up")

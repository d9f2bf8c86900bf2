"""Standing aside for a while without leaving: what is held is finished, the replica stays in memory, the record says
"paused"; back again, it catches up with its stage before it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from swarmnode.errors import Unavailable
from swarmnode.gossip.exchange import Gossip
from swarmnode.manifest import Manifest
from swarmnode.node.arrival import Arrival
from swarmnode.node.lifecycle import donors_of
from swarmnode.node.presence import Presence
from swarmnode.node.syncing import syncing
from swarmnode.pipeline.backlog import Backlog
from swarmnode.pipeline.feeder import Feeder
from swarmnode.ports import Replica, Telemetry
from swarmnode.recovery.keeper import Keeper
from swarmnode.wire import record_pb2

LOOK_S = 0.05
FINISH_S = 30.0  # guess: what is held is finished within this; what is not goes on, and is not waited for


@dataclass(frozen=True, slots=True)
class Serving:
    """What works on the stage this node serves now."""

    manifest: Manifest
    stage: int
    replica: Replica
    backlog: Backlog
    gossip: Gossip
    feeder: Callable[[], Feeder | None]
    keeper: Keeper
    arrival: Arrival


class Pausing:
    """`going` is set while the node may work; joining itself waits for it. `parts` None: no stage is served yet."""

    def __init__(self, presence: Presence, telemetry: Telemetry) -> None:
        self._presence = presence
        self._telemetry = telemetry
        self.going = asyncio.Event()
        self.going.set()
        self.parts: Serving | None = None

    @property
    def paused(self) -> bool:
        return self._presence.self.state == record_pb2.NODE_STATE_PAUSED

    async def apply(self, running: bool, reason: str) -> None:
        """Make it so, if the node is in a state to; to be asked again and again. While joining it only holds back."""
        state = self._presence.self.state
        if not running:
            self.going.clear()
            if state == record_pb2.NODE_STATE_TRAINING:
                await self._pause(reason)
            return
        if state == record_pb2.NODE_STATE_PAUSED:
            await self._resume(reason)
        self.going.set()

    async def finish(self, reason: str) -> None:
        """Take nothing new; returns when all that is held is done, however long that takes."""
        if self._presence.self.stage is not None:
            self._presence.set_state(record_pb2.NODE_STATE_DRAINING, reason)
        if (parts := self.parts) is not None:
            self._hold(parts, True, "this node is leaving")
            await self._emptied(parts)

    async def _pause(self, reason: str) -> None:
        self._presence.set_state(record_pb2.NODE_STATE_PAUSED, reason)
        if (parts := self.parts) is None:
            return
        self._hold(parts, True, "this node is paused")
        try:
            async with asyncio.timeout(FINISH_S):
                await self._emptied(parts)
        except TimeoutError:
            held = len(parts.backlog)
            self._telemetry.event("node.paused", level="warning", held=held, reason="what is held is not done yet")
        else:
            self._telemetry.event("node.paused", reason=reason)

    async def _resume(self, reason: str) -> None:
        parts, newcomer = self.parts, False
        if parts is not None:
            try:
                newcomer = await self._catch_up(parts)
            except Unavailable as error:
                self._telemetry.event("node.paused", level="warning", reason=f"cannot come back yet: {error}")
                return
            parts.gossip.held, parts.keeper.held = False, False
            parts.gossip.progressed()
            if newcomer:
                await syncing(parts.gossip, self._presence, parts.stage, parts.manifest, self._telemetry)
            self._hold(parts, False, None)
        self._presence.set_state(record_pb2.NODE_STATE_TRAINING, reason)
        self._telemetry.event("node.resumed", reason=reason)

    async def _catch_up(self, parts: Serving) -> bool:
        """If rounds went by and others hold what the stage has become, take it from them as a joiner does.

        Where nobody else serves the stage, what this replica holds is the stage. Returns whether its next round is to
        be received at weight 0. Raises Unavailable when the donors are gone meanwhile.
        """
        presence, gossip = self._presence, parts.gossip
        await gossip.idle.wait()  # a round that began before the pause goes on in it, and its outer step needs its mark
        await presence.look([parts.stage])
        behind = presence.progress.total // parts.manifest.gossip.round_samples > gossip.done
        if not behind or not donors_of(presence.book.swarm(), parts.stage, presence.me):
            return False
        arrived = await parts.arrival.begin(parts.replica, parts.stage)
        gossip.done, gossip.newcomer = arrived.done, arrived.newcomer
        return arrived.newcomer

    @staticmethod
    def _hold(parts: Serving, held: bool, why: str | None) -> None:
        parts.backlog.refusing = why
        parts.gossip.held = parts.keeper.held = held
        if (feeder := parts.feeder()) is not None:
            feeder.hold(held)

    @staticmethod
    async def _emptied(parts: Serving) -> None:
        await parts.backlog.empty()
        while (feeder := parts.feeder()) is not None and feeder.under_way:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

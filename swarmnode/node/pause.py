"""A pause without leaving. Held work is finished, the replica stays in memory, and the record says "paused". After the
pause the replica catches up with its stage before it serves again."""

from __future__ import annotations

import asyncio

from swarmnode.errors import Unavailable
from swarmnode.node.presence import Presence
from swarmnode.node.stage_slot import StageSlot
from swarmnode.ports import Telemetry
from swarmnode.wire import record_pb2

FINISH_S = 30.0  # guess: held work is finished within this; the rest goes on, and is not waited for


class PauseControl:
    """`going` is set while the node may work; joining itself waits for it."""

    def __init__(self, presence: Presence, slot: StageSlot, telemetry: Telemetry) -> None:
        self._presence = presence
        self._slot = slot
        self._telemetry = telemetry
        self.going = asyncio.Event()
        self.going.set()

    @property
    def paused(self) -> bool:
        return self._presence.status.state == record_pb2.NODE_STATE_PAUSED

    async def apply(self, running: bool, reason: str) -> None:
        """Pause or resume, if the node is in a state to do so; call it again and again. A node that joins is only held
        back."""
        state = self._presence.status.state
        if not running:
            self.going.clear()
            if state == record_pb2.NODE_STATE_TRAINING:
                await self._pause(reason)
            return
        if state == record_pb2.NODE_STATE_PAUSED:
            await self._resume(reason)
        self.going.set()

    async def finish(self, reason: str) -> None:
        """Take no new work; returns when all held work is done, however long that takes."""
        if self._presence.status.stage is not None:
            self._presence.set_state(record_pb2.NODE_STATE_DRAINING, reason)
        if (work := self._slot.work) is not None:
            work.hold("this node is leaving")
            await work.held_work.emptied()

    async def _pause(self, reason: str) -> None:
        self._presence.set_state(record_pb2.NODE_STATE_PAUSED, reason)
        if (work := self._slot.work) is None:
            return
        work.hold("this node is paused")
        try:
            async with asyncio.timeout(FINISH_S):
                await work.held_work.emptied()
        except TimeoutError:
            held = work.held_work.held
            self._telemetry.event("node.paused", level="warning", held=held, reason="what is held is not done yet")
        else:
            self._telemetry.event("node.paused", reason=reason)

    async def _resume(self, reason: str) -> None:
        if (work := self._slot.work) is not None:
            try:
                await work.resume()
            except Unavailable as error:
                self._telemetry.event("node.paused", level="warning", reason=f"cannot come back yet: {error}")
                return
        self._presence.set_state(record_pb2.NODE_STATE_TRAINING, reason)
        self._telemetry.event("node.resumed", reason=reason)

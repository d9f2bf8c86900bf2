"""A pause without leaving. Held work is finished, the replica stays in memory, and the record says "paused". After the
pause the replica catches up with its stage before it serves again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from swarmnode.errors import Unavailable
from swarmnode.ids import PeerId
from swarmnode.node.feeder_only import FeederOnly
from swarmnode.node.presence import NO_WORK, Presence, StageObserver, StageStatus
from swarmnode.node.served_stage import ServedStage
from swarmnode.pipeline.feeder import Feeder
from swarmnode.ports import Answer, Call, Handler, Telemetry
from swarmnode.wire import record_pb2

FINISH_S = 30.0  # guess: held work is finished within this; the rest goes on, and is not waited for


class StageSlot:
    """The work in hand; `work` is None while there is none."""

    def __init__(self) -> None:
        self.work: ServedStage | FeederOnly | None = None
        self._validated = NO_WORK.status()  # the status of the last work that has ended and had a validation

    @property
    def served(self) -> ServedStage | None:
        """The stage being served; None while none is."""
        return self.work if isinstance(self.work, ServedStage) else None

    @contextmanager
    def holding(self, work: ServedStage | FeederOnly) -> Iterator[None]:
        """Hold `work` for the length of a block."""
        self.work = work
        try:
            yield
        finally:
            if (ended := work.status()).loss_validation is not None:
                self._validated = ended
            self.work = None

    def observer(self) -> StageObserver:
        """The work in hand, for news; one that does nothing while there is none."""
        return self.work or NO_WORK

    def feeder(self) -> Feeder | None:
        """This node's feeder; None where nothing is fed."""
        return None if self.work is None else self.work.feeder

    def handler(self, method: str) -> Handler:
        """A handler for calls of `method`. Raises Unavailable for a call that comes while there is no work."""

        async def serve(peer: PeerId, call: Call) -> Answer:
            if self.work is None:
                raise Unavailable("this node has no stage yet")
            if (handler := self.work.handlers().get(method)) is None:
                raise Unavailable("this node only feeds")
            return await handler(peer, call)

        return serve

    def status(self) -> StageStatus:
        """The status of the work now. Work without a validation of its own has the last one that was made here."""
        now = self.observer().status()
        if now.loss_validation is not None:
            return now
        return replace(
            now,
            loss_validation=self._validated.loss_validation,
            loss_validation_samples=self._validated.loss_validation_samples,
            loss_validation_first=self._validated.loss_validation_first,
        )


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

"""A pause without leaving. Nothing new is begun, held work ends by itself, the replica stays in memory, and the record
says "paused". After the pause the replica catches up with its stage before it serves again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from swarmnode.base.errors import Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Answer, Call, Handler, Telemetry
from swarmnode.base.wire import record_pb2
from swarmnode.train.node.own_record import NO_WORK, StageObserver, StageStatus
from swarmnode.train.node.presence import Presence
from swarmnode.train.node.served_stage import ServedStage


class StageSlot:
    """The stage in service; `served` is None while none is."""

    def __init__(self) -> None:
        self.served: ServedStage | None = None
        self._validated = NO_WORK.status()  # the status of the last stage that has ended and had a validation

    @contextmanager
    def holding(self, served: ServedStage) -> Iterator[None]:
        """Hold `served` for the length of a block."""
        self.served = served
        try:
            yield
        finally:
            if (ended := served.status()).loss_validation is not None:
                self._validated = ended
            self.served = None

    def observer(self) -> StageObserver:
        """The stage in service, for news; one that does nothing while there is none."""
        return self.served or NO_WORK

    def handler(self, method: str) -> Handler:
        """A handler for calls of `method`. Raises Unavailable for a call that comes while no stage is served."""

        def serve(peer: PeerId, call: Call) -> Awaitable[Answer]:
            if self.served is None:
                raise Unavailable("this node has no stage yet")
            return self.served.handlers[method](peer, call)

        return serve

    def status(self) -> StageStatus:
        """The status of the stage now. One without a validation of its own has the last one that was made here."""
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
        self.followers: list[PauseControl] = []  # of the machine's other stages

    @property
    def paused(self) -> bool:
        return self._presence.status.state == record_pb2.NODE_STATE_PAUSED

    async def apply(self, running: bool, reason: str) -> None:
        """Pause or resume, if the node is in a state to do so; call it again and again. A node that joins is only held
        back."""
        for follower in self.followers:
            await follower.apply(running, reason)
        state = self._presence.status.state
        if not running:
            self.going.clear()
            if state == record_pb2.NODE_STATE_TRAINING:
                self._pause(reason)
            return
        if state == record_pb2.NODE_STATE_PAUSED:
            await self._resume(reason)
        self.going.set()

    async def finish(self, reason: str) -> None:
        """Take no new work; returns when all held work is done, however long that takes."""
        for follower in self.followers:
            await follower.finish(reason)
        if self._presence.status.stage is not None:
            self._presence.own.set_state(record_pb2.NODE_STATE_DRAINING, reason)
        if (served := self._slot.served) is not None:
            served.held.hold("this node is leaving")
            await served.held_work.emptied()

    def _pause(self, reason: str) -> None:
        self._presence.own.set_state(record_pb2.NODE_STATE_PAUSED, reason)
        if (served := self._slot.served) is not None:
            served.held.hold("this node is paused")
            self._telemetry.event("node.paused", held=served.held_work.held, reason=reason)

    async def _resume(self, reason: str) -> None:
        if (served := self._slot.served) is not None:
            try:
                await served.catch_up.resume()
            except Unavailable as error:
                self._telemetry.event("node.paused", level="warning", reason=f"cannot come back yet: {error}")
                return
        self._presence.own.set_state(record_pb2.NODE_STATE_TRAINING, reason)
        self._telemetry.event("node.resumed", reason=reason)

"""The work of a node now: it serves a stage, only feeds, or neither. Handlers, presence and pauses look here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.ids import PeerId
from swarmnode.node.feeder_only import FeederOnly
from swarmnode.node.local_status import NO_STAGE, StageStatus
from swarmnode.node.served_stage import ServedStage
from swarmnode.pipeline.feeder import Feeder
from swarmnode.ports import Answer, Call, Handler
from swarmnode.wire import record_pb2


class StageSlot:
    """presence.StageObserver of the work in hand; `work` is None while there is none."""

    def __init__(self) -> None:
        self.work: ServedStage | FeederOnly | None = None
        self._validated = NO_STAGE  # the status of the last work that has ended and had a validation

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
        now = NO_STAGE if self.work is None else self.work.status()
        if now.loss_validation is not None:
            return now
        return replace(
            now,
            loss_validation=self._validated.loss_validation,
            loss_validation_samples=self._validated.loss_validation_samples,
            loss_validation_first=self._validated.loss_validation_first,
        )

    def progressed(self) -> None:
        if self.work is not None:
            self.work.progressed()

    def hear_blocks(self, told: Mapping[PeerId, record_pb2.Blocks], frontier_max: int) -> Iterable[RemoteFault]:
        return () if self.work is None else self.work.hear_blocks(told, frontier_max)

    def doubt(self, peers: Iterable[PeerId]) -> None:
        if self.work is not None:
            self.work.doubt(peers)

    def strangers_come(self) -> bool:
        return self.work is None or self.work.strangers_come()

    def confirmed(self, peer: PeerId) -> int:
        return 0 if self.work is None else self.work.confirmed(peer)

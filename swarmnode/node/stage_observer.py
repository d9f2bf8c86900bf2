"""The view that Presence has of the stage being served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from swarmnode.errors import RemoteFault
from swarmnode.ids import PeerId
from swarmnode.node.local_status import StageStatus
from swarmnode.wire import record_pb2


class StageObserver(Protocol):
    """The stage that a node serves, as its Presence tells it news and asks it for its status.

    Before a stage is served, and between two of them, nothing is told and `status` is that of no stage.
    """

    def status(self) -> StageStatus:
        """The stage at this moment."""
        ...

    def progressed(self) -> None:
        """The run's sample count grew."""
        ...

    def hear_blocks(self, told: Mapping[PeerId, record_pb2.Blocks], frontier_max: int) -> Iterable[RemoteFault]:
        """Take in the finished blocks announced by other feeders; returns those that cannot be believed, such as more
        than `frontier_max` finished blocks."""
        ...

    def doubt(self, peers: Iterable[PeerId]) -> None:
        """`peers` went silent: calls to them that are under way may never be answered."""
        ...

    def strangers_come(self) -> bool:
        """Whether most replicas that were never met come when a round is tried with them."""
        ...

    def confirmed(self, peer: PeerId, /) -> int:
        """Answers of `peer` in a row that were checked and right."""
        ...

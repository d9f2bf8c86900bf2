"""The further stages that this machine serves beside its node's own: for each a node, which is a part of the machine.

A part is an ordinary member of its stage under a peer id of its own (ids.part_id): it announces itself, averages, is
audited and recovers as any replica. It shares the machine's key, transport, device and directory, leaves with it, and
never moves alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swarmnode.base.ports import Telemetry
from swarmnode.base.wire import record_pb2
from swarmnode.train.node.drain import DrainReport
from swarmnode.train.node.notice import Notices
from swarmnode.train.node.pause import PauseControl
from swarmnode.train.node.presence import Presence
from swarmnode.train.node.served_stage import ServedStage


class PartTelemetry:
    """ports.Telemetry of a part: what happens is told and counted; a gauge has one value, that of the machine's own
    node."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def event(self, event: str, *, level: str = "info", **fields: object) -> None:
        self._telemetry.event(event, level=level, **fields)

    def count(self, metric: str, value: float = 1.0, **labels: str) -> None:
        self._telemetry.count(metric, value, **labels)

    def gauge(self, metric: str, value: float, **labels: str) -> None:
        """Nothing is shown."""

    def observe(self, metric: str, value: float, **labels: str) -> None:
        self._telemetry.observe(metric, value, **labels)


class PartNode(Protocol):
    """Node (node.py), as a span needs it."""

    presence: Presence
    pause_control: PauseControl
    drain_report: DrainReport | None

    @property
    def stage(self) -> int | None: ...

    @property
    def state(self) -> record_pb2.NodeState: ...

    @property
    def served(self) -> ServedStage | None: ...

    async def run(self, notices: Notices, stage: int | None = None) -> DrainReport: ...

    def save_before_leaving(self, checkpoint: str) -> None: ...


@dataclass(frozen=True, slots=True)
class SpanPorts:
    """The ports of a span: `block` gives the stages that it serves if it serves a given one, `make` the node
    of its part for a stage."""

    block: Callable[[int], range]
    make: Callable[[int], PartNode]


class ServedSpan:
    """The parts of a machine whose node serves the stage `at` of `block`; none for a block of one stage."""

    def __init__(self, block: range, at: int, make: Callable[[int], PartNode]) -> None:
        self.block = block
        self.parts: dict[int, PartNode] = {stage: make(stage) for stage in block if stage != at}
        self._notices: list[Notices] = []
        self._left = asyncio.Event()

    async def leave(self, reason: str) -> None:
        """Leave all stages in order: the machine serves others from now on."""
        for notices in self._notices:
            notices.leave(reason)
        await self._left.wait()

    async def run(self, notices: Notices) -> None:
        """Serve until `notices` say go, then leave. Raises as a node does: a machine's stages fail together."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for stage, part in self.parts.items():
                    self._notices.append(notices.follower())
                    tasks.create_task(part.run(self._notices[-1], stage))
        finally:
            self._left.set()

    async def left(self) -> None:
        """Return when all parts have left."""
        await self._left.wait()

"""What the control API asks of a daemon, answered from its parts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swarmnode.cli.describe import describe
from swarmnode.cli.options import NodeOptions
from swarmnode.errors import Unavailable
from swarmnode.ids import RunId
from swarmnode.manifest import Manifest
from swarmnode.metrics.exporter import PrometheusTelemetry
from swarmnode.metrics.recent import Recent
from swarmnode.node.drain import Farewell
from swarmnode.node.node import Node
from swarmnode.node.notice import Kind, Notice, Notices
from swarmnode.transport.directory import DhtDirectory
from swarmnode.transport.libp2p import Libp2pTransport
from swarmnode.wire import control_pb2, record_pb2


@dataclass(frozen=True, slots=True)
class Process:
    """What a member and a bootstrap have alike."""

    options: NodeOptions
    run_id: RunId
    manifest: Manifest
    transport: Libp2pTransport
    directory: DhtDirectory
    telemetry: PrometheusTelemetry
    metrics_address: str
    recent: Recent
    signed: record_pb2.SignedManifest


class Desk:
    """control.service.Api of one daemon. Before `open` every question is answered by Unavailable."""

    def __init__(self, options: NodeOptions, notices: Notices) -> None:
        self._options = options
        self._notices = notices
        self._process: Process | None = None
        self._node: Node | None = None
        self.left: asyncio.Future[Farewell | None] = asyncio.get_running_loop().create_future()
        self._started_s = asyncio.get_running_loop().time()

    def open(self, process: Process, node: Node | None) -> None:
        """Answer from now on; `node` None is a bootstrap."""
        self._process, self._node = process, node

    @property
    def process(self) -> Process:
        if self._process is None:
            raise Unavailable("this daemon is still starting")
        return self._process

    def status(self) -> control_pb2.StatusReply:
        """Everything this daemon says of itself."""
        process = self.process
        reply = describe(
            self._node,
            process.run_id,
            process.manifest,
            process.telemetry,
            process.metrics_address,
            self._started_s,
        )
        reply.home = str(self._options.home)
        return reply

    def leave(self, reason: str, checkpoint: str, stopping: bool) -> None:
        """Begin to leave, with the stage saved in `checkpoint` before unless that is ""; `stopping`: as does the whole
        run."""
        if self._node is not None:
            self._node.final = checkpoint
        self.process.telemetry.event("control.leave", reason=reason)
        self._notices.leave(reason, Kind.STOP if stopping else Kind.LEAVE)

    async def drain(self, notice_s: float, reason: str) -> control_pb2.DrainReply:
        """Leave as if the machine were taken away in `notice_s`; returns when this node has left."""
        self.process.telemetry.event("control.leave", reason=reason, notice_s=notice_s)
        self._notices.give(Notice("control", Kind.PREEMPT, notice_s, reason or "swarmnode drain"))
        farewell = await asyncio.shield(self.left)
        if farewell is None:  # a bootstrap, or a node that had not begun
            return control_pb2.DrainReply()
        return control_pb2.DrainReply(
            held=farewell.held,
            finished=farewell.finished,
            unsent=farewell.unsent,
            sent=farewell.sent,
            heir=farewell.heir,
            cut=farewell.cut,
            seconds=farewell.seconds,
        )

"""Receipts of a daemon, put together: asked for over its transport, kept in its home."""

from __future__ import annotations

from swarmnode.cli.desk import Process
from swarmnode.local.receipts import Receipts
from swarmnode.node.node import Node
from swarmnode.node.thanks import Thanks
from swarmnode.ports import Clock
from swarmnode.transport import identity as key_file


async def thanking(process: Process, node: Node, kept: Receipts, clock: Clock) -> None:
    """Sign what others did for this node, collect in `kept` what it did for others, until cancelled."""
    identity = key_file.load(process.options.home / "node.key")
    thanks = Thanks(process.run_id, identity, node.line.work, clock, process.telemetry, kept.keep)
    thanks.serve(process.transport)
    await thanks.collect(process.transport)

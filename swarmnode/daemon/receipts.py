"""Assemble a daemon's receipts: exchanged over its transport, kept in its home."""

from __future__ import annotations

from swarmnode.daemon.control_api import DaemonContext
from swarmnode.machine.receipt_store import Receipts
from swarmnode.node.node import Node
from swarmnode.node.receipt_exchange import ReceiptExchange
from swarmnode.ports import Clock
from swarmnode.transport import key_file


async def thanking(process: DaemonContext, node: Node, kept: Receipts, clock: Clock) -> None:
    """Sign receipts for others' work and collect in `kept` those for this node's work, until cancelled."""
    identity = key_file.load(process.options.home / "node.key")
    thanks = ReceiptExchange(process.run_id, identity, node.transport.work, clock, process.telemetry, kept.keep)
    thanks.serve(process.transport)
    await thanks.collect(process.transport)

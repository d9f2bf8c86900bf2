"""The regulator of a daemon, put together: limits from its options, rates to its transport, load to its device."""

from __future__ import annotations

from swarmnode.cli.desk import Process
from swarmnode.node.compute import ThreadCompute
from swarmnode.node.limits import Limits, change
from swarmnode.node.node import Node
from swarmnode.node.regulator import Regulator, Sense


def make_regulator(process: Process, node: Node, compute: ThreadCompute, sense: Sense) -> Regulator:
    """Keeps the limits of `options`; rates go to the transport, the load to `compute`."""
    throttle = process.transport.throttle

    def changed(limits: Limits) -> None:
        throttle.up.bps, throttle.down.bps = limits.max_up_bps, limits.max_down_bps
        compute.load = limits.max_load or 1.0

    limits = change(Limits(), process.options.limits)
    return Regulator(limits, sense, node.pausing, node.presence, process.telemetry, changed)

"""Assemble a daemon's regulator: limits from its options, rates for its transport, load for its device."""

from __future__ import annotations

from swarmnode.daemon.control_api import DaemonContext
from swarmnode.machine.compute import ThreadCompute
from swarmnode.node.limits import Limits, change
from swarmnode.node.node import Node
from swarmnode.node.regulator import Regulator, Sense


def make_regulator(process: DaemonContext, node: Node, compute: ThreadCompute, sense: Sense) -> Regulator:
    """A regulator of the limits in `options`; rates go to the transport, the load to `compute`."""
    throttle = process.transport.throttle

    def changed(limits: Limits) -> None:
        throttle.up.bps, throttle.down.bps = limits.max_up_bps, limits.max_down_bps
        compute.load = limits.max_load or 1.0

    limits = change(Limits(), process.options.limits)
    return Regulator(limits, sense, node.pause_control, node.presence, process.telemetry, changed)

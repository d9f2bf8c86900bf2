"""The parts of a node that live as long as its process, handed to each stage that it serves."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.ids import PeerId, RunId
from swarmnode.manifest import Manifest
from swarmnode.membership.liveness import Pinger
from swarmnode.node.caller_check import CallerCheck
from swarmnode.node.failure_detector import FailureDetector
from swarmnode.node.node_ports import NodePorts
from swarmnode.node.piggyback import PiggybackTransport
from swarmnode.node.presence import Presence
from swarmnode.ports import Telemetry
from swarmnode.recovery.restore import StateRestorer


@dataclass(frozen=True, slots=True)
class NodeContext:
    """The process-wide parts of a node: its run, its ports, and its view of the other nodes."""

    manifest: Manifest
    run_id: RunId
    ports: NodePorts
    presence: Presence
    caller_check: CallerCheck
    transport: PiggybackTransport
    pinger: Pinger
    restorer: StateRestorer
    failure_detector: FailureDetector

    @property
    def me(self) -> PeerId:
        """This node's peer id."""
        return self.presence.me

    @property
    def telemetry(self) -> Telemetry:
        """The telemetry port."""
        return self.ports.telemetry

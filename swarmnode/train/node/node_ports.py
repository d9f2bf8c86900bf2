"""All ports of one node, with the factories of its replica and its text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Clock, Compute, Directory, Replica, Telemetry, Transport
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.data.index import Index
from swarmnode.keep.recovery.checkpoint_io import SavedMean
from swarmnode.keep.recovery.restore import StateRestorer
from swarmnode.keep.recovery.resumption import CheckpointOptions
from swarmnode.keep.transfer.chunk_set import SetPorts
from swarmnode.keep.transfer.donor import ArchiveBudget, DonorLimits
from swarmnode.net.membership.liveness import Pinger
from swarmnode.net.membership.receipt import WorkBook
from swarmnode.net.membership.swarm import StageContext
from swarmnode.run.admission.admission import Admission
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.caller_check import CallerCheck
from swarmnode.train.node.failure_detector import FailureDetector
from swarmnode.train.node.limits import NodeRole
from swarmnode.train.node.membership_handlers import Probing
from swarmnode.train.node.piggyback import PiggybackTransport
from swarmnode.train.node.presence import Presence
from swarmnode.train.pipeline.feeder import Samples
from swarmnode.train.pipeline.microbatch_size import Host

if TYPE_CHECKING:
    from swarmnode.data.base_index import BaseIndex


@dataclass(frozen=True, slots=True)
class NodePorts:
    """All that a node needs from outside (ports.py). `replica`, `samples` and `probe` run on the compute thread."""

    transport: Transport
    directory: Directory
    compute: Compute
    clock: Clock
    telemetry: Telemetry
    identity: Identity
    replica: Callable[[Manifest, int], Replica]
    samples: Callable[[], Samples]
    probe: Probing
    mean: Callable[[Replica], Awaitable[SavedMean | None]]
    """The running mean of a replica that leaves, None if it has none."""
    saving: CheckpointOptions = field(default_factory=CheckpointOptions)
    admission: Admission | None = None  # None: every peer may take part
    host: Host = field(default_factory=Host)
    donating: DonorLimits = field(default_factory=DonorLimits)
    archiving: ArchiveBudget = field(default_factory=ArchiveBudget)
    owner: bytes = b""  # the key whose warrants let others archive the run; empty: nobody's
    hashing: Callable[[Callable[[], wire.Snapshot]], Awaitable[wire.Snapshot]] | None = None
    """Hashes beside the compute thread; None: on it."""
    unable: frozenset[int] = frozenset()  # stages that this machine cannot serve (stage_fit.py); never all of them
    role: NodeRole = NodeRole.ANY
    no_files: bool = False  # the run's text is in files, and this machine's user opened none to it
    data: SetPorts[Index] | None = None  # in a run whose data source is an index; `samples` is then not called
    base: SetPorts[BaseIndex] | None = None  # in a run that starts from a pretrained model
    work: WorkBook = field(default_factory=WorkBook)  # of all members that this machine is


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
    block: Callable[[int], range] | None = None
    """The stages that this machine serves if it serves a given one; None: only that one."""

    @property
    def me(self) -> PeerId:
        """This node's peer id."""
        return self.presence.me

    @property
    def telemetry(self) -> Telemetry:
        """The telemetry port."""
        return self.ports.telemetry

    def at(self, stage: int, replica: Replica) -> StageContext:
        """The surroundings of `replica` of `stage` on this node."""
        ports = self.ports
        presence = self.presence
        where = self.manifest, self.run_id, stage, replica, self.transport
        known = presence.peer_table.swarm, presence.samples_total
        return StageContext(*where, ports.compute, ports.identity, ports.telemetry, *known)

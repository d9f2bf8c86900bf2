"""The world as one node sees it: the ports, and what makes its replica and reads its text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarmnode.identity import Identity
from swarmnode.membership.door import Door
from swarmnode.node.probe import Probing
from swarmnode.node.saver import Saving
from swarmnode.pipeline.feeder import Samples
from swarmnode.pipeline.microbatch import Host
from swarmnode.ports import Clock, Compute, Directory, Replica, Telemetry, Transport
from swarmnode.recovery.donor import DonorLimits


@dataclass(frozen=True, slots=True)
class World:
    """All a node needs from outside (ports.py). `replica`, `samples` and `probe` are called on the compute thread."""

    transport: Transport
    directory: Directory
    compute: Compute
    clock: Clock
    telemetry: Telemetry
    identity: Identity
    replica: Callable[[int], Replica]
    samples: Callable[[], Samples]
    probe: Probing
    save: Callable[[Replica, int, int, int], Awaitable[None]]  # replica, stage, round, samples of the run
    saving: Saving = field(default_factory=Saving)
    door: Door | None = None  # None: everybody may take part
    host: Host = field(default_factory=Host)
    donating: DonorLimits = field(default_factory=DonorLimits)
    unable: frozenset[int] = frozenset()  # stages that this machine cannot serve (able.py); never all of them

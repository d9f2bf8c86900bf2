"""The run, the ports and the places that a restore of a node's stages uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Clock, Compute, Priority, Replica, State, Telemetry, Transport
from swarmnode.base.wire import access_pb2, record_pb2
from swarmnode.keep.recovery.recovery_source import OwnState
from swarmnode.keep.recovery.resumption import CheckpointOptions, EarlierCut, SavedStages
from swarmnode.keep.recovery.state_fetcher import StateFetcher
from swarmnode.keep.transfer.snapshot import Snapshot
from swarmnode.model.adapter import has_adapters
from swarmnode.net.membership.liveness import Pinger
from swarmnode.net.membership.progress import Progress
from swarmnode.net.membership.run_progress import MembershipView
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.gossip_compat import meets


class BaseWeights(Protocol):
    """The pretrained model that the run starts from."""

    async def load(self, replica: Replica, stage: int) -> int:
        """Place the weights of `stage` in `replica`; the bytes read. Raises Unavailable when they are not to be had
        now, DataError when they do not fit the run's model."""
        ...


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """A state to be restored: of `stage`, into `replica`."""

    replica: Replica
    stage: int
    backup: Snapshot | None = None  # this node's copy of the stage, which it kept as a neighbour
    round_min: int = 0  # the least round of a living replica's state
    believed: Collection[PeerId] | None = None  # replicas of the stage that are believed; None: all
    own: OwnState | None = None  # the state that `replica` has, which stays unless a newer one is found


@dataclass(frozen=True, slots=True)
class RestoreContext:
    """The parts of one node that a restore of any stage uses."""

    manifest: Manifest
    run_id: RunId
    transport: Transport
    membership: MembershipView
    pinger: Pinger
    compute: Compute
    clock: Clock
    telemetry: Telemetry
    checkpoints: CheckpointOptions
    saved: SavedStages
    warranted: Callable[
        [PeerId, access_pb2.Warrant], tuple[bool, str]
    ]  # whether a peer archives for the owner, or why not
    base: BaseWeights | None  # of a run with base.index
    make: Callable[[Manifest, int], Replica]
    earlier: EarlierCut | None = None

    async def freeze(self, replica: Replica, stage: int) -> None:
        """Place the frozen weights of `stage` in a new `replica`, if the run trains adapters beside a base model: no
        state has them. Raises Unavailable, DataError."""
        if self.base is not None and has_adapters(self.manifest):
            await self.base.load(replica, stage)

    @property
    def meets(self) -> bool:
        """Whether replicas of a stage meet in rounds."""
        return meets(self.manifest.gossip)

    async def load(self, replica: Replica, state: State) -> None:
        """Load `state`. Raises RemoteFault for numbers that cannot be a state."""
        await self.compute.run(Priority.OUTER, 0, lambda: replica.load(state))

    def fetcher(self, replica: Replica) -> StateFetcher:
        """Fetches states of stages for `replica`."""
        return StateFetcher(self, self.membership, replica, None if self.earlier is None else self.earlier.manifest)

    def merge(self, told: record_pb2.Progress) -> None:
        """Merge the progress that came with a state, within bounds. A donor may be wrong about the run's count."""
        with contextlib.suppress(RemoteFault):
            self.membership.progress.merge(Progress.from_wire(told))

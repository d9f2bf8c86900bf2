"""Downloads of a stage's state for one node: from which peers, checked by which others, and up to which round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarmnode.errors import Unavailable
from swarmnode.ids import PeerId, RunId
from swarmnode.manifest import Manifest
from swarmnode.membership.membership_view import MembershipView
from swarmnode.ports import Replica, State, Telemetry, Transport
from swarmnode.recovery.donor_client import DownloadLimits
from swarmnode.recovery.download import Accept, download
from swarmnode.recovery.recovery_source import donors_of
from swarmnode.recovery.snapshot import SLOW, WHOLE, Snapshot, StateSlice
from swarmnode.recovery.state_check import StateCheck
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2

BACKUP_LIMITS = DownloadLimits(sources=1)  # backups of different keepers are of rounds far apart


class StateFetcher:
    """Fetches for one attempt to restore `replica`. `nbytes` counts what was received."""

    def __init__(
        self,
        manifest: Manifest,
        run_id: RunId,
        transport: Transport,
        membership: MembershipView,
        telemetry: Telemetry,
        replica: Replica,
        backup: Snapshot | None,
    ) -> None:
        """`backup` is the snapshot that this node itself kept of a stage, if any."""
        self._manifest = manifest
        self._run_id = run_id
        self._transport = transport
        self._membership = membership
        self._telemetry = telemetry
        self._replica = replica
        self._backup = backup
        self.nbytes = 0

    def read(self, nbytes: int) -> None:
        """Count `nbytes` that came from elsewhere than a peer's snapshot."""
        self.nbytes += nbytes

    def check(
        self,
        stage: int,
        others: Callable[[], Sequence[PeerId]] = tuple,
        keepers: Callable[[], Sequence[PeerId]] = tuple,
        within: StateSlice = SLOW,
    ) -> StateCheck | None:
        """A check of a state of `stage` by replicas, `others`, and by `keepers` of snapshots. None where replicas never
        meet: they differ without a fault."""
        if self._manifest.gossip.method == "none":
            return None
        return StateCheck(
            self._transport,
            self._run_id,
            stage,
            self._replica.sizes_of(stage),
            others,
            self._rounds_max,
            self._replica.apart,
            self._telemetry,
            keepers=keepers,
            within=within,
        )

    async def from_backups(
        self,
        stage: int,
        keepers: Sequence[PeerId],
        cut: StateSlice,
        check: StateCheck | None = None,
        accept: Accept | None = None,
    ) -> tuple[State, record_pb2.Progress]:
        """The part `cut` of the first snapshot to be had of those that `keepers`, latest first, keep of `stage`.

        This node's own backup needs no download, and serves when the other keepers fail. Raises Unavailable.
        """
        own = self._backup if self._membership.me in keepers else None
        if own is None or keepers[0] != self._membership.me:
            try:
                state, offer = await self.download(
                    stage, lambda: keepers, cut=cut, check=check, accept=accept, limits=BACKUP_LIMITS
                )
                return state, offer.progress
            except Unavailable:
                if own is None:
                    raise
        assert own is not None
        whole = own.sizes == self._replica.sizes_of(stage)
        state = (own.part(cut) if whole else own).state
        if accept is not None:
            await accept(state)
        return state, own.progress

    async def download(
        self,
        stage: int,
        donors: Callable[[], Sequence[PeerId]],
        *,
        cut: StateSlice = WHOLE,
        check: StateCheck | None = None,
        accept: Accept | None = None,
        limits: DownloadLimits | None = None,
        round_min: int = 0,
    ) -> tuple[State, wire.Snapshot]:
        """The part `cut` of the state of `stage`, of round `round_min` or later, and the donor's offer
        (recovery/download.py). Raises Unavailable."""
        state, offer = await download(
            self._transport,
            donors,
            stage,
            self._run_id,
            self._replica.sizes_of(stage),
            limits or DownloadLimits(),
            self._telemetry,
            cut=cut,
            round_min=round_min,
            rounds_max=self._rounds_max,
            compare=None if check is None else check.compare,
            accept=accept,
            helpers=lambda: self._helpers(stage),
        )
        self.nbytes += offer.nbytes
        return state, offer

    def donors(self, seen: frozenset[PeerId], stage: int) -> Sequence[PeerId]:
        """Donors of `stage` as they are known now. Those in `seen`, which answered a moment ago, come first."""
        now = donors_of(self._membership.peer_table.swarm(), stage, self._membership.me)
        return [peer for peer in now if peer in seen] + [peer for peer in now if peer not in seen]

    def _rounds_max(self) -> float:
        return self._membership.run_progress.rounds_max

    def _helpers(self, stage: int) -> list[PeerId]:
        """Peers that may hold the very bytes a donor offers: joiners that came a moment before, then the others."""
        members = self._membership.peer_table.swarm().stages[stage]
        syncing = [m.peer for m in members if m.state == record_pb2.NODE_STATE_SYNCING]
        return syncing + [m.peer for m in members if m.state == record_pb2.NODE_STATE_TRAINING]

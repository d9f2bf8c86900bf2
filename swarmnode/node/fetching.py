"""State of a stage from others for one node: whom to ask, who else has a word on it, and of which rounds it may be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from swarmnode.errors import Unavailable
from swarmnode.ids import PeerId, RunId
from swarmnode.manifest import Manifest
from swarmnode.node.lifecycle import donors_of
from swarmnode.node.line import Line
from swarmnode.node.presence import Presence
from swarmnode.ports import Replica, State, Telemetry
from swarmnode.recovery.asking import DownloadLimits
from swarmnode.recovery.download import Accept, Compare, download
from swarmnode.recovery.ladder import Sight
from swarmnode.recovery.second import SecondWord, Word
from swarmnode.recovery.snapshot import WHOLE, Cut, Snapshot
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2

KEPT = DownloadLimits(sources=1)  # keepers have it of rounds far apart


class Fetching:
    """`nbytes` received since it was set to 0."""

    def __init__(self, manifest: Manifest, run_id: RunId, line: Line, presence: Presence, telemetry: Telemetry) -> None:
        self._manifest = manifest
        self._run_id = run_id
        self._line = line
        self._presence = presence
        self._telemetry = telemetry
        self._swarm = presence.book.swarm
        self.carried: Snapshot | None = None  # what this node kept of another stage while it served the one before
        self.nbytes = 0

    def _rounds_max(self) -> float:
        return self._presence.beliefs.rounds_max

    def second(
        self, sight: Sight, replica: Replica, donors: Callable[[], Sequence[PeerId]]
    ) -> tuple[list[Word], Compare | None]:
        """(the words of those who agree with a state of `sight.stage`, once there are any; what asks for them): of its
        `donors`, then of those that keep a snapshot. Replicas that never meet differ as they please."""
        words: list[Word] = []
        if self._manifest.gossip.method == "none":
            return words, None
        keepers = [peer for _, peer in sight.kept]
        asked = SecondWord(
            self._line,
            self._run_id,
            sight.stage,
            replica.sizes_of(sight.stage),
            lambda: [*donors(), *keepers],
            self._rounds_max,
            replica.apart,
            self._telemetry,
        )

        async def compare(state: State, offer: wire.Snapshot, givers: Collection[PeerId]) -> None:
            words[:] = await asked.compare(state, offer, givers)

        return words, compare

    async def kept(
        self,
        replica: Replica,
        stage: int,
        keepers: Sequence[PeerId],
        cut: Cut,
        compare: Compare | None = None,
        accept: Accept | None = None,
    ) -> tuple[State, record_pb2.Progress]:
        """What the first of `keepers`, latest first, has of `stage`; what this node carries needs no download, and
        serves when the others fail. Raises Unavailable."""
        own = self.carried if self._presence.me in keepers else None
        if own is None or keepers[0] != self._presence.me:
            try:
                state, offer = await self.download(
                    replica, stage, lambda: keepers, cut=cut, compare=compare, accept=accept, limits=KEPT
                )
                return state, offer.progress
            except Unavailable:
                if own is None:
                    raise
        assert own is not None
        whole = own.sizes == replica.sizes_of(stage)
        state = (own.part(cut) if whole else own).state
        if accept is not None:
            await accept(state)
        return state, own.progress

    async def download(
        self,
        replica: Replica,
        stage: int,
        donors: Callable[[], Sequence[PeerId]],
        *,
        cut: Cut = WHOLE,
        compare: Compare | None = None,
        accept: Accept | None = None,
        limits: DownloadLimits | None = None,
    ) -> tuple[State, wire.Snapshot]:
        """See recovery/download.py. Raises Unavailable."""
        state, offer = await download(
            self._line,
            donors,
            stage,
            self._run_id,
            replica.sizes_of(stage),
            limits or DownloadLimits(),
            self._telemetry,
            cut=cut,
            rounds_max=self._rounds_max,
            compare=compare,
            accept=accept,
            helpers=lambda: self._helpers(stage),
        )
        self.nbytes += offer.nbytes
        return state, offer

    def still(self, seen: frozenset[PeerId], stage: int) -> Sequence[PeerId]:
        """Donors of `stage` as they are known now, those that answered a moment ago first."""
        now = donors_of(self._swarm(), stage, self._presence.me)
        return [peer for peer in now if peer in seen] + [peer for peer in now if peer not in seen]

    def _helpers(self, stage: int) -> list[PeerId]:
        """Who may hold the very bytes a donor offers: joiners that came a moment before, then the others."""
        members = self._swarm().stages[stage]
        syncing = [m.peer for m in members if m.state == record_pb2.NODE_STATE_SYNCING]
        return syncing + [m.peer for m in members if m.state == record_pb2.NODE_STATE_TRAINING]

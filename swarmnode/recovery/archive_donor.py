"""The giving side of an archive: slow weights for the machine that copies the run for its owner, within a budget.

It has a place of its own, so it takes none from joiners. Only the slow weights are copied (a third to a fifth of a
state), on the compute thread; they are hashed elsewhere.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from swarmnode.errors import Busy, RemoteFault
from swarmnode.ids import PeerId, RunId
from swarmnode.ports import Answer, Call, Telemetry
from swarmnode.recovery.donor import DonorLimits, SnapshotDonor
from swarmnode.recovery.snapshot import SLOW, Snapshot, StateSlice
from swarmnode.wire import call_pb2 as wire

BUSY_MAX_S = 3600.0  # guess: then it is worth asking again, whatever the budget says


@dataclass(frozen=True, slots=True)
class ArchiveBudget:
    """Limits on the cost of archiving to a node, for all holders of the owner's warrant together. All are guesses."""

    rest_s: float = 10.0  # between two snapshots, at least; of one that was not pulled other replicas were not ready
    share: float = 0.5  # of the time that a copy is pulled, at most
    made_share: float = 0.01  # of the time that copies are made and hashed, at most


class ArchiveDonor:
    """Serves "snapshot" and "chunk" to callers with the owner's warrant (node/caller_check.py checks it)."""

    def __init__(
        self,
        run_id: RunId,
        stage: int,
        take: Callable[[], Awaitable[Snapshot]],
        offload: Callable[[Callable[[], wire.Snapshot]], Awaitable[wire.Snapshot]],
        telemetry: Telemetry,
        budget: ArchiveBudget = ArchiveBudget(),
    ) -> None:
        """`take` copies the slow weights on the compute thread; `offload` hashes them away from it."""
        self._stage = stage
        self._budget = budget
        # Archives get one of two places: a donor reserves one for peers that cannot work without the state.
        limits = DonorLimits(downloads_max=2)
        self._donor = SnapshotDonor(run_id, stage, lambda cut: take(), offload, telemetry, limits)
        self._begun_s = self._made_s = 0.0
        self._next_s = -math.inf

    def close(self) -> None:
        """Forget every copy."""
        self._donor.close()

    async def offer(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "snapshot". Raises RemoteFault for anything but the slow weights of this stage, Busy while the
        budget is used up or another archive copies, Unavailable when this replica has no state to give."""
        asked = call.header.snapshot
        if asked.stage != self._stage or StateSlice.of(asked) != SLOW or not asked.nobody_waits:
            raise RemoteFault(f"an archive may copy the slow weights of stage {self._stage} here, and nothing else")
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_s:
            raise Busy("an archive has copied this replica a moment ago", min(self._next_s - now_s, BUSY_MAX_S))
        self._begun_s, self._made_s, self._next_s = now_s, 0.0, math.inf  # until this one is made
        self._donor.close()  # of two copies the older one goes before the new one takes memory
        try:
            return await self._donor.offer(peer, call)
        finally:
            self._made_s = asyncio.get_running_loop().time() - now_s
            self._next_s = now_s + self._made_s + self._budget.rest_s

    async def chunk(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "chunk"; raises as SnapshotDonor.chunk does."""
        answer = await self._donor.chunk(peer, call)
        took_s = asyncio.get_running_loop().time() - self._begun_s
        rest_s = max(took_s / self._budget.share, self._made_s / self._budget.made_share)
        self._next_s = max(self._next_s, self._begun_s + rest_s)
        return answer


@dataclass(frozen=True, slots=True)
class StageDonor:
    """Both donors of a stage as one: callers for which `archives` is true are served by `archive`."""

    joiners: SnapshotDonor
    archive: ArchiveDonor
    archives: Callable[[PeerId], bool]

    async def offer(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "snapshot"."""
        return await (self.archive if self.archives(peer) else self.joiners).offer(peer, call)

    async def chunk(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "chunk"."""
        return await (self.archive if self.archives(peer) else self.joiners).chunk(peer, call)

    def close(self) -> None:
        """Forget every copy."""
        self.archive.close()
        self.joiners.close()


__all__ = ["ArchiveBudget", "ArchiveDonor", "StageDonor"]

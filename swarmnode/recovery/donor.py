"""The giving side of a download: snapshots made on demand, at most two alive, forgotten when idle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarmnode.errors import Busy, RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId
from swarmnode.metrics import name
from swarmnode.ports import Answer, Call, Telemetry, Transport, WireTensor
from swarmnode.recovery.donor_places import DonorLimits, DonorPlaces, largeness
from swarmnode.recovery.snapshot import WHOLE, Snapshot, StateSlice
from swarmnode.wire import call_pb2 as wire

SNAPSHOTS_MAX = 2
PARTS_MAX = 8  # guess: parts kept of a snapshot: slow weights, embedding or head, all of it, slices


@dataclass(slots=True)
class _KeptSnapshot:
    snapshot: Snapshot
    made_s: float
    asked_s: float
    parts: dict[StateSlice, Snapshot] = field(default_factory=dict)  # all share its memory


class SnapshotDonor:
    """Serves "snapshot" and "chunk" for one stage. `close` forgets everything and stops the timer.

    `take` copies the replica's state on the compute thread, with its round and progress, and hashes it where the whole
    is wanted. `offload` runs all other hashing away from the event loop. `kept` returns the snapshot of another stage
    that this node keeps (recovery/neighbour_backup.py), None without one; it is served as well.
    """

    def __init__(
        self,
        run_id: RunId,
        stage: int,
        take: Callable[[StateSlice], Awaitable[Snapshot]],
        offload: Callable[[Callable[[], wire.Snapshot]], Awaitable[wire.Snapshot]],
        telemetry: Telemetry,
        limits: DonorLimits | None = None,
        kept: Callable[[int], Snapshot | None] = lambda stage: None,
        received: Snapshot | None = None,
    ) -> None:
        """`received` is the snapshot that this replica itself was restored from.

        It is served as well to peers that still download it, so that its donor does not serve many joiners alone.
        """
        self._run_id = run_id
        self._stage = stage
        self._take = take
        self._offload = offload
        self._telemetry = telemetry
        self._limits = limits or DonorLimits()
        self._other = kept
        self._others: dict[int, _KeptSnapshot] = {}
        self._kept: list[_KeptSnapshot] = []  # oldest first
        self._places = DonorPlaces(self._limits)
        self._making = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        if received is not None:
            self._kept.append(_KeptSnapshot(received, float("-inf"), self._now_s(), {WHOLE: received}))
            self._arm()

    def serve(self, transport: Transport) -> None:
        """Register both handlers with `transport`."""
        transport.serve("snapshot", self.offer, tensor_bytes_max=0)
        transport.serve("chunk", self.chunk, tensor_bytes_max=0)

    def close(self) -> None:
        self._kept.clear()
        self._places.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def alive(self) -> int:
        """Snapshots in memory."""
        return len(self._kept)

    async def offer(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "snapshot": the manifest of a snapshot of round `round_min` or later.

        Raises RemoteFault for another run or stage, Busy when too many peers download or two snapshots are in use,
        Unavailable when this replica has not come to that round.
        """
        asked = call.header.snapshot
        self._check_run(call)
        cut = StateSlice.of(asked)
        kept = self._of_other(asked.stage, asked.round_min) if asked.stage != self._stage else None
        hurries, newcomer = not asked.nobody_waits, peer not in self._places
        if newcomer:
            self._places.share(peer)
        self._places.admit(peer, hurries)
        try:
            async with self._making:
                if newcomer:
                    self._places.share(peer)  # by now the sizes are known of downloads that began just before
                kept = kept or self._usable(asked.round_min) or await self._make(asked.round_min, cut)
                part = await self._part(kept, cut)
        except BaseException:
            self._places.leave(peer)
            raise
        kept.asked_s = self._now_s()
        self._places.admit(peer, hurries)  # it may have lost its place while the state was copied
        self._places.offered(peer, part)
        self._telemetry.event("state.served", peer=peer, stage=asked.stage, round=part.round_index)
        return Answer(wire.Reply(snapshot=part.manifest()))

    async def _part(self, kept: _KeptSnapshot, cut: StateSlice) -> Snapshot:
        """The part `cut` of the snapshot `kept`, hashed."""
        part = kept.parts.get(cut)
        if part is None:
            part = kept.snapshot if cut == WHOLE else kept.snapshot.part(cut)
            if not part.hashed:
                await self._offload(part.manifest)
            if len(kept.parts) >= PARTS_MAX:
                kept.parts.clear()
            kept.parts[cut] = part
        return part

    async def chunk(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "chunk": its bytes.

        Raises RemoteFault for an index that does not exist, Busy, and Unavailable when the snapshot has been forgotten,
        or the caller's place given to another: the caller then asks for a new one.
        """
        asked = call.header.chunk
        self._check_run(call)
        found = [
            (kept, part)
            for kept in (*self._kept, *self._others.values())
            for part in kept.parts.values()
            if part.id == asked.snapshot_id
        ]
        if not found and asked.stage != self._stage and (other := self._other(asked.stage)) is not None:
            kept = self._of_other(asked.stage, 0)
            if other.id == asked.snapshot_id:
                found = [(kept, kept.parts.setdefault(WHOLE, other))]
        if not found:
            raise Unavailable(f"snapshot {asked.snapshot_id[:4].hex()} is not kept here any more")
        kept, part = found[0]
        if asked.index >= part.chunks:
            raise RemoteFault(f"chunk {asked.index} asked of a snapshot of {part.chunks}")
        self._places.asked(peer, part)
        kept.asked_s = self._now_s()
        data = part.chunk(asked.index)
        self._telemetry.count(name.SNAPSHOT_BYTES, data.nbytes, direction="sent")
        return Answer(wire.Reply(chunk=wire.Chunk(index=asked.index)), (WireTensor("u8", (data.nbytes,), data),))

    def _of_other(self, stage: int, round_min: int) -> _KeptSnapshot:
        """The snapshot of another stage. Raises RemoteFault when this node keeps none, Unavailable for one too old."""
        snapshot = self._other(stage)
        if snapshot is None:
            raise RemoteFault(f"snapshot of stage {stage} asked of a replica of stage {self._stage}")
        if snapshot.round_index < round_min:
            raise Unavailable(f"round {snapshot.round_index} of stage {stage} is kept here; {round_min} was asked for")
        kept = self._others.get(stage)
        if kept is None or kept.snapshot is not snapshot:
            kept = self._others[stage] = _KeptSnapshot(snapshot, self._now_s(), self._now_s())
        return kept

    def _check_run(self, call: Call) -> None:
        if call.header.run_id != self._run_id:
            raise RemoteFault(f"state of run {call.header.run_id[:8]!r} asked of a node of run {self._run_id[:8]!r}")

    def _usable(self, round_min: int) -> _KeptSnapshot | None:
        """The newest snapshot if it is late enough, and fresh or one of two in use; else None."""
        if not self._kept or self._kept[-1].snapshot.round_index < round_min:
            return None
        newest = self._kept[-1]
        if newest.made_s == float("-inf"):  # received, so older than this replica's training
            return None
        fresh = self._now_s() - newest.made_s <= self._limits.fresh_s
        return newest if fresh or self._full() else None

    def _full(self) -> bool:
        """Whether every snapshot kept is still in use and there is no room for another. After a turn a snapshot makes
        room for a newer one: its downloads go on with the chunks they have, and nobody is kept from a later round."""
        now_s = self._now_s()
        pulled = (
            now_s - kept.asked_s < self._idle_s(kept) / 2 and now_s - kept.made_s < self._places.turn_s(kept.snapshot)
            for kept in self._kept
        )
        return len(self._kept) >= SNAPSHOTS_MAX and all(pulled)

    async def _make(self, round_min: int, cut: StateSlice) -> _KeptSnapshot:
        """A new snapshot, of which `cut` is wanted. When there are two, it replaces the one idle longest."""
        if self._full():
            raise Busy(
                f"{len(self._kept)} snapshots are being pulled, none of round {round_min}", self._limits.busy_retry_s
            )
        if len(self._kept) >= SNAPSHOTS_MAX:  # before the new one takes memory
            now_s = self._now_s()
            idle = [one for one in self._kept if now_s - one.asked_s >= self._idle_s(one) / 2]
            self._kept.remove(min(idle or self._kept, key=lambda kept: kept.asked_s if idle else kept.made_s))
        snapshot = await self._take(cut)
        if snapshot.round_index < round_min:
            raise Unavailable(
                f"round {snapshot.round_index} here; {round_min} was asked for", self._limits.busy_retry_s
            )
        now_s = self._now_s()
        kept = _KeptSnapshot(snapshot, made_s=now_s, asked_s=now_s)
        self._kept.append(kept)
        if self._timer is None:
            self._arm()
        return kept

    def _arm(self) -> None:
        """Set the timer to the moment at which the snapshot idle longest is forgotten."""
        first_s = min(self._forgotten_s(kept) for kept in self._kept)
        self._timer = asyncio.get_running_loop().call_at(first_s, self._expire)

    def _expire(self) -> None:
        now_s = self._now_s()
        self._timer = None
        self._kept = [kept for kept in self._kept if self._forgotten_s(kept) > now_s]
        if self._kept:
            self._arm()

    def _forgotten_s(self, kept: _KeptSnapshot) -> float:
        """The loop time at which `kept` is forgotten.

        Timer and test share this sum. Rounded in two ways, the timer could fire at once for ever.
        """
        return kept.asked_s + self._idle_s(kept)

    def _idle_s(self, kept: _KeptSnapshot) -> float:
        """Seconds without a request after which `kept` is forgotten. Larger chunks are asked for more rarely."""
        return self._limits.idle_s * largeness(kept.snapshot)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


__all__ = ["DonorLimits", "SnapshotDonor"]

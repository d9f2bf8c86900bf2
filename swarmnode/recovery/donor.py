"""The giving side of a download: snapshots made on demand, at most two alive, forgotten when nobody asks any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from swarmnode.errors import Busy, RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId
from swarmnode.metrics import name
from swarmnode.ports import Answer, Call, Telemetry, Transport, WireTensor
from swarmnode.recovery.snapshot import CHUNK_NBYTES, CHUNKS_AT_ONCE, WHOLE, Cut, Snapshot
from swarmnode.wire import call_pb2 as wire

SNAPSHOTS_MAX = 2
REFUSED_MAX = 1024  # newcomers remembered
PARTS_MAX = 8  # guess: slow weights, embedding or head, all of it


@dataclass(frozen=True, slots=True)
class DonorLimits:
    """What giving may cost. All are guesses."""

    idle_s: float = 60.0  # a snapshot nobody asked for in this time, for each MiB of a chunk, is forgotten
    fresh_s: float = 10.0  # a newcomer gets the snapshot made for another one up to this old
    downloads_max: int = 4  # peers that pull at once
    chunk_nbytes: int = CHUNK_NBYTES
    puller_idle_s: float = 10.0  # one that has not asked in this time, for each MiB of a chunk, pulls no more
    busy_retry_s: float = 2.0
    line_nbytes: float = 1e7  # a second, that our line gives as far as nothing is known of it
    share_s: float = 30.0  # who would share our line with another for longer than this goes elsewhere, or waits
    retry_max_s: float = 60.0  # and asks again then: somebody may have given up
    refused_max_s: float = 600.0  # and shares after so long: one that pulls slowly everywhere must not keep others out


@dataclass(slots=True)
class _Kept:
    snapshot: Snapshot
    made_s: float
    asked_s: float
    parts: dict[Cut, Snapshot] = field(default_factory=dict)  # by what was asked of it; all share its memory


@dataclass(slots=True)
class _Puller:
    """A peer that pulls state here."""

    until_s: float  # when its place is another's, unless it asks again
    hurries: bool = True  # somebody waits for what it pulls
    chunks: int = 0  # it has asked for
    of: int = 0  # chunks of what it pulls; 0: not made yet
    nbytes: int = 0  # of it
    begun_s: float = 0.0  # when it asked for the first

    def left_s(self, now_s: float, line_nbytes: float) -> float:
        """Until it has everything, at the rate so far."""
        through = self.chunks - CHUNKS_AT_ONCE
        if through > 0:
            return (self.of - through) * (now_s - self.begun_s) / through
        waits_s = now_s - self.begun_s if self.chunks else 0.0
        return max(self.nbytes / line_nbytes, waits_s * self.of / CHUNKS_AT_ONCE)


class SnapshotDonor:
    """Serves "snapshot" and "chunk" for one stage. `close` forgets everything and stops the timer.

    `take` copies the replica's state (on the compute thread) and says of which round and progress it is, hashed already
    where the whole is wanted; `offload` runs the other hashing away from the event loop. `kept` gives the snapshot of
    another stage that is kept here for the day that stage is lost (recovery/keeper.py); it is served as well.
    """

    def __init__(
        self,
        run_id: RunId,
        stage: int,
        take: Callable[[Cut], Awaitable[Snapshot]],
        offload: Callable[[Callable[[], wire.Snapshot]], Awaitable[wire.Snapshot]],
        telemetry: Telemetry,
        limits: DonorLimits = DonorLimits(),
        kept: Callable[[int], Snapshot | None] = lambda stage: None,
        received: Snapshot | None = None,
    ) -> None:
        """`received` is what this replica itself began with: others that still pull the same get it here too, so that
        many joiners at once do not all hang on one donor."""
        self._run_id = run_id
        self._stage = stage
        self._take = take
        self._offload = offload
        self._telemetry = telemetry
        self._limits = limits
        self._other = kept
        self._others: dict[int, _Kept] = {}
        self._kept: list[_Kept] = []  # oldest first
        self._pulling: dict[PeerId, _Puller] = {}
        self._refused: dict[PeerId, float] = {}  # when newcomers were first told to go elsewhere, oldest first
        self._making = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        if received is not None:
            self._kept.append(_Kept(received, float("-inf"), self._now_s(), {WHOLE: received}))
            self._arm()

    def serve(self, transport: Transport) -> None:
        """Register both handlers."""
        transport.serve("snapshot", self.offer, tensor_bytes_max=0)
        transport.serve("chunk", self.chunk, tensor_bytes_max=0)

    def close(self) -> None:
        self._kept.clear()
        self._pulling.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def alive(self) -> int:
        """Snapshots in memory."""
        return len(self._kept)

    async def offer(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "snapshot": the manifest of a snapshot of round `round_min` or later.

        Raises RemoteFault for another run or stage, Busy when too many peers pull or two snapshots are being pulled,
        Unavailable when this replica has not come to that round.
        """
        asked = call.header.snapshot
        self._check_run(call)
        cut = Cut.of(asked)
        kept = self._of_other(asked.stage, asked.round_min) if asked.stage != self._stage else None
        hurries, newcomer = not asked.nobody_waits, peer not in self._pulling
        if newcomer:
            self._share(peer)
        self._admit(peer, hurries)
        try:
            async with self._making:
                if newcomer:
                    self._share(peer)  # now it is known what those get who came just before
                kept = kept or self._usable(asked.round_min) or await self._make(asked.round_min, cut)
                part = await self._part(kept, cut)
        except BaseException:
            self._pulling.pop(peer, None)
            raise
        kept.asked_s = self._now_s()
        self._refused.pop(peer, None)
        self._wait_for(peer, part)
        self._telemetry.event("state.served", peer=peer, stage=asked.stage, round=part.round_index)
        return Answer(wire.Reply(snapshot=part.manifest()))

    async def _part(self, kept: _Kept, cut: Cut) -> Snapshot:
        """What `cut` is of the snapshot `kept`, hashed."""
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
        """Handler of "chunk". Raises RemoteFault for an index that does not exist, Busy, Unavailable when the snapshot
        has been forgotten: the caller then asks for a new one."""
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
        self._admit(peer)
        kept.asked_s = self._now_s()
        puller = self._wait_for(peer, part)
        if not puller.chunks:
            puller.begun_s = self._now_s()
        puller.chunks += 1
        if puller.chunks >= part.chunks:  # all of it is on its way: others begin
            self._pulling.pop(peer, None)
        data = part.chunk(asked.index)
        self._telemetry.count(name.SNAPSHOT_BYTES, data.nbytes, direction="sent")
        return Answer(wire.Reply(chunk=wire.Chunk(index=asked.index)), (WireTensor("u8", (data.nbytes,), data),))

    def _of_other(self, stage: int, round_min: int) -> _Kept:
        """The snapshot of another stage. Raises RemoteFault when none can be here, Unavailable for one too old."""
        snapshot = self._other(stage)
        if snapshot is None:
            raise RemoteFault(f"snapshot of stage {stage} asked of a replica of stage {self._stage}")
        if snapshot.round_index < round_min:
            raise Unavailable(f"round {snapshot.round_index} of stage {stage} is kept here; {round_min} was asked for")
        kept = self._others.get(stage)
        if kept is None or kept.snapshot is not snapshot:
            kept = self._others[stage] = _Kept(snapshot, self._now_s(), self._now_s())
        return kept

    def _check_run(self, call: Call) -> None:
        if call.header.run_id != self._run_id:
            raise RemoteFault(f"state of run {call.header.run_id[:8]!r} asked of a node of run {self._run_id[:8]!r}")

    def _share(self, newcomer: PeerId) -> None:
        """Raises Busy where `newcomer` would share our line for long. Of two large states that are given one after the
        other the first is there in half the time, the second no later, and it has two donors to choose from."""
        now_s = self._leave_idle()
        others = [one for peer, one in self._pulling.items() if peer != newcomer and one.hurries]
        left_s = max([one.left_s(now_s, self._limits.line_nbytes) for one in others], default=0.0)
        if left_s > self._limits.share_s:
            since_s = self._refused.setdefault(newcomer, now_s)
            if len(self._refused) > REFUSED_MAX:
                del self._refused[next(iter(self._refused))]
            if now_s - since_s < self._limits.refused_max_s:
                raise Busy("another pulls a large state here", min(left_s, self._limits.retry_max_s))

    def _admit(self, peer: PeerId, hurries: bool = True) -> None:
        """Count `peer` among those that pull, or raise Busy."""
        now_s = self._leave_idle()
        if peer not in self._pulling:
            if len(self._pulling) >= self._limits.downloads_max - (not hurries):  # one place is for who hurries
                raise Busy(f"{len(self._pulling)} peers pull state here already", self._limits.busy_retry_s)
            # A state is copied and hashed first.
            self._pulling[peer] = _Puller(now_s + self._limits.idle_s, hurries)

    def _leave_idle(self) -> float:
        """Forget those that pull no more; returns the time of now."""
        now_s = self._now_s()
        self._pulling = {peer: puller for peer, puller in self._pulling.items() if puller.until_s > now_s}
        return now_s

    def _wait_for(self, peer: PeerId, part: Snapshot) -> _Puller:
        """`peer`, who pulls `part`, keeps its place: larger chunks are asked for more rarely."""
        puller = self._pulling.setdefault(peer, _Puller(0.0))  # its place may have gone while the state was copied
        puller.until_s = self._now_s() + self._limits.puller_idle_s * _largeness(part)
        puller.of, puller.nbytes = part.chunks, part.nbytes
        return puller

    def _usable(self, round_min: int) -> _Kept | None:
        """The newest snapshot if it will do: late enough, and fresh or one of two that are being pulled."""
        if not self._kept or self._kept[-1].snapshot.round_index < round_min:
            return None
        newest = self._kept[-1]
        if newest.made_s == float("-inf"):  # what we received: of before we trained
            return None
        fresh = self._now_s() - newest.made_s <= self._limits.fresh_s
        return newest if fresh or self._full() else None

    def _full(self) -> bool:
        """Whether every snapshot kept is still being pulled and there is no room for another."""
        now_s = self._now_s()
        pulled = (now_s - kept.asked_s < self._idle_s(kept) / 2 for kept in self._kept)
        return len(self._kept) >= SNAPSHOTS_MAX and all(pulled)

    async def _make(self, round_min: int, cut: Cut) -> _Kept:
        """A new snapshot, of which `cut` is wanted, in the place of the one idle longest when there are two."""
        if self._full():
            raise Busy(
                f"{len(self._kept)} snapshots are being pulled, none of round {round_min}", self._limits.busy_retry_s
            )
        if len(self._kept) >= SNAPSHOTS_MAX:  # before the new one takes memory
            self._kept.remove(min(self._kept, key=lambda kept: kept.asked_s))
        snapshot = await self._take(cut)
        if snapshot.round_index < round_min:
            raise Unavailable(
                f"round {snapshot.round_index} here; {round_min} was asked for", self._limits.busy_retry_s
            )
        now_s = self._now_s()
        kept = _Kept(snapshot, made_s=now_s, asked_s=now_s)
        self._kept.append(kept)
        if self._timer is None:
            self._arm()
        return kept

    def _arm(self) -> None:
        """Look again when the snapshot idle longest would be forgotten."""
        first_s = min(self._forgotten_s(kept) for kept in self._kept)
        self._timer = asyncio.get_running_loop().call_at(first_s, self._expire)

    def _expire(self) -> None:
        now_s = self._now_s()
        self._timer = None
        self._kept = [kept for kept in self._kept if self._forgotten_s(kept) > now_s]
        if self._kept:
            self._arm()

    def _forgotten_s(self, kept: _Kept) -> float:
        """When `kept` goes. Timer and test share this sum: rounded in two ways, the timer could be armed for now, for
        ever."""
        return kept.asked_s + self._idle_s(kept)

    def _idle_s(self, kept: _Kept) -> float:
        """Larger chunks are asked for more rarely."""
        return self._limits.idle_s * _largeness(kept.snapshot)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _largeness(snapshot: Snapshot) -> float:
    """Of its chunks, in MiB: how many times as long as for the smallest it takes until another is asked for."""
    return max(1.0, snapshot.chunk_nbytes / CHUNK_NBYTES)

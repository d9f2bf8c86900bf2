"""The giving side of a download: snapshots made on demand, at most two alive, forgotten when idle.

A bounded number of peers downloads at once; the others wait. A peer keeps its place for a turn, and for longer while
nobody waits. A turn is long enough for a slow but honest home to get a useful share of the state. A download that
loses its place goes on later with the chunks that it has. At the end of a turn the place goes to a peer that had no
turn here, and among equals to the one that waits longest.

Only seconds count, because anything else is free for a peer: it may ask for one chunk for ever, or for all but the last
at once, and read none. Beside `n` other keys an honest joiner waits for the line (`share`), and then for at most
`n / downloads_max` turns. New keys are newcomers, and each gets a turn. Only the membership bounds them: with an access
list a key costs a pass; in an open run it costs nothing, and a joiner depends on other donors.

An archive copies slow weights alone (a third to a fifth of a state) and has a place of its own within a budget, so it
takes none from joiners.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from swarmnode.base.concurrency import forever
from swarmnode.base.errors import Busy, RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.ports import Answer, Call, Telemetry, Transport, WireTensor
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import access_pb2
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.transfer.snapshot import CHUNK_NBYTES, CHUNKS_AT_ONCE, SLOW, WHOLE, Snapshot, StateSlice
from swarmnode.net.membership.liveness import TRIES


@dataclass(frozen=True, slots=True)
class DonorLimits:
    """Bounds of the cost of giving. All are guesses."""

    idle_s: float = 60.0  # a snapshot without a request is forgotten after this, times the MiB of a chunk
    fresh_s: float = 1.0  # a snapshot is given to others until this age
    made_share: float = 0.05  # it is also given to others until making snapshots takes less than this share of the time
    downloads_max: int = 4  # peers that download at once
    chunk_nbytes: int = CHUNK_NBYTES
    puller_idle_s: float = 10.0  # a peer without a request has given up after this, times the MiB of a chunk
    busy_retry_s: float = 2.0
    line_nbytes: float = 1e7  # assumed bytes a second of the uplink before it is measured
    share_s: float = 30.0  # a newcomer is refused a place if it would share the uplink for longer
    retry_max_s: float = 60.0  # a refused newcomer asks again after at most this: another may have given up
    refused_max_s: float = 600.0  # after this it shares: a slow download must not keep others out for ever
    turn_s: float = 60.0  # least seconds of a turn: after DownloadLimits.alone_s the client keeps its chunks
    turn_share: float = 0.1  # share of the state in a turn at `puller_idle_s` a chunk: twice DownloadLimits.fruitful


@dataclass(slots=True)
class Puller:
    """A peer that downloads state here."""

    since_s: float  # loop time at which its turn began
    turn_s: float
    until_s: float  # it loses its place then, unless it asks again; once it has none: when it lost it
    hurries: bool = True  # it cannot work without the state
    chunks: int = 0  # chunks it has asked for
    of: int = 0  # chunks of the snapshot it downloads; 0: not made yet
    nbytes: int = 0  # of that snapshot
    snapshot_id: bytes = b""
    begun_s: float = 0.0  # loop time of its first chunk request

    def left_s(self, now_s: float, line_nbytes: float) -> float:
        """Seconds until it has everything, at the rate so far."""
        through = self.chunks - CHUNKS_AT_ONCE
        if through > 0:
            return (self.of - through) * (now_s - self.begun_s) / through
        waits_s = now_s - self.begun_s if self.chunks else 0.0
        return max(self.nbytes / line_nbytes, waits_s * self.of / CHUNKS_AT_ONCE)


@dataclass(slots=True)
class _Refused:
    """A newcomer that was refused."""

    since_s: float  # loop time of the first refusal
    claims_s: float = float("-inf")  # until then it is taken to wait for a place


class DonorPlaces:
    """The places of one donor, by peer, and the peers that wait for one."""

    def __init__(self, limits: DonorLimits) -> None:
        self._limits = limits
        self._pulling: dict[PeerId, Puller] = {}
        self._refused = Remembered[PeerId, _Refused]()
        self._had = Remembered[PeerId, Puller]()  # peers that had a turn, and the last one of each

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._pulling

    def clear(self) -> None:
        """Take all places back."""
        self._pulling.clear()

    def leave(self, peer: PeerId) -> None:
        """End the turn of `peer`, if it has a place."""
        puller = self._pulling.pop(peer, None)
        if puller is not None:
            puller.until_s = min(puller.until_s, _now_s())
            if puller.chunks > CHUNKS_AT_ONCE or puller.until_s - puller.since_s >= self._limits.turn_s:
                self._had[peer] = puller  # not those that only took a sample

    def turn_s(self, part: Snapshot) -> float:
        """Seconds of a turn of a peer that downloads `part`."""
        chunks_s = part.chunks * self._limits.puller_idle_s * largeness(part)
        return max(self._limits.turn_s, self._limits.turn_share * chunks_s)

    def share(self, newcomer: PeerId) -> None:
        """Raise Busy when `newcomer` would share this node's uplink for long.

        When two large states are sent one after the other, the first arrives in half the time and the second no later;
        the second joiner then also has two donors to choose from.
        """
        now_s = self._leave_idle()
        others = [one for peer, one in self._pulling.items() if peer != newcomer and one.hurries]
        left_s = max([one.left_s(now_s, self._limits.line_nbytes) for one in others], default=0.0)
        if left_s > self._limits.share_s:
            refused = self._refuse(newcomer, now_s)
            if now_s - refused.since_s < self._limits.refused_max_s:
                raise Busy("another pulls a large state here", min(left_s, self._limits.retry_max_s))

    def admit(self, peer: PeerId, hurries: bool = True) -> None:
        """Give `peer`, which asks for a snapshot, a place for a turn. Raises Busy.

        One place is kept for peers that hurry, and only they take that of a peer whose turn is over.
        """
        now_s = self._leave_idle()
        if peer in self._pulling:
            return
        free = self._limits.downloads_max - (not hurries) - len(self._pulling)
        over = self._over(now_s) if hurries and self._waits_s(peer, now_s) >= self._limits.share_s else []
        if free + len(over) <= self._ahead(peer, now_s):
            if hurries:
                # Who did not come back so often waits no more.
                self._refuse(peer, now_s).claims_s = now_s + TRIES * self._limits.busy_retry_s
            raise self._busy()
        if free <= 0:
            self.leave(over[0])
        self._enter(peer, now_s, hurries)

    def offered(self, peer: PeerId, part: Snapshot) -> None:
        """Renew the place of `peer`, which gets the offer of `part`."""
        self._refused.pop(peer, None)
        self._renew(self._pulling[peer], part)

    def record_request(self, peer: PeerId, part: Snapshot) -> None:
        """Count a chunk of `part`, which `peer` asks for. With the last one it leaves: others begin.

        A peer without a place gets one that nobody waits for, or Busy is raised, or Unavailable when it lost its place
        before it had everything: it then waits for a new offer, and does not take the loss for a failure of this donor.
        """
        now_s = self._leave_idle()
        if peer not in self._pulling:
            if self._limits.downloads_max - len(self._pulling) <= self._ahead(peer, now_s):
                last = self._had.get(peer)
                if last is not None and last.chunks < last.of:
                    raise Unavailable("its place here was given to another", self._limits.busy_retry_s)
                raise self._busy()
            self._enter(peer, now_s)
        puller = self._pulling[peer]
        self._renew(puller, part)
        if not puller.chunks:
            puller.begun_s = now_s
        puller.chunks += 1
        if puller.chunks >= part.chunks:
            self.leave(peer)

    def pulls(self, parts: Collection[Snapshot]) -> bool:
        """Whether a peer downloads one of `parts`, or lost its place lately before it had everything."""
        now_s = self._leave_idle()
        ids = {part.id for part in parts}
        lost = [one for one in self._had.values() if one.until_s > now_s - self._limits.idle_s / 2]
        return any(one.snapshot_id in ids and one.chunks < one.of for one in (*self._pulling.values(), *lost))

    def _renew(self, puller: Puller, part: Snapshot) -> None:
        """Renew the place of `puller`, which downloads `part`. Larger chunks are asked for more rarely."""
        now_s = _now_s()
        idle_s = self._limits.puller_idle_s * largeness(part)
        if not puller.of:  # the state was copied and hashed until now
            puller.since_s = now_s
        puller.until_s = now_s + idle_s
        puller.of = part.chunks
        puller.nbytes = part.nbytes
        puller.snapshot_id = part.id
        puller.turn_s = self.turn_s(part)

    def _enter(self, peer: PeerId, now_s: float, hurries: bool = True) -> None:
        # The state is copied and hashed before the first chunk.
        self._pulling[peer] = Puller(now_s, self._limits.turn_s, now_s + self._limits.idle_s, hurries)

    def _busy(self) -> Busy:
        return Busy(f"{len(self._pulling)} peers pull state here already", self._limits.busy_retry_s)

    def _refuse(self, peer: PeerId, now_s: float) -> _Refused:
        if peer not in self._refused:
            self._refused[peer] = _Refused(now_s)
        return self._refused[peer]

    def _waits_s(self, peer: PeerId, now_s: float) -> float:
        return now_s - self._refused[peer].since_s if peer in self._refused else 0.0

    def _ahead(self, peer: PeerId, now_s: float) -> int:
        """Peers that wait for a place and come before `peer`."""

        def rank(one: PeerId) -> tuple[bool, float]:
            return one in self._had, -self._waits_s(one, now_s)

        waiting = [one for one, refused in self._refused.items() if refused.claims_s > now_s]
        return sum(one not in self._pulling and rank(one) < rank(peer) for one in waiting)

    def _over(self, now_s: float) -> list[PeerId]:
        """Peers whose turn is over, in the order in which they lose their place: those that nobody waits for, those
        that had a turn before, those with the longest turn."""
        over = {peer: one for peer, one in self._pulling.items() if one.of and now_s - one.since_s >= one.turn_s}
        return sorted(over, key=lambda p: (over[p].hurries, p not in self._had, over[p].since_s))

    def _leave_idle(self) -> float:
        """Forget peers that have given up. Returns the loop time."""
        now_s = _now_s()
        for peer in [peer for peer, puller in self._pulling.items() if puller.until_s <= now_s]:
            self.leave(peer)
        return now_s


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def largeness(snapshot: Snapshot) -> float:
    """The size of the chunks of `snapshot` in MiB, at least 1: the time between two requests grows with it."""
    return max(1.0, snapshot.chunk_nbytes / CHUNK_NBYTES)


SNAPSHOTS_MAX = 2
PARTS_MAX = 8  # derived: all of it, slow weights, its ends, what newcomers take, and four slices of a check


@dataclass(slots=True)
class _KeptSnapshot:
    snapshot: Snapshot
    made_s: float
    took_s: float
    asked_s: float
    parts: dict[StateSlice, Snapshot] = field(default_factory=dict)  # all share its memory


class SnapshotDonor:
    """Serves "snapshot" and "chunk" for one stage. `close` forgets everything and stops the timer.

    `take` copies the replica's state on the compute thread, with its round and progress, and hashes it where the whole
    is wanted. `offload` runs all other hashing away from the event loop. `kept` returns the snapshot of another stage
    that this node keeps (keep/recovery/neighbour_backup.py), None without one; it is served as well.
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
    ) -> None:
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
        request = call.header.snapshot
        self._check_run(call)
        cut = StateSlice.of(request)
        kept = self._of_other(request.stage, request.round_min) if request.stage != self._stage else None
        hurries = not request.nobody_waits
        newcomer = peer not in self._places
        if newcomer:
            self._places.share(peer)
        self._places.admit(peer, hurries)
        try:
            async with self._making:
                if newcomer:
                    self._places.share(peer)  # by now the sizes are known of downloads that began just before
                kept = kept or self._usable(request.round_min) or await self._make(request.round_min, cut)
                part = await self._part(kept, cut)
        except BaseException:
            self._places.leave(peer)
            raise
        kept.asked_s = _now_s()
        self._places.admit(peer, hurries)  # it may have lost its place while the state was copied
        self._places.offered(peer, part)
        level = "info" if hurries else "debug"
        self._telemetry.event("state.served", level=level, peer=peer, stage=request.stage, round=part.round_index)
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
        request = call.header.chunk
        self._check_run(call)
        snapshots = [
            (kept, part)
            for kept in (*self._kept, *self._others.values())
            for part in kept.parts.values()
            if part.id == request.snapshot_id
        ]
        if not snapshots and request.stage != self._stage and (other := self._other(request.stage)) is not None:
            kept = self._of_other(request.stage, 0)
            if other.id == request.snapshot_id:
                snapshots = [(kept, kept.parts.setdefault(WHOLE, other))]
        if not snapshots:
            raise Unavailable(f"snapshot {request.snapshot_id[:4].hex()} is not kept here any more")
        kept, part = snapshots[0]
        if request.index >= part.chunks:
            raise RemoteFault(f"chunk {request.index} asked of a snapshot of {part.chunks}")
        self._places.record_request(peer, part)
        kept.asked_s = _now_s()
        data = part.chunk(request.index)
        self._telemetry.count(name.SNAPSHOT_BYTES, data.nbytes, direction="sent")
        return Answer(wire.Reply(chunk=wire.Chunk(index=request.index)), (WireTensor("u8", (data.nbytes,), data),))

    def _of_other(self, stage: int, round_min: int) -> _KeptSnapshot:
        """The snapshot of another stage. Raises RemoteFault when this node keeps none, Unavailable for one too old."""
        snapshot = self._other(stage)
        if snapshot is None:
            raise RemoteFault(f"snapshot of {stage_name(stage)} asked of a replica of {stage_name(self._stage)}")
        if snapshot.round_index < round_min:
            raise Unavailable(
                f"round {snapshot.round_index} of {stage_name(stage)} is kept here; {round_min} was asked for"
            )
        kept = self._others.get(stage)
        if kept is None or kept.snapshot is not snapshot:
            kept = self._others[stage] = _KeptSnapshot(snapshot, _now_s(), 0.0, _now_s())
        return kept

    def _check_run(self, call: Call) -> None:
        if call.header.run_id != self._run_id:
            raise RemoteFault(f"state of run {call.header.run_id[:8]!r} asked of a node of run {self._run_id[:8]!r}")

    def _usable(self, round_min: int) -> _KeptSnapshot | None:
        """The newest snapshot if it is late enough, and fresh or one of two in use; else None."""
        if not self._kept or self._kept[-1].snapshot.round_index < round_min:
            return None
        newest = self._kept[-1]
        fresh_s = max(self._limits.fresh_s, newest.took_s / self._limits.made_share)
        return newest if _now_s() - newest.made_s <= fresh_s or self._full() else None

    def _full(self) -> bool:
        """Whether every snapshot kept is still in use and there is no room for another."""
        return len(self._kept) >= SNAPSHOTS_MAX and all(map(self._pulled, self._kept))

    def _pulled(self, kept: _KeptSnapshot) -> bool:
        """Whether somebody downloads `kept`. After a turn it makes room for a newer one: its downloads go on with the
        chunks they have, and nobody is kept from a later round."""
        turn_s = self._places.turn_s(kept.snapshot)
        return _now_s() - kept.made_s < turn_s and self._places.pulls(kept.parts.values())

    async def _make(self, round_min: int, cut: StateSlice) -> _KeptSnapshot:
        """A new snapshot, of which `cut` is wanted. When there are two, it replaces the older one that is idle."""
        if self._full():
            raise Busy(f"{SNAPSHOTS_MAX} snapshots are pulled, none of round {round_min}", self._limits.busy_retry_s)
        if len(self._kept) >= SNAPSHOTS_MAX:  # before the new one takes memory
            self._kept.remove(next(one for one in self._kept if not self._pulled(one)))
        begun_s = _now_s()
        snapshot = await self._take(cut)
        if snapshot.round_index < round_min:
            raise Unavailable(
                f"round {snapshot.round_index} here; {round_min} was asked for", self._limits.busy_retry_s
            )
        now_s = _now_s()
        kept = _KeptSnapshot(snapshot, made_s=now_s, took_s=now_s - begun_s, asked_s=now_s)
        self._kept.append(kept)
        if self._timer is None:
            self._expire()
        return kept

    def _expire(self) -> None:
        """Forget snapshots that nobody asks for, and look again when the next one may be such."""
        now_s = _now_s()
        self._kept = [kept for kept in self._kept if self._until_s(kept) > now_s]
        ends_s = [self._until_s(kept) for kept in self._kept]
        self._timer = asyncio.get_running_loop().call_at(min(ends_s), self._expire) if ends_s else None

    def _until_s(self, kept: _KeptSnapshot) -> float:
        """The loop time at which `kept` is forgotten. Larger chunks are asked for more rarely."""
        return kept.asked_s + self._limits.idle_s * largeness(kept.snapshot)


GIVEN_STAGES = 2  # guess: stages that one keeps in memory for nodes that bring them back


class LoadedDonor:
    """Serves "snapshot" and "chunk" for stages that `load` reads from disk on request. `load` gets the snapshot in
    memory, and returns it if the disk has nothing newer. Raises Unavailable or RemoteFault as `load`."""

    def __init__(
        self,
        run_id: RunId,
        load: Callable[[int, Snapshot | None], Awaitable[Snapshot]],
        offload: Callable[[Callable[[], wire.Snapshot]], Awaitable[wire.Snapshot]],
        telemetry: Telemetry,
        warrant: Callable[[], access_pb2.Warrant | None] = lambda: None,
    ) -> None:
        """`warrant`: the owner's, of an archive, which each offer shows."""
        self._load = load
        self._warrant = warrant
        self._kept: dict[int, Snapshot] = {}
        self._loading = asyncio.Lock()
        none = -1  # is the stage that it serves itself, so nothing is ever copied
        self._donor = SnapshotDonor(run_id, none, lambda cut: forever(), offload, telemetry, kept=self._kept.get)
        self.chunk = self._donor.chunk

    async def offer(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "snapshot"."""
        stage = call.header.snapshot.stage
        async with self._loading:
            newest = await self._load(stage, self._kept.pop(stage, None))
            while len(self._kept) >= GIVEN_STAGES:
                del self._kept[next(iter(self._kept))]
            self._kept[stage] = newest
        answer = await self._donor.offer(peer, call)
        if (shown := self._warrant()) is not None:
            answer.header.snapshot.warrant.CopyFrom(shown)
        return answer

    def serve(self, transport: Transport) -> None:
        """Register both handlers with `transport`."""
        transport.serve("snapshot", self.offer, tensor_bytes_max=0)
        transport.serve("chunk", self.chunk, tensor_bytes_max=0)


@dataclass(frozen=True, slots=True)
class ArchiveBudget:
    """Limits on the cost of archiving to a node, for all holders of the owner's warrant together. All are guesses."""

    rest_s: float = 10.0  # between two snapshots, at least; of one that was not pulled other replicas were not ready
    share: float = 0.5  # of the time that a copy is pulled, at most
    made_share: float = 0.01  # of the time that copies are made and hashed, at most


@dataclass(eq=False)
class StageDonor:
    """Serves "snapshot" and "chunk" for a stage: to archives, callers with the owner's warrant
    (train/node/caller_check.py checks it), slow weights within a budget, and to all others what `joiners` gives.
    `archive` copies the slow weights for those whom `archives` says to be archives."""

    stage: int
    joiners: SnapshotDonor
    archive: SnapshotDonor
    archives: Callable[[PeerId], bool]
    budget: ArchiveBudget

    def __post_init__(self) -> None:
        self._begun_s = self._made_s = 0.0
        self._next_s = -math.inf

    def close(self) -> None:
        """Forget every copy. An archive that comes now gets a new one at once."""
        self._next_s = -math.inf
        self.archive.close()
        self.joiners.close()

    async def offer(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "snapshot". For archives, raises RemoteFault for anything but the slow weights of this stage, Busy
        while the budget is used up or another archive copies, Unavailable when this replica has no state to give."""
        if not self.archives(peer):
            return await self.joiners.offer(peer, call)
        request = call.header.snapshot
        if request.stage != self.stage or StateSlice.of(request) != SLOW or not request.nobody_waits:
            raise RemoteFault(
                f"an archive may copy the slow weights of {stage_name(self.stage)} here, and nothing else"
            )
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_s:
            raise Busy("an archive has copied this replica a moment ago", self._next_s - now_s)
        self._begun_s = now_s
        self._made_s = 0.0
        self._next_s = math.inf  # until this one is made
        self.archive.close()  # of two copies the older one goes before the new one takes memory
        try:
            return await self.archive.offer(peer, call)
        finally:
            self._made_s = asyncio.get_running_loop().time() - now_s
            self._next_s = now_s + self._made_s + self.budget.rest_s

    async def chunk(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "chunk"; raises as SnapshotDonor.chunk does."""
        if not self.archives(peer):
            return await self.joiners.chunk(peer, call)
        answer = await self.archive.chunk(peer, call)
        took_s = asyncio.get_running_loop().time() - self._begun_s
        rest_s = max(took_s / self.budget.share, self._made_s / self.budget.made_share)
        self._next_s = max(self._next_s, self._begun_s + rest_s)
        return answer

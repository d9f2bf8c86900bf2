"""The donors of a download and the two requests to one of them. Donors fail, lie, or are busy with others."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from swarmnode.errors import Busy, PeerTimeout, RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId, digest64
from swarmnode.membership.liveness import patiently
from swarmnode.membership.stage_view import rank
from swarmnode.model.section import Sizes
from swarmnode.ports import Call, Transport
from swarmnode.recovery.snapshot import CHUNK_NBYTES, CHUNKS_AT_ONCE, StateSlice, check_chunk, check_offer, chunk_span
from swarmnode.wire import access_pb2
from swarmnode.wire import call_pb2 as wire


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """Bounds of one download. All are guesses, for chunks of 1 MiB over a volunteer's link."""

    attempts_max: int = 8  # attempts in a row that bring less than `fruitful`
    pulls_max: int = 100  # attempts of any kind
    fruitful: float = 0.05  # share of the chunks that makes an attempt worth another
    failures_max: int = 3  # fruitless attempts at one donor; one that lied is not asked again at all
    chunk_retries_max: int = 2  # times one chunk is asked for again before the attempt has failed
    busy_max_s: float = 4 * 3600.0  # waited for donors that all give to others now: gigabytes over a home's line
    waited_for: bool = True  # this node cannot work without the state; else donors may put others first
    parallel: int = CHUNKS_AT_ONCE  # chunks requested at once from the first donor
    beside: int = 2  # chunks requested at once from each other donor
    helpers: int = 3  # peers besides the donor that are asked for the same bytes
    sources: int = 4  # donors used side by side: a home's uplink is a quarter of another home's downlink
    alone_s: float = 60.0  # other donors are asked only when the first one needs longer
    silent_s: float = 30.0  # other donors are asked when the first one sends nothing for so long
    rest: float = 0.0  # seconds of rest after a chunk for each second it took: 1.0 leaves half of the donor's uplink
    offer_timeout_s: float = 60.0  # the donor copies and hashes its state in this time
    chunk_timeout_s: float = 40.0  # for each MiB, at 210 kbit/s: what is left of a home's uplink while it trains
    patience_s: float = 2.0  # of either request; then the donor is pinged
    pause_s: float = 0.5  # before the first repetition; doubles up to pause_max_s
    pause_max_s: float = 8.0
    nbytes_max: int = 1 << 36


class DonorLied(Exception):
    """A donor sent what contradicts its own announcement, or what is expected of any."""


class DonorBusy(Exception):
    """A donor is busy with others and told when to ask again."""

    def __init__(self, busy: Busy) -> None:
        super().__init__(str(busy))
        self.retry_after_s = busy.retry_after_s


class DonorFailed(Exception):
    """A donor could not go on, but may do so later. `soon`: an immediate retry is worthwhile."""

    def __init__(self, message: str, *, soon: bool) -> None:
        super().__init__(message)
        self.soon = soon


def pause_s(limits: DownloadLimits, attempt: int) -> float:
    """Seconds to wait before another `attempt`."""
    return float(min(limits.pause_s * 2 ** max(0, attempt - 1), limits.pause_max_s))


class Donors:
    """The donors of one download and how their requests went. `known` is called again each time; best first."""

    def __init__(self, known: Callable[[], Sequence[PeerId]], me: PeerId, failures_max: int) -> None:
        self._known = known
        self._me = me
        self._failures_max = failures_max
        self._salt = digest64("beside", me)
        self._failures: Counter[PeerId] = Counter()
        self._tried: Counter[PeerId] = Counter()
        self._later: dict[PeerId, float] = {}  # busy donors, and the loop time to ask them again
        self._used: set[PeerId] = set()
        self.able: Sequence[PeerId] = ()
        """Donors that may still be asked, as of the last `next`."""

    def next(self, first: Collection[PeerId] = (), *, by_lot: bool = False) -> PeerId | None:
        """A donor that is neither in use nor busy with others; None when there is none now.

        Donors of `first` come first, then those that failed and were tried least, then the best. With `by_lot` the last
        choice is random: joiners that each use several donors should not all meet at the best ones.
        """
        now_s, most = asyncio.get_running_loop().time(), self._failures_max
        self.able = [peer for peer in self._known() if peer != self._me and self._failures[peer] < most]
        free = [peer for peer in self.able if peer not in self._used and self._later.get(peer, 0.0) <= now_s]
        lot = {peer: rank(peer, self._salt) for peer in free} if by_lot else {}
        return min(free, key=lambda p: (p not in first, self._failures[p], self._tried[p], lot.get(p, 0)), default=None)

    def wait_s(self) -> float | None:
        """Seconds until the first busy donor is to be asked again; None when no donor is busy."""
        now_s = asyncio.get_running_loop().time()
        again_s = [self._later[peer] for peer in self.able if self._later.get(peer, 0.0) > now_s]
        return min(again_s) - now_s if again_s else None

    @contextlib.contextmanager
    def using(self, donor: PeerId) -> Iterator[None]:
        """Mark `donor` as in use while the block runs."""
        self._used.add(donor)
        try:
            yield
        finally:
            self._used.discard(donor)

    def busy(self, donor: PeerId, retry_after_s: float) -> None:
        """`donor` is busy with others. That is no failure."""
        self._later[donor] = asyncio.get_running_loop().time() + retry_after_s

    def failed(self, donor: PeerId, *, fruitful: bool) -> None:
        """`donor` could not go on. A fruitful donor, which gave much before, loses no credit."""
        self._tried[donor] += 1
        self._failures[donor] += not fruitful

    def lied(self, donor: PeerId) -> None:
        """`donor` lied and is not asked again."""
        self._failures[donor] = self._failures_max


@dataclass(frozen=True, slots=True)
class DonorClient:
    """The two requests of a download: the offer of a snapshot, and a chunk of it."""

    transport: Transport
    stage: int
    run_id: RunId
    sizes: Sizes
    limits: DownloadLimits
    round_min: int
    cut: StateSlice
    rounds_max: Callable[[], float] = lambda: math.inf
    """The last round the run can have reached: a snapshot of a later one is a lie."""
    warrant: access_pb2.Warrant | None = None
    """The owner's, of an archive that is no member."""

    async def offer(self, donor: PeerId, *, beside: bool = False) -> wire.Snapshot:
        """The donor's offer, checked. `beside`: the donor may put newcomers first that depend on it alone.

        Raises DonorBusy, DonorFailed, DonorLied.
        """
        request = self.cut.request(self.stage, self.round_min, nobody_waits=beside or not self.limits.waited_for)
        if self.warrant is not None:
            request.warrant.CopyFrom(self.warrant)
        call = self.transport.call(
            donor,
            Call(wire.Request(run_id=self.run_id, snapshot=request)),
            timeout_s=self.limits.offer_timeout_s,
            reply_bytes_max=0,
        )
        try:
            answer = await patiently(self.transport, self.run_id, donor, call, self.limits.patience_s)
        except Busy as busy:
            if self.limits.busy_max_s:
                raise DonorBusy(busy) from busy
            raise DonorFailed(str(busy), soon=False) from busy
        except (RemoteFault, Unavailable) as error:
            raise DonorFailed(str(error), soon=False) from error
        offer = answer.header.snapshot
        try:
            check_offer(
                offer,
                stage=self.stage,
                sizes=self.cut.sizes(self.sizes),
                nbytes_max=self.limits.nbytes_max,
            )
            if offer.round < self.round_min:
                raise RemoteFault(f"snapshot of round {offer.round} where {self.round_min} or later was asked for")
            if offer.round > (most := self.rounds_max()):
                raise RemoteFault(f"snapshot of round {offer.round}; the run can have come to {most:.0f}")
        except RemoteFault as fault:
            raise DonorLied(str(fault)) from fault
        return offer

    async def chunk(
        self, donor: PeerId, offer: wire.Snapshot, index: int, retries: int
    ) -> memoryview | bytes | bytearray:
        """Download and verify one chunk. Raises DonorFailed, DonorLied.

        A slow donor has time while it answers pings. Busy and timed-out donors are asked again up to `retries` times. A
        donor that died or no longer has the snapshot is not asked again.
        """
        start, end = chunk_span(offer, index)
        request = wire.ChunkRequest(snapshot_id=offer.id, index=index, stage=self.stage)
        # States of more than 16 GiB come in larger chunks, which a home cannot send in the time of one MiB.
        timeout_s = self.limits.chunk_timeout_s * max(1.0, offer.chunk_nbytes / CHUNK_NBYTES)
        for attempt in range(1, retries + 2):
            try:
                call = self.transport.call(
                    donor,
                    Call(wire.Request(run_id=self.run_id, chunk=request)),
                    timeout_s=timeout_s,
                    reply_bytes_max=end - start,
                )
                answer = await patiently(self.transport, self.run_id, donor, call, self.limits.patience_s)
                break
            except (RemoteFault, Unavailable) as error:
                if not isinstance(error, (PeerTimeout, Busy)) or attempt > retries:
                    soon = not isinstance(error, (PeerTimeout, Unavailable))
                    raise DonorFailed(f"chunk {index} of {len(offer.hashes)}: {error}", soon=soon) from error
                asked_s = error.retry_after_s if isinstance(error, Busy) else 0.0
                await asyncio.sleep(min(max(asked_s, pause_s(self.limits, attempt)), self.limits.pause_max_s))
        if answer.header.chunk.index != index or len(answer.tensors) != 1:
            raise DonorLied(
                f"asked for chunk {index}, got chunk {answer.header.chunk.index} in {len(answer.tensors)} tensors"
            )
        data = answer.tensors[0].data
        try:
            check_chunk(offer, index, data)
        except RemoteFault as fault:
            raise DonorLied(str(fault)) from fault
        return data

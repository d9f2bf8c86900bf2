"""Whom a joiner asks for state, and one question to one of them: donors fail, lie, or give to others now."""

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
from swarmnode.membership.view import rank
from swarmnode.model.section import Sizes
from swarmnode.ports import Call, Transport
from swarmnode.recovery.snapshot import CHUNK_NBYTES, CHUNKS_AT_ONCE, Cut, check_chunk, check_offer, chunk_span
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
    waited_for: bool = True  # who asks cannot do its work without; what nobody waits for is not waited for
    parallel: int = CHUNKS_AT_ONCE  # chunks under way at once, from one donor
    beside: int = 2  # the same, from each donor beside the first
    helpers: int = 3  # peers besides the donor that are asked for the same bytes
    sources: int = 4  # donors pulled from side by side: a line at home gives a quarter of what another takes
    alone_s: float = 60.0  # what comes within this comes of one donor alone
    silent_s: float = 30.0  # a donor that gives nothing for so long is not waited for alone
    rest: float = 0.0  # seconds of rest after a chunk for each second it took: 1.0 leaves half of the donor's uplink
    offer_timeout_s: float = 60.0  # the donor copies and hashes its state in this time
    chunk_timeout_s: float = 40.0  # for each MiB, at 210 kbit/s: what is left of a home's uplink while it trains
    patience_s: float = 2.0  # of either; then the donor is asked whether it lives
    pause_s: float = 0.5  # before the first repetition; doubles up to pause_max_s
    pause_max_s: float = 8.0
    nbytes_max: int = 1 << 36


class Lie(Exception):
    """A donor sent what contradicts its own announcement, or what is expected of any."""


class Later(Exception):
    """A donor gives to others now."""

    def __init__(self, busy: Busy) -> None:
        super().__init__(str(busy))
        self.retry_after_s = busy.retry_after_s


class Failed(Exception):
    """A donor could not go on; another time it may. `soon`: going on with it at once is worth a try."""

    def __init__(self, message: str, *, soon: bool) -> None:
        super().__init__(message)
        self.soon = soon


def pause_s(limits: DownloadLimits, attempt: int) -> float:
    """Before another `attempt`."""
    return float(min(limits.pause_s * 2 ** max(0, attempt - 1), limits.pause_max_s))


class Donors:
    """The donors of one download, and what came of asking them. `known` is asked again each time; best first."""

    def __init__(self, known: Callable[[], Sequence[PeerId]], me: PeerId, failures_max: int) -> None:
        self._known = known
        self._me = me
        self._failures_max = failures_max
        self._salt = digest64("beside", me)
        self._failures: Counter[PeerId] = Counter()
        self._tried: Counter[PeerId] = Counter()
        self._later: dict[PeerId, float] = {}  # those that give to others now, and when they are asked again
        self._used: set[PeerId] = set()
        self.able: Sequence[PeerId] = ()
        """Whom it is any use to ask, as of the last `next`."""

    def next(self, first: Collection[PeerId] = (), *, by_lot: bool = False) -> PeerId | None:
        """One that is not pulled from and gives to no others: one of `first`, else who failed and was asked least, else
        the best, or `by_lot` any: joiners that each pull from several should not meet at the best ones. None: nobody
        now."""
        now_s, most = asyncio.get_running_loop().time(), self._failures_max
        self.able = [peer for peer in self._known() if peer != self._me and self._failures[peer] < most]
        free = [peer for peer in self.able if peer not in self._used and self._later.get(peer, 0.0) <= now_s]
        lot = {peer: rank(peer, self._salt) for peer in free} if by_lot else {}
        return min(free, key=lambda p: (p not in first, self._failures[p], self._tried[p], lot.get(p, 0)), default=None)

    def wait_s(self) -> float | None:
        """Seconds until the first of those that give to others is to be asked again; None: nobody does."""
        now_s = asyncio.get_running_loop().time()
        again_s = [self._later[peer] for peer in self.able if self._later.get(peer, 0.0) > now_s]
        return min(again_s) - now_s if again_s else None

    @contextlib.contextmanager
    def using(self, donor: PeerId) -> Iterator[None]:
        """`donor` is pulled from."""
        self._used.add(donor)
        try:
            yield
        finally:
            self._used.discard(donor)

    def busy(self, donor: PeerId, retry_after_s: float) -> None:
        """It gives to others now; no failure."""
        self._later[donor] = asyncio.get_running_loop().time() + retry_after_s

    def failed(self, donor: PeerId, *, fruitful: bool) -> None:
        """It could not go on. Who gave much before is as good as any."""
        self._tried[donor] += 1
        self._failures[donor] += not fruitful

    def lied(self, donor: PeerId) -> None:
        """It is not asked again."""
        self._failures[donor] = self._failures_max


@dataclass(frozen=True, slots=True)
class Asking:
    """The two questions of a download."""

    transport: Transport
    stage: int
    run_id: RunId
    sizes: Sizes
    limits: DownloadLimits
    round_min: int
    cut: Cut
    rounds_max: Callable[[], float] = lambda: math.inf
    """What the run can have come to: a snapshot of a later round is a lie."""

    async def offer(self, donor: PeerId, *, beside: bool = False) -> wire.Snapshot:
        """The donor's offer, checked. Who is asked `beside` another keeps no newcomer waiting for it."""
        request = self.cut.request(self.stage, self.round_min, nobody_waits=beside or not self.limits.waited_for)
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
                raise Later(busy) from busy
            raise Failed(str(busy), soon=False) from busy
        except (RemoteFault, Unavailable) as error:
            raise Failed(str(error), soon=False) from error
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
            raise Lie(str(fault)) from fault
        return offer

    async def chunk(
        self, donor: PeerId, offer: wire.Snapshot, index: int, retries: int
    ) -> memoryview | bytes | bytearray:
        """One verified chunk. A slow donor is waited for as long as it lives, a busy one is asked again; one that no
        longer has the snapshot, or died, is not."""
        start, end = chunk_span(offer, index)
        request = wire.ChunkRequest(snapshot_id=offer.id, index=index, stage=self.stage)
        # States of more than 16 GiB come in larger chunks: in the time of one MiB no home could give them.
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
                    raise Failed(f"chunk {index} of {len(offer.hashes)}: {error}", soon=soon) from error
                asked_s = error.retry_after_s if isinstance(error, Busy) else 0.0
                await asyncio.sleep(min(max(asked_s, pause_s(self.limits, attempt)), self.limits.pause_max_s))
        if answer.header.chunk.index != index or len(answer.tensors) != 1:
            raise Lie(
                f"asked for chunk {index}, got chunk {answer.header.chunk.index} in {len(answer.tensors)} tensors"
            )
        data = answer.tensors[0].data
        try:
            check_chunk(offer, index, data)
        except RemoteFault as fault:
            raise Lie(str(fault)) from fault
        return data

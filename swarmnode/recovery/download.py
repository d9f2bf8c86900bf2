"""State from one replica to another: a joiner pulls hashed chunks, and asks elsewhere when a donor dies or lies."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from swarmnode.errors import Busy, PeerTimeout, RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId, short
from swarmnode.membership.liveness import patiently
from swarmnode.metrics import name
from swarmnode.ports import Call, State, Telemetry, Transport
from swarmnode.recovery.snapshot import (
    CHUNK_NBYTES,
    CHUNKS_AT_ONCE,
    WHOLE,
    Cut,
    assemble,
    check_chunk,
    check_offer,
    chunk_span,
)
from swarmnode.together import together
from swarmnode.wire import call_pb2 as wire

Accept = Callable[[State], Awaitable[None]]
REPORTS = 20  # progress events of a download, at most, for each donor


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
    helpers: int = 3  # peers besides the donor that are asked for the same bytes
    rest: float = 0.0  # seconds of rest after a chunk for each second it took: 1.0 leaves half of the donor's uplink
    offer_timeout_s: float = 60.0  # the donor copies and hashes its state in this time
    chunk_timeout_s: float = 40.0  # for each MiB, at 210 kbit/s: what is left of a home's uplink while it trains
    patience_s: float = 2.0  # of either; then the donor is asked whether it lives
    pause_s: float = 0.5  # before the first repetition; doubles up to pause_max_s
    pause_max_s: float = 8.0
    nbytes_max: int = 1 << 36


class _Lie(Exception):
    """A donor sent what contradicts its own announcement, or what is expected of any."""


class _Later(Exception):
    """A donor gives to others now."""

    def __init__(self, busy: Busy) -> None:
        super().__init__(str(busy))
        self.retry_after_s = busy.retry_after_s


class _Failed(Exception):
    """A donor could not go on; another time it may. `soon`: going on with it at once is worth a try."""

    def __init__(self, message: str, *, soon: bool) -> None:
        super().__init__(message)
        self.soon = soon


async def download(
    transport: Transport,
    donors: Callable[[], Sequence[PeerId]],
    stage: int,
    run_id: RunId,
    parameters: int,
    limits: DownloadLimits,
    telemetry: Telemetry,
    *,
    round_min: int = 0,
    accept: Accept | None = None,
    cut: Cut = WHOLE,
    helpers: Callable[[], Sequence[PeerId]] = tuple,
) -> tuple[State, wire.Snapshot]:
    """The state of a replica of `stage` with `parameters` elements, or the part `cut` of it, every chunk verified, and
    what its donor said.

    `donors` is asked again before each attempt and returns the best first. A snapshot that broke off is gone on with at
    the same donor; chunks are kept for as long as the same hashes are offered, by whomever. `helpers` may hold the very
    same snapshot (joiners that came a moment before): each is asked for chunks of it until it refuses. `accept` takes
    the state (loads it, say) and raises RemoteFault when its numbers cannot be believed: the donor has lied, another is
    asked. Donors that give to others are asked again when they said. Raises Unavailable when the attempts are used up
    or nobody is left to ask.
    """
    puller = _Puller(transport, stage, run_id, parameters, limits, telemetry, round_min, accept, cut, helpers)
    loop = asyncio.get_running_loop()
    failures: Counter[PeerId] = Counter()
    tried: Counter[PeerId] = Counter()
    later: dict[PeerId, float] = {}  # donors that give to others now, and when they are asked again
    pulls = fruitless = 0
    waited_s = 0.0
    reason = "nobody serves it"
    while pulls < limits.pulls_max and fruitless < limits.attempts_max:
        able = [peer for peer in donors() if peer != transport.peer_id and failures[peer] < limits.failures_max]
        free = [peer for peer in able if later.get(peer, 0.0) <= loop.time()]
        if able and not free and waited_s < limits.busy_max_s:
            if not waited_s:
                telemetry.event("state.waiting", stage=stage, donors=len(able), reason=reason)
            pause_s = min(limits.pause_max_s, min(later[peer] for peer in able) - loop.time())
            waited_s += pause_s
            await asyncio.sleep(pause_s)
            continue
        pulls += 1
        if free:
            donor = puller.going_on if puller.going_on in free else min(free, key=lambda p: (failures[p], tried[p]))
            telemetry.event("state.donor", peer=donor, stage=stage, attempt=pulls, of=len(able))
            before = puller.received
            try:
                return await puller.pull(donor)
            except _Later as busy:
                reason = f"{short(donor)}: {busy}"
                later[donor] = loop.time() + max(limits.pause_s, busy.retry_after_s)
                pulls -= 1
                continue
            except (_Lie, _Failed) as failure:
                lied = isinstance(failure, _Lie)
                reason = f"{short(donor)}: {failure}"
                telemetry.event(
                    "state.failed", level="warning", peer=donor, stage=stage, lied=lied, reason=str(failure)
                )
            tried[donor] += 1
            if lied:
                failures[donor] = limits.failures_max
                telemetry.count(name.PEER_FAULTS, kind="state")
            elif puller.received - before >= limits.fruitful * puller.chunks > 0:
                fruitless = 0
                await asyncio.sleep(_pause_s(limits, fruitless))
                continue
            failures[donor] += 1
        fruitless += 1
        if fruitless < limits.attempts_max:
            await asyncio.sleep(_pause_s(limits, fruitless))
    raise Unavailable(f"no state for stage {stage} after {pulls} attempts; the last: {reason}")


def _pause_s(limits: DownloadLimits, attempt: int) -> float:
    return float(min(limits.pause_s * 2 ** max(0, attempt - 1), limits.pause_max_s))


class _Puller:
    """One download: the bytes so far, and from whom they may come next."""

    def __init__(
        self,
        transport: Transport,
        stage: int,
        run_id: RunId,
        parameters: int,
        limits: DownloadLimits,
        telemetry: Telemetry,
        round_min: int,
        accept: Accept | None,
        cut: Cut,
        helpers: Callable[[], Sequence[PeerId]],
    ) -> None:
        self._transport = transport
        self._stage = stage
        self._run_id = run_id
        self._parameters = parameters
        self._limits = limits
        self._telemetry = telemetry
        self._round_min = round_min
        self._accept = accept
        self._cut = cut
        self._helpers = helpers
        self._useless: set[PeerId] = set()  # helpers that lied
        self._offer = wire.Snapshot()
        self._data = bytearray()
        self._have: set[int] = set()
        self.received = 0  # chunks, ever
        self.going_on: PeerId | None = None  # the donor whose snapshot broke off and may be gone on with

    @property
    def chunks(self) -> int:
        """Of the latest offer; 0 before there is one."""
        return len(self._offer.hashes)

    async def pull(self, donor: PeerId) -> tuple[State, wire.Snapshot]:
        """Everything that is still missing, from `donor`. Raises _Lie, _Later, _Failed."""
        if self.going_on == donor:
            offer = self._offer
        else:
            offer = await self._ask(donor)
            self._begin(offer)
        self.going_on = None
        before = self.received
        missing = deque(index for index in range(len(offer.hashes)) if index not in self._have)
        helpers = self._able_helpers(donor)
        try:
            while missing:  # again, when a helper gave up on the last ones
                works = [partial(self._work, donor, offer, missing)] * min(self._limits.parallel, len(missing))
                works += [partial(self._help, helper, offer, missing) for helper in helpers]
                await together(works)
                helpers = []
        except _Failed as failure:
            if failure.soon and self.received > before:
                self.going_on = donor
            raise
        state = assemble(offer, self._data, verify=False)  # each chunk was verified as it came
        if self._accept is not None:
            try:
                await self._accept(state)
            except RemoteFault as fault:
                self._have.clear()
                raise _Lie(str(fault)) from fault
        self._telemetry.event("state.downloaded", peer=donor, stage=self._stage, round=offer.round, nbytes=offer.nbytes)
        return state, offer

    async def _ask(self, donor: PeerId) -> wire.Snapshot:
        """The donor's offer, checked."""
        request = self._cut.request(self._stage, self._round_min, nobody_waits=not self._limits.waited_for)
        call = self._transport.call(
            donor,
            Call(wire.Request(run_id=self._run_id, snapshot=request)),
            timeout_s=self._limits.offer_timeout_s,
            reply_bytes_max=0,
        )
        try:
            answer = await patiently(self._transport, self._run_id, donor, call, self._limits.patience_s)
        except Busy as busy:
            if self._limits.busy_max_s:
                raise _Later(busy) from busy
            raise _Failed(str(busy), soon=False) from busy
        except (RemoteFault, Unavailable) as error:
            raise _Failed(str(error), soon=False) from error
        offer = answer.header.snapshot
        try:
            check_offer(
                offer,
                stage=self._stage,
                parameters=self._cut.elements(self._parameters),
                nbytes_max=self._limits.nbytes_max,
                sections=self._cut.sections,
            )
            if offer.round < self._round_min:
                raise RemoteFault(f"snapshot of round {offer.round} where {self._round_min} or later was asked for")
        except RemoteFault as fault:
            raise _Lie(str(fault)) from fault
        return offer

    def _begin(self, offer: wire.Snapshot) -> None:
        """Make room for `offer`, keeping the chunks that came of an offer with the same hashes."""
        old = self._offer
        if (old.nbytes, old.chunk_nbytes) != (offer.nbytes, offer.chunk_nbytes):
            self._data = bytearray(offer.nbytes)
            self._have.clear()
        else:
            self._have = {index for index in self._have if old.hashes[index] == offer.hashes[index]}
        self._offer = offer

    def _able_helpers(self, donor: PeerId) -> list[PeerId]:
        unfit = {donor, self._transport.peer_id, *self._useless}
        return [peer for peer in self._helpers() if peer not in unfit][: self._limits.helpers]

    async def _help(self, helper: PeerId, offer: wire.Snapshot, missing: deque[int]) -> None:
        """As `_work`, from a peer that may not have the snapshot: what it does not give is left to the donor."""
        try:
            await self._work(helper, offer, missing, retries=0)
        except _Failed:
            pass
        except _Lie as lie:
            self._useless.add(helper)
            self._telemetry.count(name.PEER_FAULTS, kind="state")
            self._telemetry.event(
                "state.failed", level="warning", peer=helper, stage=self._stage, lied=True, reason=str(lie)
            )

    async def _work(self, donor: PeerId, offer: wire.Snapshot, missing: deque[int], retries: int | None = None) -> None:
        """Pull one missing chunk after the other until none is left."""
        loop = asyncio.get_running_loop()
        retries = self._limits.chunk_retries_max if retries is None else retries
        while missing:
            index = missing.popleft()
            begun = loop.time()
            try:
                data = await self._chunk(donor, offer, index, retries)
            except (_Lie, _Failed):
                missing.append(index)
                raise
            start, end = chunk_span(offer, index)
            self._data[start:end] = data
            self._have.add(index)
            self.received += 1
            self._report(donor, offer, end - start)
            if self._limits.rest and missing:
                await asyncio.sleep(self._limits.rest * (loop.time() - begun))

    def _report(self, donor: PeerId, offer: wire.Snapshot, nbytes: int) -> None:
        chunks = len(offer.hashes)
        self._telemetry.count(name.SNAPSHOT_BYTES, nbytes, direction="received")
        if len(self._have) % max(1, chunks // REPORTS) == 0:
            self._telemetry.event(
                "state.download",
                peer=donor,
                stage=self._stage,
                chunks=len(self._have),
                of=chunks,
                nbytes=offer.nbytes,
            )

    async def _chunk(
        self, donor: PeerId, offer: wire.Snapshot, index: int, retries: int
    ) -> memoryview | bytes | bytearray:
        """One verified chunk. A slow donor is waited for as long as it lives, a busy one is asked again; one that no
        longer has the snapshot, or died, is not."""
        start, end = chunk_span(offer, index)
        request = wire.ChunkRequest(snapshot_id=offer.id, index=index, stage=self._stage)
        # States of more than 16 GiB come in larger chunks: in the time of one MiB no home could give them.
        timeout_s = self._limits.chunk_timeout_s * max(1.0, offer.chunk_nbytes / CHUNK_NBYTES)
        for attempt in range(1, retries + 2):
            try:
                call = self._transport.call(
                    donor,
                    Call(wire.Request(run_id=self._run_id, chunk=request)),
                    timeout_s=timeout_s,
                    reply_bytes_max=end - start,
                )
                answer = await patiently(self._transport, self._run_id, donor, call, self._limits.patience_s)
                break
            except (RemoteFault, Unavailable) as error:
                if not isinstance(error, (PeerTimeout, Busy)) or attempt > retries:
                    soon = not isinstance(error, (PeerTimeout, Unavailable))
                    raise _Failed(f"chunk {index} of {len(offer.hashes)}: {error}", soon=soon) from error
                asked_s = error.retry_after_s if isinstance(error, Busy) else 0.0
                await asyncio.sleep(min(max(asked_s, _pause_s(self._limits, attempt)), self._limits.pause_max_s))
        if answer.header.chunk.index != index or len(answer.tensors) != 1:
            raise _Lie(
                f"asked for chunk {index}, got chunk {answer.header.chunk.index} in {len(answer.tensors)} tensors"
            )
        data = answer.tensors[0].data
        try:
            check_chunk(offer, index, data)
        except RemoteFault as fault:
            raise _Lie(str(fault)) from fault
        return data

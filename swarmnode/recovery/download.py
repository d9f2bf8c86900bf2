"""State from other replicas: a joiner pulls hashed chunks, and asks elsewhere when a donor dies or lies.

What takes long comes from several donors, side by side and one after the other: each gives chunks of a snapshot of its
own, and what one gave before it died is kept. Replicas differ by what they learnt since they met; a state of chunks of
two, one of them of up to 8 rounds ago, was at once never worse than the older of both, and mostly halfway between; ten
steps later it was by 0.03 nats at most (measured: demo's model, rounds of ten steps, one seed; docs/simulate.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId, short
from swarmnode.metrics import name
from swarmnode.model.section import Sizes
from swarmnode.ports import State, Telemetry, Transport
from swarmnode.recovery.asking import Asking, Donors, DownloadLimits, Failed, Later, Lie, pause_s
from swarmnode.recovery.snapshot import WHOLE, Cut, assemble, chunk_span, mixed
from swarmnode.together import together
from swarmnode.wire import call_pb2 as wire

Accept = Callable[[State], Awaitable[None]]
Compare = Callable[[State, wire.Snapshot, Collection[PeerId]], Awaitable[None]]
REPORTS = 20  # progress events of a download, at most, for each donor


async def download(
    transport: Transport,
    donors: Callable[[], Sequence[PeerId]],
    stage: int,
    run_id: RunId,
    sizes: Sizes,
    limits: DownloadLimits,
    telemetry: Telemetry,
    *,
    round_min: int = 0,
    rounds_max: Callable[[], float] = lambda: math.inf,
    compare: Compare | None = None,
    accept: Accept | None = None,
    cut: Cut = WHOLE,
    helpers: Callable[[], Sequence[PeerId]] = tuple,
) -> tuple[State, wire.Snapshot]:
    """The state of a replica of `stage` with `sizes` elements, or the part `cut` of it, every chunk verified, and what
    its donor said; of several donors' chunks, where it takes longer than `limits.alone_s`.

    `donors` is asked again before each attempt and returns the best first. A snapshot that broke off is gone on with at
    the same donor; chunks are kept for as long as the same hashes are offered, by whomever. `helpers` may hold the very
    same snapshot (joiners that came a moment before): each is asked for chunks of it until it refuses. No snapshot is
    of a later round than `rounds_max` tells. `compare` asks others about the state; it is told what the donors said and
    who they were. `accept` takes the state (loads it, say). Either raises RemoteFault when its numbers cannot be
    believed: the donor has lied, another is asked; of several donors nobody knows which, and the next state is of one
    alone. Donors that give to others are asked again when they said. Raises Unavailable when the attempts are used up
    or nobody is left to ask.
    """
    me = transport.peer_id
    asking = Asking(transport, stage, run_id, sizes, limits, round_min, cut, rounds_max)
    whom = Donors(donors, me, limits.failures_max)
    return await _Download(me, stage, whom, asking, limits, telemetry, compare, accept, helpers).run()


@dataclass(slots=True)
class _Download:
    """The bytes so far, and from whom they may come next."""

    me: PeerId
    stage: int
    donors: Donors
    asking: Asking
    limits: DownloadLimits
    telemetry: Telemetry
    compare: Compare | None
    accept: Accept | None
    helpers: Callable[[], Sequence[PeerId]]
    useless: set[PeerId] = field(default_factory=set)  # helpers that lied
    data: bytearray = field(default_factory=bytearray)
    have: dict[int, wire.Snapshot] = field(default_factory=dict)  # of whose offer each chunk is that is here
    offer: wire.Snapshot = field(default_factory=wire.Snapshot)  # of the donor asked last
    begun: dict[PeerId, wire.Snapshot] = field(default_factory=dict)  # snapshots that may be gone on with
    missing: deque[int] = field(default_factory=deque)  # chunks nobody was asked for yet, in this attempt
    given: Counter[PeerId] = field(default_factory=Counter)  # chunks, ever, by who gave them
    pulled_s: float = 0.0  # the attempts took
    pure: bool = False  # a state of several donors was not believed
    over: asyncio.Event = field(default_factory=asyncio.Event)  # nothing is missing any more
    reason: str = "nobody serves it"

    async def run(self) -> tuple[State, wire.Snapshot]:
        """One donor after the other."""
        limits, pulls, fruitless, waited_s = self.limits, 0, 0, 0.0
        while pulls < limits.pulls_max and fruitless < limits.attempts_max:
            donor = self.donors.next(self.begun)
            if donor is None and waited_s < limits.busy_max_s and (wait_s := self.donors.wait_s()) is not None:
                if not waited_s:
                    able = len(self.donors.able)
                    self.telemetry.event("state.waiting", stage=self.stage, donors=able, reason=self.reason)
                wait_s = min(limits.pause_max_s, wait_s)
                waited_s += wait_s
                await asyncio.sleep(wait_s)
                continue
            before, lied = self.given.total(), False
            if donor is not None:
                try:
                    return await self._attempt(donor, pulls + 1)
                except Later:
                    continue
                except (Lie, Failed) as failure:
                    lied = isinstance(failure, Lie)
            pulls += 1
            fruitless = 0 if self._fruitful(self.given.total() - before) and not lied else fruitless + 1
            if fruitless < limits.attempts_max:
                await asyncio.sleep(pause_s(limits, fruitless))
        raise Unavailable(f"no state for stage {self.stage} after {pulls} attempts; the last: {self.reason}")

    def _fruitful(self, chunks: int) -> bool:
        return chunks >= self.limits.fruitful * len(self.offer.hashes) > 0

    async def _attempt(self, donor: PeerId, number: int) -> tuple[State, wire.Snapshot]:
        """Everything that is still missing, from `donor` and those beside it. Raises Lie, Later, Failed."""
        loop = asyncio.get_running_loop()
        able, begun_s = len(self.donors.able), loop.time()
        self.telemetry.event("state.donor", peer=donor, stage=self.stage, attempt=number, of=able)
        try:
            with self._blaming(donor):
                offer = self.begun.get(donor) or await self.asking.offer(donor)
                self._begin(offer)
                self.begun[donor] = offer
                await self._pull(donor, offer)
                return await self._accepted(donor)
        finally:
            self.pulled_s += loop.time() - begun_s

    @contextlib.contextmanager
    def _blaming(self, donor: PeerId) -> Iterator[None]:
        """`donor` is pulled from, and answers for what fails."""
        before = self.given[donor]
        with self.donors.using(donor):
            try:
                yield
            except Later as busy:
                self.reason = f"{short(donor)}: {busy}"
                self.donors.busy(donor, max(self.limits.pause_s, busy.retry_after_s))
                raise
            except (Lie, Failed) as failure:
                self._failed(donor, failure, self.given[donor] - before)
                raise

    def _failed(self, donor: PeerId, failure: Lie | Failed, chunks: int) -> None:
        """`donor` did, after so many chunks."""
        self.reason = f"{short(donor)}: {failure}"
        self._tell(donor, failure)
        begun = self.begun.get(donor)
        if isinstance(failure, Lie):
            self.donors.lied(donor)
            self._drop([index for index, offer in self.have.items() if offer is begun])
        else:
            self.donors.failed(donor, fruitful=self._fruitful(chunks))
            if failure.soon and chunks:
                return
        self.begun.pop(donor, None)

    def _tell(self, peer: PeerId, failure: Lie | Failed) -> None:
        lied = isinstance(failure, Lie)
        if lied:
            self.telemetry.count(name.PEER_FAULTS, kind="state")
        self.telemetry.event(
            "state.failed", level="warning", peer=peer, stage=self.stage, lied=lied, reason=str(failure)
        )

    def _drop(self, indices: Sequence[int]) -> None:
        """These chunks are missing again."""
        for index in indices:
            del self.have[index]
        self.missing.extend(indices)

    def _begin(self, offer: wire.Snapshot) -> None:
        """Make room for `offer`, keeping the chunks of others with the same hashes; all, where they took long."""
        if (self.offer.nbytes, self.offer.chunk_nbytes) != (offer.nbytes, offer.chunk_nbytes):
            self.data = bytearray(offer.nbytes)
            self.have.clear()
        mixing = self.limits.sources > 1 and not self.pure and self.pulled_s >= self.limits.alone_s
        for index, theirs in list(self.have.items()):
            if theirs.hashes[index] == offer.hashes[index]:
                self.have[index] = offer
            elif not mixing:
                del self.have[index]
        self.offer = offer
        self.missing = deque(index for index in range(len(offer.hashes)) if index not in self.have)

    async def _pull(self, donor: PeerId, offer: wire.Snapshot) -> None:
        """All that is missing, from `donor`, helpers and other donors."""
        helpers = self._able_helpers(donor)
        while self.missing:  # again, when a helper gave up on the last ones
            self.over.clear()
            works: list[Callable[[], Awaitable[None]]] = []
            works += [partial(self._work, donor, offer)] * min(self.limits.parallel, len(self.missing))
            works += [partial(self._help, helper, offer) for helper in helpers]
            if self.limits.sources > 1 and not self.pure:
                works.append(self._others)
            await together(works)
            helpers = []

    async def _accepted(self, donor: PeerId) -> tuple[State, wire.Snapshot]:
        """What has come, once `accept` has taken it. Raises Lie, Failed."""
        offer = mixed([self.have[index] for index in range(len(self.offer.hashes))])
        state = assemble(offer, self.data, verify=False)  # each chunk was verified as it came
        theirs = {id(given) for given in self.have.values()}
        givers = {donor, *(peer for peer, given in self.begun.items() if id(given) in theirs)}
        try:
            if self.compare is not None:
                await self.compare(state, offer, givers)
            if self.accept is not None:
                await self.accept(state)
        except RemoteFault as fault:
            self.have.clear()
            self.begun.clear()
            if offer is self.offer:
                raise Lie(str(fault)) from fault
            self.pure = True
            raise Failed(f"a state of several donors: {fault}", soon=False) from fault
        self.telemetry.event(
            "state.downloaded",
            peer=donor,
            stage=self.stage,
            round=offer.round,
            nbytes=offer.nbytes,
            donors=len({id(theirs) for theirs in self.have.values()}),
        )
        return state, offer

    async def _others(self) -> None:
        """More donors beside the first, once it has taken long; sooner where nothing comes."""
        begun_s, before = asyncio.get_running_loop().time(), self.given.total()
        silent_s = min(self.limits.silent_s, self.limits.alone_s)
        await self._over_within(silent_s)
        if self.given.total() > before:
            await self._over_within(self.limits.alone_s - silent_s)
        if self.missing:
            await together([partial(self._beside, begun_s, before)] * (self.limits.sources - 1))

    async def _beside(self, begun_s: float, before: int) -> None:
        """Chunks of another donor's snapshot, and of another's, while it takes long."""
        while self.missing and self._left_s(begun_s, before) > self.limits.alone_s:
            if (donor := self.donors.next(self.begun, by_lot=True)) is not None:
                with contextlib.suppress(Later, Lie, Failed), self._blaming(donor):
                    offer = self.begun.get(donor) or await self.asking.offer(donor, beside=True)
                    if offer.chunk_nbytes != self.offer.chunk_nbytes:
                        raise Failed(f"chunks of {offer.chunk_nbytes} bytes", soon=False)
                    self.begun[donor] = offer
                    self.telemetry.event("state.beside", peer=donor, stage=self.stage, missing=len(self.missing))
                    await together([partial(self._work, donor, offer)] * min(self.limits.beside, len(self.missing)))
            await self._over_within(self.limits.pause_max_s)

    def _left_s(self, begun_s: float, before: int) -> float:
        """Until nothing is missing, at the rate since `begun_s`, when `before` chunks had come."""
        came = self.given.total() - before
        return len(self.missing) * (asyncio.get_running_loop().time() - begun_s) / came if came else math.inf

    async def _over_within(self, seconds: float) -> None:
        """Returns then, or as soon as nothing is missing."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.over.wait()

    def _able_helpers(self, donor: PeerId) -> list[PeerId]:
        unfit = {donor, self.me, *self.useless}
        return [peer for peer in self.helpers() if peer not in unfit][: self.limits.helpers]

    async def _help(self, helper: PeerId, offer: wire.Snapshot) -> None:
        """As `_work`, from a peer that may not have the snapshot: what it does not give is left to the donor."""
        try:
            await self._work(helper, offer, retries=0)
        except Failed:
            pass
        except Lie as lie:
            self.useless.add(helper)
            self._tell(helper, lie)

    async def _work(self, donor: PeerId, offer: wire.Snapshot, retries: int | None = None) -> None:
        """Pull one missing chunk after the other until none is left."""
        loop = asyncio.get_running_loop()
        retries = self.limits.chunk_retries_max if retries is None else retries
        while self.missing:
            index = self.missing.popleft()
            begun = loop.time()
            try:
                data = await self.asking.chunk(donor, offer, index, retries)
            except BaseException:  # also when it is told to end, as another chunk of the same donor failed
                self.missing.append(index)
                raise
            start, end = chunk_span(offer, index)
            self.data[start:end] = data
            self.have[index] = offer
            self.given[donor] += 1
            self._report(donor, offer, end - start)
            if self.limits.rest and self.missing:
                await asyncio.sleep(self.limits.rest * (loop.time() - begun))
        self.over.set()

    def _report(self, donor: PeerId, offer: wire.Snapshot, nbytes: int) -> None:
        chunks = len(offer.hashes)
        self.telemetry.count(name.SNAPSHOT_BYTES, nbytes, direction="received")
        if len(self.have) % max(1, chunks // REPORTS) == 0:
            self.telemetry.event(
                "state.download",
                peer=donor,
                stage=self.stage,
                chunks=len(self.have),
                of=chunks,
                nbytes=offer.nbytes,
            )

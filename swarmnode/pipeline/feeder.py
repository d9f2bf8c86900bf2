"""A replica of stage 0 reads data and starts microbatches; its own stage is the first hop of each."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from swarmnode.data.blocks import BlockLedger
from swarmnode.errors import MicrobatchLost, RemoteFault, Unavailable
from swarmnode.ids import PeerId, digest64, microbatch_id
from swarmnode.manifest import Manifest
from swarmnode.membership.swarm import Swarm
from swarmnode.metrics import name
from swarmnode.pipeline.hop import Hop
from swarmnode.pipeline.itinerary import itinerary
from swarmnode.pipeline.microbatch import Sizing
from swarmnode.pipeline.onward import Carried
from swarmnode.pipeline.patience import RoundTrip
from swarmnode.pipeline.route import Ema
from swarmnode.pipeline.window import Window
from swarmnode.ports import Telemetry, WireTensor
from swarmnode.together import together
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2

RATE_SPAN_S = 10.0  # guess: tokens per second are averaged over this
LOST_PAUSE_S = 0.2  # guess: after a loss, before anything new is started
LOSSES_KEPT = 64  # guess: enough to compare the loss before and after a stage was lost
VALIDATORS = 2  # guess: feeders that measure the held-out loss after a round
VALIDATING_MAX = 2  # guess: held-out microbatches under way at once


class Samples(Protocol):
    """Numbered samples as token tensors u16 or u32 [B, T+1]."""

    def train(self, indices: Sequence[int]) -> WireTensor: ...

    def again(self, indices: Sequence[int]) -> WireTensor | None:
        """The same tokens for the same samples, wherever they are read; None where each microbatch is made up."""
        ...

    def held_out(self) -> Sequence[WireTensor]:
        """The same few microbatches of held-out text, always."""
        ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """A microbatch's samples, of one block."""

    block: int
    indices: tuple[int, ...]


class Feeder:
    """Keeps a window of microbatches under way and counts what came back."""

    def __init__(
        self,
        manifest: Manifest,
        me: PeerId,
        incarnation: int,
        hop: Hop,
        samples: Samples,
        sizing: Sizing,
        ledger: BlockLedger,
        swarm: Callable[[], Swarm],
        samples_total: Callable[[], int],
        counted: Callable[[int], None],
        telemetry: Telemetry,
        lost: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """`lost` tells which stages have no replica now; microbatches leave them out where the manifest says so."""
        self._manifest = manifest
        self._lost = lost
        self._me = me
        self._incarnation = incarnation
        self._hop = hop
        self._samples = samples
        self._sizing = sizing
        self._told: tuple[int, int] | None = None  # of the last choice: samples of a microbatch, limit
        self._ledger = ledger
        self._swarm = swarm
        self._samples_total = samples_total
        self._counted = counted
        self._telemetry = telemetry
        self._serial = 0
        self._duplicates = 0
        self._again: deque[_Piece] = deque()  # pieces that found no way
        self._block, self._cut = 0, range(0)  # the block in work, and its samples that are in no piece yet
        self._left: dict[int, int] = {}  # block -> samples not yet done
        self._under_way = 0
        self.returned = 0  # microbatches whose gradient came back, ever
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._round_trip = RoundTrip(manifest.limits.microbatch_timeout_s)
        self.window = Window(2 * manifest.pipeline.stages, manifest.pipeline.window_max)
        self.draining = False
        self._held = False
        self._running = False
        self.loss = Ema(0.05)
        self.done = 0  # microbatches that came back
        self.losses: deque[float] = deque(maxlen=LOSSES_KEPT)  # nats per token of the last of them
        self._recent: deque[tuple[float, int]] = deque()
        self.validation: tuple[float, int] | None = None  # nats per token, samples of the run by then
        self.validation_first: float | None = None

    async def run(self) -> None:
        """Start microbatches until cancelled or told to drain; returns when drained."""
        self._running = True
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._start_all(tasks)
        finally:
            self._drained.set()

    def _limit_window(self) -> None:
        """Keep no more under way than gradients may be late by, for the stages as they are now."""
        choice = self._sizing.choose(self._swarm(), self._samples_total())
        self.window.limit(choice.limit)
        if self._told != (choice.samples, choice.limit):
            self._told = choice.samples, choice.limit
            self._telemetry.event(
                "feeder.window",
                size=self.window.size,
                limit=choice.limit,
                wanted=self.window.wanted,
                microbatch=choice.samples,
                reason=choice.reason,
            )

    async def _start_all(self, tasks: asyncio.TaskGroup) -> None:
        while not self.draining:
            self._limit_window()
            if self._held or self._under_way >= self.window.size:
                await self._change()
                continue
            self._under_way += 1
            tasks.create_task(self._carry(self._next()))

    @property
    def under_way(self) -> int:
        """Microbatches started and not back yet."""
        return self._under_way

    def hold(self, held: bool) -> None:
        """Start nothing new while `held`; what is under way goes on."""
        self._held = held
        self._changed.set()

    def stop(self) -> None:
        """Start nothing new."""
        self.draining = True
        self._changed.set()

    async def drain(self) -> None:
        """Start nothing new; returns when all that is under way came back."""
        self.stop()
        if self._running:
            await self._drained.wait()

    def tokens_per_second(self) -> float:
        """Over the last RATE_SPAN_S."""
        now = asyncio.get_running_loop().time()
        while self._recent and self._recent[0][0] < now - RATE_SPAN_S:
            self._recent.popleft()
        if not self._recent:
            return 0.0
        return sum(tokens for _, tokens in self._recent) / max(1.0, min(RATE_SPAN_S, now - self._recent[0][0]))

    def heard(self, told: Mapping[PeerId, record_pb2.Blocks], frontier_max: int) -> list[RemoteFault]:
        """What other feeders' records say they finished; returns what of it cannot be believed: among it that more than
        `frontier_max` blocks are."""
        faults = self._ledger.merge_all(told, frontier_max)
        self._count_duplicates()
        return faults

    def again(self, indices: Sequence[int]) -> WireTensor | None:
        """Tokens of training samples, for those who check what other feeders send."""
        return self._samples.again(indices)

    def finished(self) -> record_pb2.Blocks:
        """Blocks known to be finished, by whomever."""
        return self._ledger.finished()

    def _count_duplicates(self) -> None:
        """Blocks that two feeders finished because their views differed: reported, never undone."""
        new = self._ledger.duplicates - self._duplicates
        if new:
            self._duplicates = self._ledger.duplicates
            self._telemetry.count(name.DUPLICATE_SAMPLES, new * self._manifest.data.block_samples)
            self._telemetry.event("data.duplicate", level="warning", blocks=new)

    async def validate(self, samples_total: int) -> float | None:
        """Held-out loss, nats per token, through random routes; None when a microbatch found no way. Trains nothing."""
        gate = asyncio.Semaphore(VALIDATING_MAX)

        async def one(tokens: WireTensor) -> tuple[float, int]:
            async with gate:
                carried = await self._send(tokens, wire.PURPOSE_VALIDATE)
                self._telemetry.count(name.MICROBATCHES, outcome="validated")
                return carried.loss_sum, carried.tokens

        try:
            results = await together([partial(one, tokens) for tokens in self._samples.held_out()])
        except (Unavailable, RemoteFault) as failure:
            self._telemetry.event("validation.failed", level="warning", reason=str(failure))
            return None
        loss = sum(total for total, _ in results) / max(1, sum(tokens for _, tokens in results))
        self.validation = (loss, samples_total)
        if self.validation_first is None:
            self.validation_first = loss
        self._telemetry.gauge(name.LOSS, loss, split="validation")
        self._telemetry.event("validation.done", loss=loss, samples_total=samples_total)
        return loss

    def validation_due(self, before: int, after: int) -> bool:
        """Whether the rounds from `before` to `after` complete another `validation_every_samples` of the run."""
        return self._validation_index(after) > self._validation_index(before)

    def validates(self, round_index: int) -> bool:
        """Whether it is this feeder's turn to validate after `round_index`: VALIDATORS of the feeders, by hash, so that
        one of them may have died without its record having expired."""
        feeders, turn = {*self._swarm().feeders(), self._me}, self._validation_index(round_index)
        order = sorted(feeders, key=lambda peer: digest64(self._manifest.seed, "validate", turn, peer))
        return self._me in order[:VALIDATORS]

    def _validation_index(self, round_index: int) -> int:
        samples = round_index * self._manifest.gossip.round_samples
        return samples // self._manifest.pipeline.validation_every_samples

    def _next(self) -> _Piece:
        """The next microbatch to start: one that found no way, or of the block in work or a new one of ours."""
        if self._again:
            return self._again.popleft()
        if not self._cut:
            self._block, _ = self._ledger.take(self._swarm().feeders())
            size = self._manifest.data.block_samples
            self._cut, self._left[self._block] = range(self._block * size, (self._block + 1) * size), size
        most = self._sizing.choose(self._swarm(), self._samples_total()).samples
        indices, self._cut = self._cut[:most], self._cut[most:]
        return _Piece(self._block, tuple(indices))

    async def _carry(self, piece: _Piece) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            tokens = self._samples.train(piece.indices)
            carried = await self._send(tokens, wire.PURPOSE_TRAIN, piece.indices[0])
        except MicrobatchLost as lost:
            self._telemetry.count(name.MICROBATCHES, outcome="lost")
            self._telemetry.event("microbatch.lost", level="warning", reason=str(lost), block=piece.block)
            self._again.appendleft(piece)
            self._round_trip.lost(begun, loop.time())
            self.window.lost()
            await asyncio.sleep(LOST_PAUSE_S)
        else:
            self._done(piece, carried, loop.time() - begun)
        finally:
            self._under_way -= 1
            self._changed.set()

    def _done(self, piece: _Piece, carried: Carried, seconds: float) -> None:
        now, tokens = asyncio.get_running_loop().time(), carried.tokens
        self.returned += 1
        self._round_trip.completed(seconds)
        self.window.completed(seconds, carried.queued_s, self._machines())
        self._sizing.completed(len(piece.indices), seconds, carried.queued_s)
        self.loss.add(carried.loss_sum / max(1, tokens))
        self.done += 1
        self.losses.append(carried.loss_sum / max(1, tokens))
        self._recent.append((now, tokens))
        self._telemetry.count(name.MICROBATCHES, outcome="done")
        self._telemetry.count(name.TOKENS, tokens)
        self._telemetry.count(name.SAMPLES, len(piece.indices))
        self._telemetry.gauge(name.WINDOW, float(self.window.size))
        self._telemetry.gauge(name.WINDOW_WANTED, float(self.window.wanted))
        self._counted(len(piece.indices))
        self._left[piece.block] -= len(piece.indices)
        if self._left[piece.block] == 0:
            del self._left[piece.block]
            self._ledger.finish(piece.block)
            self._count_duplicates()

    def _machines(self) -> float:
        """Replicas of all stages for each feeder: so many this one should keep supplied."""
        sizes = self._swarm().sizes
        return sum(sizes) / max(1, sizes[0])

    async def _send(self, tokens: WireTensor, purpose: wire.Purpose, first_sample: int = 0) -> Carried:
        self._serial += 1
        process = wire.Process(
            microbatch_id=microbatch_id(self._me, self._incarnation, self._serial),
            feeder=self._me,
            samples=tokens.shape[0],
            purpose=purpose,
            itinerary=self._itinerary(),
            position=0,
            boundary_digest=self._hop.boundary_digest,
            first_sample=first_sample,
        )
        deadline = asyncio.get_running_loop().time() + self._round_trip.limit_s
        return await self._hop.carry(process, tokens, tokens, deadline)

    def _itinerary(self) -> tuple[int, ...]:
        spec = self._manifest.recovery
        lost = self._lost() if spec.while_lost == "skip" else ()
        return itinerary(self._manifest.pipeline.stages, self._serial, swapped=spec.itinerary == "swapped", lost=lost)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

"""The feeder: reads data and starts microbatches. The first hop of each is this node's own first-stage replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnode.base.errors import Busy, MicrobatchLost, RemoteFault
from swarmnode.base.ids import PeerId, microbatch_id
from swarmnode.base.metrics import name
from swarmnode.base.ports import Telemetry, WireTensor
from swarmnode.base.token_rate import CountRate
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.base.work import Work
from swarmnode.data.blocks import BlockLedger
from swarmnode.net.membership.swarm import Swarm
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.gossip_compat import averages_gradients
from swarmnode.train.pipeline.hop import Hop, RunningLoss
from swarmnode.train.pipeline.microbatch_size import MicrobatchSizer, SizeChoice
from swarmnode.train.pipeline.next_hop import WAIT_MAX_S, MicrobatchResult, RoundTrip

VALIDATORS = 2  # guess: feeders that measure the held-out loss after a round, with as many microbatches in flight each


# Microbatches whose text is not here yet: a feeder waits briefly, then sets them aside and trains other text.
#
# If the only member with a chunk is gone, a feeder continues with the chunks that are available.

PATIENCE_S = 5.0  # guess: a chunk of 4 MiB takes .7 s at 50 Mbit/s
ASIDE_MAX = 512  # guess: pieces set aside, a block or more of every group


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """A microbatch's samples, of one block."""

    block: int
    indices: tuple[int, ...]


class Samples(Protocol):
    """Numbered samples as token tensors u16 or u32 [B, T+1], with what the loss counts (data/sample.py).

    Implementations inherit: text that lies on this machine need not be fetched."""

    digest: bytes = b""
    """Names the text; empty where it is made up."""
    span: int = 1
    """Blocks that lie in the same pieces of text: they belong to one feeder."""

    def train(self, indices: Sequence[int]) -> WireTensor: ...

    def here(self, indices: Sequence[int]) -> bool:
        """Whether `train` has the text of `indices` at hand."""
        return True

    async def fetch(self, indices: Sequence[int]) -> None:
        """Have the text of `indices` at hand, however long that takes."""
        return

    async def in_vain(self, indices: Sequence[int]) -> None:
        """Returns when nobody who is known gives the text of `indices` now."""
        await asyncio.Event().wait()

    async def fetch_held_out(self) -> None:
        """Have the text of `held_out` at hand, however long that takes."""
        return

    async def prefetch(self, coming: Callable[[], Iterable[int]], changed: asyncio.Event) -> None:
        """Have the text of blocks that are `coming` here soon, again whenever `changed`; until cancelled, or it is."""
        return

    async def again(self, indices: Sequence[int]) -> WireTensor | None:
        """The same tokens for the same samples, wherever they are read; None where each microbatch is made up, or the
        text is not at hand."""
        ...

    def held_out(self) -> Sequence[WireTensor]:
        """A few microbatches of held-out text, the same on every call."""
        ...


class TextWait:
    """Waits for text, for one feeder. `stop` ends all waiting."""

    def __init__(self, samples: Samples, telemetry: Telemetry, changed: Callable[[], None]) -> None:
        """`changed` is called when text has arrived."""
        self.samples = samples
        self._telemetry = telemetry
        self._changed = changed
        self._aside: dict[SampleSpan, asyncio.Task[None]] = {}
        self._stopped = asyncio.Event()
        self.come: deque[SampleSpan] = deque()
        """Pieces set aside whose text has arrived."""

    async def at_hand(self, tasks: asyncio.TaskGroup, piece: SampleSpan) -> bool:
        """True if the text of `piece` is here, after a short wait unless no member serves it. False: `piece` is set
        aside until its text arrives."""
        if self.samples.here(piece.indices):
            return True
        loop = asyncio.get_running_loop()
        begun = loop.time()
        fetching = tasks.create_task(self.samples.fetch(piece.indices))
        ends: set[asyncio.Task[object]] = {tasks.create_task(self._stopped.wait())}
        full = len(self._aside) >= ASIDE_MAX
        if not full:
            ends.add(tasks.create_task(self.samples.in_vain(piece.indices)))
        patience_s = None if full else PATIENCE_S
        await asyncio.wait({fetching, *ends}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        self._telemetry.count(name.DATA_WAIT_SECONDS, loop.time() - begun)
        if fetching.done():
            fetching.result()
            return True
        self._aside[piece] = fetching
        if self._stopped.is_set():
            self.stop()
        else:
            fetching.add_done_callback(lambda _: self._came(piece))
        return False

    def stop(self) -> None:
        """Nobody waits any more."""
        self._stopped.set()
        for fetching in self._aside.values():
            fetching.cancel()
        self._aside.clear()

    def _came(self, piece: SampleSpan) -> None:
        if self._aside.pop(piece, None) is not None:
            self.come.append(piece)
            self._changed()


@dataclass(eq=False)
class Feeder:
    """Keeps a window of microbatches in flight, of at most `room` samples, and counts the completed ones."""

    manifest: Manifest
    me: PeerId
    incarnation: int
    hop: Hop
    samples: Samples
    sizing: MicrobatchSizer
    ledger: BlockLedger
    swarm: Callable[[], Swarm]
    counted: Callable[[int], None]
    telemetry: Telemetry
    room: Callable[[], int]
    step: Callable[[], int] = lambda: 0
    """The step, a round, that microbatches which start now belong to; read where gradients are averaged."""

    def __post_init__(self) -> None:
        self._told: tuple[int, int] | None = None  # last choice logged: samples of a microbatch, limit
        self._serial = 0
        self._duplicates = 0
        self._again: deque[SampleSpan] = deque()  # pieces that found no route, to be sent again
        self._block = 0  # the block in work
        self._cut = range(0)  # its samples that are not yet in a piece
        self._left: dict[int, int] = {}  # block -> samples not yet done
        self.under_way = 0  # microbatches started and not completed
        self.idle = asyncio.Event()  # set while there are none
        self.idle.set()
        self._samples_under_way = 0
        self._validating = False
        self.together = averages_gradients(self.manifest)  # replicas wait for each other before each step
        self.changed = asyncio.Event()
        self._drew = asyncio.Event()  # a block was taken: others are coming
        self._text = TextWait(self.samples, self.telemetry, self.changed.set)
        self._drained = asyncio.Event()
        self._round_trip = RoundTrip(self.manifest.limits.microbatch_timeout_s)
        self.draining = False
        self._held = False
        self._running = False
        self.loss = RunningLoss()
        self.done = 0  # microbatches completed
        self._tokens = 0  # read in them
        self._rate = CountRate()  # of these

    async def run(self) -> None:
        """Start microbatches until cancelled or told to drain; return when drained."""
        self._running = True
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._start_all(tasks)
        finally:
            self._drained.set()

    @property
    def spared(self) -> bool:
        """Whether this feeder trains nothing while it validates: others do, and no step waits for it. Where all
        feeders validate, they train beside it: a step of nobody's samples would teach nothing."""
        return self._validating and self.together and len(self.swarm().feeders()) > VALIDATORS

    def _choice(self) -> SizeChoice:
        """The samples of a microbatch in the current stages, and how many to keep in flight."""
        choice = self.sizing.choose(self.swarm())
        if self._told != (choice.samples, choice.limit):
            self._told = choice.samples, choice.limit
            self.telemetry.gauge(name.WINDOW, float(choice.limit))
            self.telemetry.event("feeder.window", limit=choice.limit, microbatch=choice.samples, reason=choice.reason)
        return choice

    async def _start_all(self, tasks: asyncio.TaskGroup) -> None:
        while not self.draining:
            choice = self._choice()
            room = self.room() - self._samples_under_way
            if self._held or self.spared or self.under_way >= choice.limit or room <= 0:
                await self._change()
                continue
            piece = self._next(min(room, choice.samples))
            if await self._text.at_hand(tasks, piece):
                self.under_way += 1
                self.idle.clear()
                self._samples_under_way += len(piece.indices)
                tasks.create_task(self._run_microbatch(piece))

    async def prefetch(self) -> None:
        """Have the text of coming blocks here before they are drawn, until cancelled."""
        await self.samples.prefetch(self._coming, self._drew)

    def _coming(self) -> Iterator[int]:
        """Blocks that this feeder will draw, the one in work first."""
        if self._cut:
            yield self._block
        yield from self.ledger.coming(self.swarm().feeders())

    @contextlib.contextmanager
    def sparing(self) -> Iterator[None]:
        """This feeder validates for the length of a block (see `spared`)."""
        self._validating = True
        try:
            yield
        finally:
            self._validating = False
            if self.together:
                self.changed.set()

    def hold(self, held: bool) -> None:
        """Start nothing new while `held`; microbatches in flight continue."""
        self._held = held
        self.changed.set()

    def stop(self) -> None:
        """Start nothing new."""
        self.draining = True
        self._text.stop()
        self.changed.set()

    async def drain(self) -> None:
        """Start nothing new; return when all microbatches in flight are complete."""
        self.stop()
        if self._running:
            await self._drained.wait()

    def tokens_per_second(self) -> float:
        """Tokens read per second, of the samples fed here."""
        return self._rate.look(asyncio.get_running_loop().time(), self._tokens)

    def observe_blocks(self, told: Mapping[PeerId, record_pb2.Blocks], frontier_max: int) -> list[RemoteFault]:
        """Merge the blocks that other feeders' records call finished. Returns the implausible claims, among them more
        than `frontier_max` blocks."""
        faults = self.ledger.merge_all(told, frontier_max)
        self._count_duplicates()
        return faults

    def _count_duplicates(self) -> None:
        """Report blocks that two feeders finished because their views differed. They are not undone."""
        new = self.ledger.duplicates - self._duplicates
        if new:
            self._duplicates = self.ledger.duplicates
            self.telemetry.count(name.DUPLICATE_SAMPLES, new * self.manifest.data.block_samples)
            self.telemetry.event("data.duplicate", level="warning", blocks=new)

    def _next(self, most: int) -> SampleSpan:
        """The next microbatch to start: one that found no route, else one of the current block, else of a new block, of
        at most `most` samples."""
        if waiting := self._again or self._text.come:
            return waiting.popleft()
        if not self._cut:
            self._block, reason = self.ledger.take(self.swarm().feeders())
            self.telemetry.event("data.block", level="debug", block=self._block, state="taken", reason=reason)
            self._drew.set()
            size = self.manifest.data.block_samples
            self._cut = range(self._block * size, (self._block + 1) * size)
            self._left[self._block] = size
        indices = self._cut[:most]
        self._cut = self._cut[most:]
        return SampleSpan(self._block, tuple(indices))

    async def _run_microbatch(self, piece: SampleSpan) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            tokens = self.samples.train(piece.indices)
            outcome = await self.send(tokens, wire.PURPOSE_TRAIN, piece.indices[0])
        except (MicrobatchLost, Busy) as lost:  # Busy: out of memory in this stage
            self.telemetry.count(name.MICROBATCHES, outcome="lost")
            self.telemetry.event("microbatch.lost", level="warning", reason=str(lost), block=piece.block)
            self._again.appendleft(piece)
            self._round_trip.record_loss(begun, loop.time())
            await asyncio.sleep(WAIT_MAX_S)  # before anything new starts
        else:
            self._done(piece, outcome, loop.time() - begun)
        finally:
            self.under_way -= 1
            if not self.under_way:
                self.idle.set()
            self._samples_under_way -= len(piece.indices)
            self.changed.set()

    def _done(self, piece: SampleSpan, outcome: MicrobatchResult, seconds: float) -> None:
        work = Work.of(len(piece.indices), self.manifest.model.context, outcome.tokens)
        self._round_trip.record_trip(seconds)
        self.sizing.record_trip(len(piece.indices), seconds, outcome.queued_s)
        self.loss.add(outcome.loss_sum, work.targets)
        self.done += 1
        self._tokens += work.tokens
        self.telemetry.count(name.MICROBATCHES, outcome="done")
        self.telemetry.count(name.TOKENS, work.tokens)
        self.telemetry.count(name.TARGETS, work.targets)
        self.telemetry.count(name.SAMPLES, work.samples)
        self.counted(work.samples)
        self._left[piece.block] -= len(piece.indices)
        if self._left[piece.block] == 0:
            del self._left[piece.block]
            self.ledger.finish(piece.block)
            self.telemetry.event("data.block", level="debug", block=piece.block, state="done")
            self._count_duplicates()

    async def send(self, tokens: WireTensor, purpose: wire.Purpose, first_sample: int = 0) -> MicrobatchResult:
        """Send a microbatch of `tokens` through the pipeline. Raises as Hop.run_microbatch."""
        self._serial += 1
        process = wire.Process(
            microbatch_id=microbatch_id(self.me, self.incarnation, self._serial),
            feeder=self.me,
            samples=tokens.shape[0],
            purpose=purpose,
            itinerary=range(self.manifest.pipeline.stages),
            position=0,
            boundary_digest=self.hop.boundary_digest,
            first_sample=first_sample,
            step=self.step() if self.together and purpose == wire.PURPOSE_TRAIN else 0,
        )
        deadline = asyncio.get_running_loop().time() + self._round_trip.limit_s
        return await self.hop.run_microbatch(process, tokens, tokens, deadline)

    async def _change(self) -> None:
        self.changed.clear()
        await self.changed.wait()

"""A replica's part of a microbatch: forward, send onward, backward. It lives on the event loop and awaits the compute
thread (`stage_worker.py`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from swarmnode.base.ema import Ema
from swarmnode.base.errors import Busy, RemoteFault, StartAnew, Unavailable
from swarmnode.base.ids import MicrobatchId, PeerId
from swarmnode.base.metrics import name
from swarmnode.base.ports import Answer, Call, Priority, StepReport, WireTensor
from swarmnode.base.token_rate import CountRate
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.work import Work
from swarmnode.data.microbatch_shape import check_inputs, check_samples, check_way
from swarmnode.net.membership.judge import Claim, Judge, TensorFingerprints
from swarmnode.net.membership.receipt import WorkBook
from swarmnode.net.membership.swarm import StageContext
from swarmnode.net.membership.trust import PeerHistory
from swarmnode.train.pipeline.backlog import Backlog, InFlight
from swarmnode.train.pipeline.feeder_turns import FeederTurns
from swarmnode.train.pipeline.microbatch_size import PendingForward, label
from swarmnode.train.pipeline.next_hop import MicrobatchResult, NextHop, Reservations, onward
from swarmnode.train.pipeline.stage_worker import HopInput, StageWorker

T = TypeVar("T")

FORWARD_SHARE = 1.0 / 3.0  # of a microbatch's arithmetic: backward costs twice as much


@dataclass(slots=True)
class UnsignedAnswer(Answer):
    """An answer to a microbatch, not signed yet, and the fingerprints of its tensors; None where answers are not
    signed."""

    prints: TensorFingerprints | None = None


DECAY = 0.05  # guess: smooths over about 20 microbatches


class RunningLoss:
    """Summed losses over counted tokens, both smoothed alike: a microbatch with few counted tokens weighs little, one
    with none nothing."""

    def __init__(self) -> None:
        self._nats = Ema(DECAY)
        self._tokens = Ema(DECAY)

    def add(self, loss_sum: float, tokens: int) -> None:
        """A microbatch with so many counted tokens lost `loss_sum` nats on them."""
        self._nats.add(loss_sum)
        self._tokens.add(tokens)

    @property
    def known(self) -> bool:
        """Whether any token was counted."""
        return self._tokens.value > 0.0

    @property
    def value(self) -> float:
        """Nats per token; 0 before any token was counted."""
        return self._nats.value / self._tokens.value if self.known else 0.0


def checked(here: StageContext, boundary_digest: bytes, call: Call) -> tuple[wire.Process, WireTensor, WireTensor]:
    """The microbatch of a request, its input and its tokens, checked as far as possible without arithmetic.
    `boundary_digest`: of our own subspace."""
    process = call.header.process
    manifest = here.manifest
    check_way(manifest, here.stage, process)
    check_samples(manifest, process.samples, process.boundary_digest, boundary_digest)
    x, tokens = check_inputs(manifest, process.samples, call.tensors)
    return process, x, tokens


@dataclass(eq=False)
class Hop:
    """Serves microbatches on one replica. All arithmetic is `worker`'s, through `compute`. `history` records peers
    whose gradient or input was trained on, `book` the work that is signed for."""

    here: StageContext
    next_hop: NextHop
    backlog: Backlog
    history: PeerHistory
    judge: Judge
    book: WorkBook = field(default_factory=WorkBook)
    step_begun: Callable[[wire.Process], Awaitable[None]] | None = None
    """Waits until this replica has the weights that a training microbatch of another stage needs."""

    def __post_init__(self) -> None:
        self.boundary_digest = self.here.replica.boundary_digest()
        self._now = asyncio.get_running_loop().time
        self.worker = StageWorker(self.here, self._now, self.judge, self._settled)
        self.turns = FeederTurns()
        self._reservations = Reservations(lambda: self.here.compute.waiting + self.here.transport.line_queue)
        self.inner_steps = 0
        self.samples = 0  # trained here since start
        self._rate = CountRate()  # of tokens read in them
        self.worked = 0.0  # the same as compute work, including microbatches not yet returned
        self.reworked = 0.0  # the same for recomputed forwards
        self.loss = RunningLoss()

    async def serve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "process". Raises RemoteFault for a malformed request, Busy, MicrobatchLost."""
        self._reservations.on_arrival(peer)
        process, x, tokens = checked(self.here, self.boundary_digest, call)
        deadline = self._now() + process.deadline_ms / 1000.0
        key = (MicrobatchId(process.microbatch_id), process.position)
        repeat = (x, tokens) if key in self.backlog else None
        work = partial(self._answer, peer, call, process, x, tokens, deadline)
        answer = await self.backlog.once(key, work, peer)
        assert isinstance(answer, UnsignedAnswer)
        return await self._signed(answer, process, peer, repeat)

    async def _answer(
        self,
        peer: PeerId,
        call: Call,
        process: wire.Process,
        x: WireTensor,
        tokens: WireTensor,
        deadline: float,
        held: InFlight,
    ) -> UnsignedAnswer:
        """The answer to a microbatch of `peer`, made once however often it arrives."""
        fed = (process.position, process.purpose) == (1, wire.PURPOSE_TRAIN)
        if fed and self.judge.refuses(process, tokens, x):
            # As a replica without room says it: the feeder does not learn why.
            raise Busy(self.backlog.slots.full(1), retry_after_s=self.backlog.seconds)
        with self._turn(peer, process):
            outcome = await self.run_microbatch(process, x, tokens, deadline, held)
        report = wire.Processed(
            loss_sum=outcome.loss_sum,
            tokens=outcome.tokens,
            path=[self.here.me, *outcome.path],
            retries=outcome.retries,
            onward_s=outcome.onward_s,
            queued_s=outcome.queued_s,
            received_s=call.received_s,
        )
        if outcome.prints is not None:
            report.inner_steps = outcome.prints.steps
        if fed:
            self.judge.observe_input(process, tokens, x)
        tensors = () if outcome.gradient is None else (outcome.gradient,)
        if process.purpose == wire.PURPOSE_TRAIN:
            self.history.record_request(peer)
            self.turns.record_fed(PeerId(process.feeder))
            work = self._work(process, outcome.tokens)
            self.book.record_service(peer, work)
            if process.position == 1:  # who read the data has no caller
                self.book.record_gradient(peer, work)
        return UnsignedAnswer(wire.Reply(processed=report), tensors, urgent=True, prints=outcome.prints)

    def _turn(self, peer: PeerId, process: wire.Process) -> contextlib.AbstractContextManager[None]:
        """Train a microbatch of the feeder `peer` in it, if it is one. Raises RemoteFault for samples that were trained
        here."""
        if process.purpose != wire.PURPOSE_TRAIN or process.position != 1:
            return contextlib.nullcontext()
        return self.turns.turn(peer, process.first_sample, process.samples)

    async def _signed(
        self,
        answer: UnsignedAnswer,
        process: wire.Process,
        caller: PeerId,
        repeat: tuple[WireTensor, WireTensor] | None,
    ) -> Answer:
        """`answer` with our signed statement of it to `caller`. `repeat` is the input of a caller whose microbatch was
        in work or answered already: the answer is one to that input too, or StartAnew is raised. A statement names
        the caller and its input, so each caller gets its own."""
        prints = answer.prints
        if prints is None:
            return answer
        if repeat is not None:
            mine = await self.here.compute.run(Priority.BACKWARD, 0, partial(self.worker.fingerprints, repeat))
            if mine != (prints.x, prints.tokens):
                raise StartAnew("this microbatch was counted here with another input")
        reply = wire.Reply()
        reply.CopyFrom(answer.header)
        self.judge.sign(process, caller, prints, reply.processed)
        return Answer(reply, answer.tensors, urgent=True)

    async def reserve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "reserve". Raises Unavailable while this replica drains."""
        if self.backlog.refusing is not None:
            raise Unavailable(self.backlog.refusing)
        return self._reservations.serve(peer, call)

    async def run_microbatch(
        self, process: wire.Process, x: WireTensor, tokens: WireTensor, deadline: float, held: InFlight | None = None
    ) -> MicrobatchResult:
        """Take a microbatch from here to the last stage and back; the result's gradient is that of `x`.

        The feeder calls this for its own microbatches (x are the tokens, so there is no gradient). Raises
        MicrobatchLost if the deadline passes first, Busy if memory runs out here, RemoteFault if `x` itself is bad.
        """
        if self.step_begun is not None and process.step:
            await self.step_begun(process)
        hop = HopInput(process, x, tokens, held)
        if process.position == len(process.itinerary) - 1:
            return await self._finish(hop)
        (y, pending), queued_s = await self._await_worker(Priority.FORWARD, self.worker.forward, hop)
        self.worked += FORWARD_SHARE * process.samples
        if pending is None:
            return await self.next_hop.send(onward(process), y, tokens, deadline)
        try:
            outcome = await self._return(hop, y, pending, deadline)
            outcome.queued_s += queued_s
            return outcome
        finally:
            pending.drop()

    async def _return(self, hop: HopInput, y: WireTensor, pending: PendingForward, deadline: float) -> MicrobatchResult:
        """Send `y` onward and run the gradient back through the tape. A bad gradient is the next peer's fault: ask
        another."""
        process = hop.process
        while True:
            outcome = await self.next_hop.send(onward(process), y, hop.tokens, deadline)
            assert outcome.peer is not None and outcome.gradient is not None
            peer = outcome.peer
            next_stage = process.itinerary[process.position + 1]
            try:
                # A suspected replica still has to answer, or nothing would ever clear it. Its answers are examined and
                # not used, as long as another replica can answer.
                if self.judge.withholds(peer, next_stage):
                    claim, _ = await self._await_worker(
                        Priority.BACKWARD, partial(self.worker.measured_claim, y=y, answer=outcome), hop
                    )
                    assert claim is not None
                    self.judge.observe_answer(claim)
                    continue
                work = partial(self.worker.backward, y, outcome, pending)
                result, queued_s = await self._await_worker(Priority.BACKWARD, work, hop)
            except RemoteFault as fault:
                self.next_hop.blame(peer, next_stage, fault)
                # Nothing was added, so the caller may withdraw again. The tape is whole: another peer is asked.
                self._revoke(hop)
                continue
            # From here on the microbatch is trained: only now does the peer count as one that works.
            sent_back = outcome.gradient
            outcome.gradient = result.gradient
            outcome.prints = result.prints
            outcome.queued_s += queued_s
            self.history.record_work(peer)
            done = self._work(process, outcome.tokens)
            self.book.record_gradient(peer, done)
            if process.position == 0:
                self.book.record_service(peer, done)
            self.worked += (1.0 - FORWARD_SHARE) * process.samples
            self.reworked += FORWARD_SHARE * process.samples * result.recomputed
            self._trained(process.samples, result.step)
            if result.claim is not None:
                # Our own caller's audit may ask what this answer was made of.
                if hop.held is not None:
                    self.judge.keep(process, y, sent_back, result.claim)
                if not result.early:
                    self.judge.observe_answer(result.claim)
            return outcome

    def _settled(self, step: StepReport | None, claim: Claim | None) -> None:
        """Record the `step` and consider the `claim` that the answer to a microbatch did not wait for."""
        if step is not None:
            self.record_step(step)
        if claim is not None:
            self.judge.observe_answer(claim)

    async def _finish(self, hop: HopInput) -> MicrobatchResult:
        """The last stage: loss and its gradient in one piece of work."""
        process = hop.process
        # Validation too: all other work of the last stage is backward, so at low priority it would never run on a busy
        # replica.
        result, queued_s = await self._await_worker(Priority.BACKWARD, self.worker.loss, hop)
        self.worked += process.samples if hop.train else FORWARD_SHARE * process.samples
        if hop.train:
            self.here.telemetry.count(name.GRADIENTS, staleness=label(0))
            self.loss.add(result.loss_sum, result.tokens)
            if self.loss.known:
                self.here.telemetry.gauge(name.LOSS, self.loss.value, split="train")
            self._trained(process.samples, result.step)
            if process.position == 0:  # of one stage
                work = self._work(process, result.tokens)
                self.book.record_gradient(self.here.me, work)
                self.book.record_service(self.here.me, work)
        return MicrobatchResult(
            result.gradient, result.loss_sum, result.tokens, prints=result.prints, queued_s=queued_s
        )

    async def _await_worker(self, priority: Priority, work: Callable[[HopInput], T], hop: HopInput) -> tuple[T, float]:
        """(`work` of `hop` by the worker, the seconds it queued for the compute thread)."""
        piece = partial(self.worker.piece, self._now(), work, hop)
        try:
            return await self.here.compute.run(priority, hop.process.samples, piece)
        except Busy:  # out of memory: nothing was counted
            self._revoke(hop)
            raise

    def _revoke(self, hop: HopInput) -> None:
        """Let the callers of `hop` withdraw it again: nothing of it was added. Raises Unavailable if all gave up."""
        if hop.held is not None and hop.train:
            hop.held.revoke()

    def tokens_per_second(self) -> float:
        """Tokens read per second, of the samples trained here."""
        return self._rate.look(self._now(), self.samples * self.here.manifest.model.context)

    def _trained(self, samples: int, step: StepReport | None) -> None:
        self.samples += samples
        if step is not None:
            self.record_step(step)

    def _work(self, process: wire.Process, targets: int) -> Work:
        return Work.of(process.samples, self.here.manifest.model.context, targets)

    def record_step(self, step: StepReport) -> None:
        self.inner_steps = step.step
        self.here.telemetry.count(name.INNER_STEPS)
        self.here.telemetry.gauge(name.GRADIENT_NORM, step.gradient_norm)
        self.here.telemetry.gauge(name.LEARNING_RATE, step.learning_rate)

"""A replica's part of a microbatch: forward, send onward, backward, and an inner step once the batch is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from swarmnode.errors import Busy, RemoteFault, StartAnew, Unavailable
from swarmnode.ids import MicrobatchId, PeerId
from swarmnode.manifest import Manifest
from swarmnode.metrics import name
from swarmnode.model.optimizer import inner_batch
from swarmnode.pipeline.accusation import Accusations
from swarmnode.pipeline.auditor import EXAMINED_S, SUSPECTED, Auditor
from swarmnode.pipeline.backlog import Backlog, InFlight, check_inputs, check_samples, check_tokens, check_way
from swarmnode.pipeline.feeder import RunningLoss
from swarmnode.pipeline.input_check import FeederInput, InputAuditor
from swarmnode.pipeline.next_hop import MicrobatchResult, NextHop, onward
from swarmnode.pipeline.recompute import RecomputeService
from swarmnode.pipeline.reservation import Reservations
from swarmnode.pipeline.staleness import (
    PUT_OFF,
    PendingForward,
    PendingGradients,
    averaged,
    label,
    replica_batch,
    replica_share,
)
from swarmnode.pipeline.statement import HopClaim, HopEvidence, TensorFingerprints, check_feed
from swarmnode.ports import Answer, Call, Compute, Priority, Replica, StepReport, Tape, Telemetry, WireTensor
from swarmnode.wire import call_pb2 as wire

T = TypeVar("T")

FORWARD_SHARE = 1.0 / 3.0  # of a microbatch's arithmetic: backward costs twice as much
HALVINGS_MAX = 40  # of the memory for tapes, which is then none
OWN_SHARE = 0.5  # guess: share of a dedicated device's free memory for tapes; rounds need the rest


@dataclass(slots=True)
class UnsignedAnswer(Answer):
    """An answer to a microbatch, not signed yet, and the fingerprints of its tensors; None where answers are not
    signed."""

    prints: TensorFingerprints | None = None


class Hop:
    """Serves microbatches on one replica. All arithmetic runs through `compute`, backward first."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        me: PeerId,
        replica: Replica,
        compute: Compute,
        next_hop: NextHop,
        backlog: Backlog,
        samples_total: Callable[[], int],
        telemetry: Telemetry,
        replicas: Callable[[], int] = lambda: 1,
        recompute: RecomputeService | None = None,
        auditor: Auditor | None = None,
        input_auditor: InputAuditor | None = None,
        accusations: Accusations | None = None,
        worked: Callable[[PeerId], object] = lambda peer: None,
        asked: Callable[[PeerId], object] = lambda peer: None,
    ) -> None:
        """`replicas` returns the stage's replica count: each steps on its share of the inner batch. `recompute` serves
        auditors of our answers, `auditor` signs our answers and checks those to us, `input_auditor` checks feeders'
        input; None: nothing is audited. `worked` is told each peer whose gradient was trained on, `asked` each
        whose input was."""
        self.auditor = auditor
        self._input_auditor = input_auditor
        self._accusations = accusations
        self.recompute = recompute or RecomputeService(
            manifest, stage, replica, compute, replica.boundary_digest(), telemetry
        )
        self._manifest = manifest
        self._replicas = replicas
        self._stage = stage
        self._me = me
        self._replica = replica
        self._compute = compute
        self._next_hop = next_hop
        self._backlog = backlog
        self._samples_total = samples_total
        self._telemetry = telemetry
        self.boundary_digest = replica.boundary_digest()
        self._reservations = Reservations(lambda: compute.waiting + next_hop.line_queue)
        self._tape_max = max(manifest.limits.tape_bytes_max, int(OWN_SHARE * replica.spare_nbytes))
        self._tape_nbytes = 0
        self._pending = PendingGradients(manifest.pipeline.staleness_max)
        self._tape_nbytes_last = 0  # of the last tape with its graph: the next takes as much
        self.inner_steps = 0
        self.samples = 0  # trained here since start
        self.worked = 0.0  # the same as compute work, including microbatches not yet returned
        self.reworked = 0.0  # the same for recomputed forwards; counted by the compute thread
        self.loss = RunningLoss()
        self._worked, self._asked = worked, asked

    async def serve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "process". Raises RemoteFault for a malformed request, Busy, MicrobatchLost."""
        self._reservations.on_arrival(peer)
        process, x, tokens = self._check(peer, call)
        deadline = asyncio.get_running_loop().time() + process.deadline_ms / 1000.0
        key = (MicrobatchId(process.microbatch_id), process.position)
        begun = False

        async def work(held: InFlight) -> Answer:
            nonlocal begun
            begun = True
            outcome = await self.run_microbatch(process, x, tokens, deadline, held)
            report = wire.Processed(
                loss_sum=outcome.loss_sum,
                tokens=outcome.tokens,
                path=[self._me, *outcome.path],
                retries=outcome.retries,
                onward_s=outcome.onward_s,
                queued_s=outcome.queued_s,
                received_s=call.received_s,
            )
            if self.auditor is not None and outcome.prints is not None:
                report.inner_steps = self._replica.inner_steps
                if self._input_auditor is not None and process.position == 1:
                    named = bytes(process.microbatch_id), process.first_sample, process.samples
                    self._input_auditor.observe_input(FeederInput(PeerId(process.feeder), peer, *named, tokens, x))
            tensors = () if outcome.gradient is None else (outcome.gradient,)
            if process.purpose == wire.PURPOSE_TRAIN and process.position:
                self._asked(peer)  # a feeder without a stage does no work of the run
            return UnsignedAnswer(wire.Reply(processed=report), tensors, urgent=True, prints=outcome.prints)

        answer = await self._backlog.once(key, work, peer)
        assert isinstance(answer, UnsignedAnswer)
        return await self._stated(answer, process, peer, None if begun else (x, tokens))

    async def _stated(
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
        if self.auditor is None or prints is None:
            return answer
        if repeat is not None:
            of = self._replica.fingerprint
            mine = await self._compute.run(Priority.BACKWARD, 0, lambda: tuple(map(of, repeat)))
            if mine != (prints.x, prints.tokens):
                raise StartAnew("this microbatch was counted here with another input")
        reply = wire.Reply()
        reply.CopyFrom(answer.header)
        self.auditor.sign(process, caller, prints, reply.processed)
        return Answer(reply, answer.tensors, urgent=True)

    async def reserve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "reserve". Raises Unavailable while this replica drains."""
        if self._backlog.refusing is not None:
            raise Unavailable(self._backlog.refusing)
        return self._reservations.serve(peer, call)

    async def suspect(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "suspicion". Raises Unavailable if this run does not audit."""
        if self.auditor is None:
            raise Unavailable("this run does not audit answers")
        return await self.auditor.serve_suspicion(peer, call)

    async def accuse(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "accusation". Raises Unavailable if this run does not audit."""
        if self._accusations is None:
            raise Unavailable("this run does not audit answers")
        return await self._accusations.serve(peer, call)

    async def run_microbatch(
        self, process: wire.Process, x: WireTensor, tokens: WireTensor, deadline: float, held: InFlight | None = None
    ) -> MicrobatchResult:
        """Take a microbatch from here to the last stage and back; the result's gradient is that of `x`.

        The feeder calls this for its own microbatches (x are the tokens, so there is no gradient). Raises
        MicrobatchLost if the deadline passes first, Busy if memory runs out here, RemoteFault if `x` itself is bad.
        """
        train = process.purpose == wire.PURPOSE_TRAIN
        if process.position == len(process.itinerary) - 1:
            return await self._finish(process, x, tokens, train, held)

        replicas = self._replicas()

        def forward() -> tuple[WireTensor, Tape | None, int]:
            steps = self._replica.inner_steps  # read here: another step may follow before the event loop is told
            used = self._tape_nbytes + self._tape_nbytes_last + self._replica.held_nbytes
            room = used <= self._tape_max >> min(self._replica.out_of_memory, HALVINGS_MAX)
            late = train and self._late(replicas)
            y, tape = self._replica.forward(x, keep=train, graph=room, tokens=tokens, late=late)
            if tape is not None and room:
                self._tape_nbytes_last = tape.nbytes
            if train and not room:
                self._telemetry.count(name.RELEASED_TAPES)
            return y, tape, steps

        (y, tape, steps), queued_s = await self._timed(Priority.FORWARD, process.samples, forward)
        self.worked += FORWARD_SHARE * process.samples
        if tape is None:
            return await self._next_hop.send(onward(process), y, tokens, deadline)
        nbytes = tape.nbytes
        self._hold(nbytes)
        pending = self._pending.opened(steps, asyncio.get_running_loop().time(), process.samples)
        try:
            outcome = await self._return(process, x, y, tape, pending, tokens, deadline, held)
            outcome.queued_s += queued_s
            return outcome
        finally:
            self._pending.closed(pending)
            self._hold(-nbytes)

    async def _return(
        self,
        process: wire.Process,
        x: WireTensor,
        y: WireTensor,
        tape: Tape,
        pending: PendingForward,
        tokens: WireTensor,
        deadline: float,
        held: InFlight | None,
    ) -> MicrobatchResult:
        """Send onward and run the gradient back through the tape. A bad gradient is the next peer's fault: ask
        another."""
        loop = asyncio.get_running_loop()
        while True:
            outcome = await self._next_hop.send(onward(process), y, tokens, deadline)
            gradient = outcome.gradient
            assert gradient is not None, "a training microbatch came back without a gradient"
            next_stage = process.itinerary[process.position + 1]
            assert outcome.peer is not None
            withheld = self.auditor is not None and self.auditor.withholds(outcome.peer, next_stage)

            def work(
                outcome: MicrobatchResult = outcome,
                gradient: WireTensor = gradient,
                replicas: int = self._replicas(),
                used: bool = not withheld,
            ) -> tuple[WireTensor | None, StepReport | None, HopClaim | None]:
                # The signature first: an unsigned gradient is refused before it is used.
                claim = self._claim(process, outcome, y, tokens, gradient)
                # Before the gradient touches the tape: what was added to the weights' gradient cannot be taken out.
                if not used:
                    return None, None, claim
                answer, step = self._backward(tape, pending, gradient, process.samples, held, loop, replicas)
                outcome.prints = self._prints(x, tokens, answer, claim)
                self._measure(answer, process.samples)
                return answer, step, claim

            try:
                (outcome.gradient, step, claim), queued_s = await self._timed(Priority.BACKWARD, process.samples, work)
            except RemoteFault as fault:
                assert outcome.peer is not None
                self._next_hop.blame(outcome.peer, next_stage, fault)
                # Nothing was added, so the caller may withdraw again. The tape is whole: another peer is asked.
                if held is not None:
                    held.revoke()
                continue
            except Busy:  # out of memory: nothing was counted
                if held is not None:
                    held.revoke()
                raise
            if withheld:
                assert self.auditor is not None and claim is not None and outcome.peer is not None
                self.auditor.observe_answer(claim)
                self._next_hop.blame(outcome.peer, next_stage, SUSPECTED, least_s=EXAMINED_S)
                continue
            # From here on the microbatch is trained: only now does the peer count as one that works.
            outcome.queued_s += queued_s
            assert outcome.peer is not None
            self._worked(outcome.peer)
            self.worked += (1.0 - FORWARD_SHARE) * process.samples
            self._trained(process.samples, step)
            if claim is not None:
                assert self.auditor is not None
                # Our own caller's audit may ask what this answer was made of.
                if held is not None:
                    shown = HopEvidence(y, gradient, claim.statement)
                    self.recompute.keep(bytes(process.microbatch_id), process.position, shown)
                self.auditor.observe_answer(claim)
            return outcome

    def _claim(
        self, process: wire.Process, outcome: MicrobatchResult, y: WireTensor, tokens: WireTensor, gradient: WireTensor
    ) -> HopClaim | None:
        """The verified claim of the next stage's answer to us. On the compute thread. Raises RemoteFault."""
        if self.auditor is None:
            return None
        assert outcome.peer is not None and outcome.report is not None
        next_hop = onward(process)
        prints = TensorFingerprints(*map(self._replica.fingerprint, (y, tokens, gradient)))
        stated = self.auditor.checked(next_hop, outcome.peer, outcome.report, prints)
        coherence = self.auditor.coherence(gradient, tokens, process.samples)
        return HopClaim(stated, process.samples, y, tokens, gradient, coherence=coherence)

    def _prints(
        self, x: WireTensor, tokens: WireTensor, given: WireTensor | None, claim: HopClaim | None
    ) -> TensorFingerprints | None:
        """Fingerprints of a hop that answers `given` and continued by `claim`; None if answers are not signed or there
        is none. On the compute thread."""
        if self.auditor is None or given is None:
            return None
        then = (claim.statement.tokens, claim.statement.x, claim.statement.gradient) if claim is not None else None
        of = self._replica.fingerprint
        if then is None:
            return TensorFingerprints(of(x), of(tokens), of(given))
        return TensorFingerprints(of(x), then[0], of(given), then[1], then[2])

    def _measure(self, given: WireTensor | None, samples: int) -> None:
        """Note the length of a gradient that is answered. On the compute thread."""
        if self._accusations is not None and given is not None:
            self._accusations.usual_norm.record(given, samples)

    async def _finish(
        self, process: wire.Process, x: WireTensor, tokens: WireTensor, train: bool, held: InFlight | None
    ) -> MicrobatchResult:
        """The last stage: loss and its gradient in one piece of work."""
        loop, replicas = asyncio.get_running_loop(), self._replicas()  # read here: work runs on another thread

        def work() -> tuple[MicrobatchResult, StepReport | None]:
            if held is not None and train:
                held.commit()
            result = self._replica.loss(x, tokens, process.samples, train=train)
            step = self._step(loop.time(), replicas) if train else None
            answer_up = MicrobatchResult(result.gradient, result.loss_sum, result.tokens)
            answer_up.prints = self._prints(x, tokens, result.gradient, None)
            self._measure(result.gradient, process.samples)
            return answer_up, step

        # Validation too: all other work of the last stage is backward, so at low priority it would never run on a busy
        # replica.
        try:
            (outcome, step), queued_s = await self._timed(Priority.BACKWARD, process.samples, work)
        except Busy:  # out of memory: nothing was counted
            if held is not None and train:
                held.revoke()
            raise
        outcome.queued_s = queued_s
        self.worked += process.samples if train else FORWARD_SHARE * process.samples
        if train:
            self._telemetry.count(name.GRADIENTS, staleness=label(0))
            self.loss.add(outcome.loss_sum, outcome.tokens)
            if self.loss.known:
                self._telemetry.gauge(name.LOSS, self.loss.value, split="train")
            self._trained(process.samples, step)
        return outcome

    async def _timed(self, priority: Priority, samples: int, work: Callable[[], T]) -> tuple[T, float]:
        """The value of `work`, and the seconds it queued for the compute thread."""
        loop = asyncio.get_running_loop()
        queued_at = loop.time()

        def timed() -> tuple[T, float]:
            waited_s, before = loop.time() - queued_at, self._replica.out_of_memory
            try:
                return work(), waited_s
            finally:
                if self._replica.out_of_memory > before:
                    self._telemetry.count(name.OUT_OF_MEMORY, self._replica.out_of_memory - before)

        return await self._compute.run(priority, samples, timed)

    def _backward(
        self,
        tape: Tape,
        pending: PendingForward,
        gradient: WireTensor,
        samples: int,
        held: InFlight | None,
        loop: asyncio.AbstractEventLoop,
        replicas: int,
    ) -> tuple[WireTensor | None, StepReport | None]:
        """The gradient of the input, and the report of an inner step if one was due. A gradient that is too old is
        passed on but not added here. On the compute thread."""
        if held is not None:
            held.commit()
        age = pending.age(self._replica.inner_steps)
        fresh = age <= self._manifest.pipeline.staleness_max
        before, clipped = self._replica.recomputed, self._replica.clipped
        gradient_up = self._replica.backward(tape, gradient, samples, accumulate=fresh)
        self._pending.closed(pending, loop.time())
        self._telemetry.count(name.GRADIENTS, staleness=label(age))
        if not fresh:
            self._telemetry.count(name.STALE_GRADIENTS)
        if self._replica.clipped > clipped:
            self._telemetry.count(name.CLIPPED_GRADIENTS)
        if self._replica.recomputed > before:
            self._telemetry.count(name.RECOMPUTED_TAPES)
            self.reworked += FORWARD_SHARE * samples
        return gradient_up, self._step(loop.time(), replicas)

    def _late(self, replicas: int) -> bool:
        """Whether the gradient of a forward made now will come after the next inner step: those before it complete a
        batch. On the compute thread."""
        waiting = self._replica.accumulated + self._pending.samples
        return waiting >= replica_share(self._manifest, self._samples_total(), replicas)

    def _step(self, now_s: float, replicas: int) -> StepReport | None:
        """Take an inner step if the batch is complete, with `replicas` replicas of this stage. On the compute thread,
        right after a gradient was added."""
        accumulated, samples_total, inner = self._replica.accumulated, self._samples_total(), self._manifest.inner
        if accumulated < replica_share(self._manifest, samples_total, replicas):
            return None
        together = inner_batch(inner, samples_total)
        most = PUT_OFF * replica_batch(self._manifest, max(together, inner.inner_batch_max), replicas)
        if accumulated < most and self._pending.put_off(self._replica.inner_steps, now_s):
            return None
        return self._replica.step(samples_total, together / max(1, replicas), averaged(self._manifest, replicas))

    def _trained(self, samples: int, step: StepReport | None) -> None:
        self.samples += samples
        if step is not None:
            self.inner_steps = step.step
            self._telemetry.count(name.INNER_STEPS)
            self._telemetry.gauge(name.GRADIENT_NORM, step.gradient_norm)
            self._telemetry.gauge(name.LEARNING_RATE, step.learning_rate)

    def _hold(self, nbytes: int) -> None:
        self._tape_nbytes += nbytes
        self._telemetry.gauge(name.TAPE_BYTES, float(self._tape_nbytes))

    def _check(self, peer: PeerId, call: Call) -> tuple[wire.Process, WireTensor, WireTensor]:
        """The microbatch of a request, its input and its tokens, checked as far as possible without arithmetic. At
        position 0 the input is the tokens, and the microbatch goes on in our subspace."""
        process, tensors = call.header.process, call.tensors
        manifest, mine = self._manifest, self.boundary_digest
        check_way(manifest, self._stage, process)
        if process.position == 0:
            check_samples(manifest, process.samples, mine, mine)
            tokens = check_tokens(manifest, process.samples, tensors)
            check_feed(process, tokens, self._next_hop.run_id)
            ours = wire.Process()
            ours.CopyFrom(process)
            ours.boundary_digest = mine
            return ours, tokens, tokens
        check_samples(manifest, process.samples, process.boundary_digest, mine)
        x, tokens = check_inputs(manifest, process.samples, tensors)
        if process.position == 1 and process.feeder != peer:
            check_feed(process, tokens, self._next_hop.run_id)
        return process, x, tokens

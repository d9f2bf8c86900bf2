"""This replica's part of a microbatch's way: forward, onward, backward, and an inner step when enough came together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.ids import MicrobatchId, PeerId
from swarmnode.manifest import Manifest
from swarmnode.metrics import name
from swarmnode.model.schedule import inner_batch
from swarmnode.pipeline.auditor import Auditor, Claim
from swarmnode.pipeline.backlog import Backlog, Held
from swarmnode.pipeline.onward import Carried, Onward
from swarmnode.pipeline.redo import Redoing, Shown
from swarmnode.pipeline.request import check_inputs, check_samples, check_way
from swarmnode.pipeline.reserve import Reservations
from swarmnode.pipeline.route import Ema
from swarmnode.pipeline.staleness import PUT_OFF, Pending, PendingGradients, label, replica_batch
from swarmnode.pipeline.statement import Prints
from swarmnode.pipeline.upstream import Fed, Upstream
from swarmnode.ports import Answer, Call, Compute, Priority, Replica, StepReport, Tape, Telemetry, WireTensor
from swarmnode.wire import call_pb2 as wire

T = TypeVar("T")

FORWARD_SHARE = 1.0 / 3.0  # of a microbatch's arithmetic: backward costs twice as much
OWN_SHARE = 0.5  # guess: of what is free on a replica's own device, for tapes; rounds need the rest
LOSS_DECAY = 0.05  # guess: smooths over about 20 microbatches


class Hop:
    """Serves microbatches on one replica. All arithmetic goes through `compute`, backward first."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        me: PeerId,
        replica: Replica,
        compute: Compute,
        onward: Onward,
        backlog: Backlog,
        samples_total: Callable[[], int],
        telemetry: Telemetry,
        replicas: Callable[[], int] = lambda: 1,
        redoing: Redoing | None = None,
        auditor: Auditor | None = None,
        upstream: Upstream | None = None,
    ) -> None:
        """`replicas` tells how many this stage has: each steps on its share of the inner batch. `redoing` serves those
        who check our answers, `auditor` signs these and checks those to us, `upstream` checks what feeders send; None:
        all are believed."""
        self._auditor = auditor
        self._upstream = upstream
        self.redoing = redoing or Redoing(manifest, stage, replica, compute, replica.boundary_digest(), telemetry)
        self._manifest = manifest
        self._replicas = replicas
        self._stage = stage
        self._me = me
        self._replica = replica
        self._compute = compute
        self._onward = onward
        self._backlog = backlog
        self._samples_total = samples_total
        self._telemetry = telemetry
        self.boundary_digest = replica.boundary_digest()
        self._reservations = Reservations(lambda: compute.waiting + onward.line_queue)
        self._tape_max = max(manifest.limits.tape_bytes_max, int(OWN_SHARE * replica.spare_nbytes))
        self._tape_nbytes = 0
        self._pending = PendingGradients(manifest.pipeline.staleness_max)
        self._tape_nbytes_last = 0  # of the last one with its graph: what the next will take
        self.inner_steps = 0
        self.samples = 0  # trained here since start
        self.worked = 0.0  # the same in work done, by arithmetic: also of microbatches that are not back yet
        self.reworked = 0.0  # the same of forwards done again; the compute thread counts it
        self.loss = Ema(LOSS_DECAY)
        self.believed: Callable[[PeerId], None] = lambda peer: None  # its gradient, or what it sent, was trained with

    async def serve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "process". Raises RemoteFault for a malformed request, Busy, MicrobatchLost."""
        self._reservations.came(peer)
        process = call.header.process
        x, tokens = self._check(process, call.tensors)
        deadline = asyncio.get_running_loop().time() + process.deadline_ms / 1000.0
        key = (MicrobatchId(process.microbatch_id), process.position)

        async def work(held: Held) -> Answer:
            carried = await self.carry(process, x, tokens, deadline, held)
            report = wire.Processed(
                loss_sum=carried.loss_sum,
                tokens=carried.tokens,
                path=[self._me, *carried.path],
                retries=carried.retries,
                onward_s=carried.onward_s,
                queued_s=carried.queued_s,
                received_s=call.received_s,
            )
            if self._auditor is not None and carried.prints is not None:
                self._auditor.signed(process, peer, carried.prints, carried.loss_sum, report)
                if self._upstream is not None and process.position == 1:
                    named = bytes(process.microbatch_id), process.first_sample, process.samples
                    self._upstream.saw(Fed(peer, *named, tokens, x))
            tensors = () if carried.gradient is None else (carried.gradient,)
            if process.purpose == wire.PURPOSE_TRAIN:
                self.believed(peer)
            return Answer(wire.Reply(processed=report), tensors, urgent=True)

        return await self._backlog.once(key, work, peer)

    async def reserve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "reserve". Raises Unavailable while this replica drains."""
        if self._backlog.refusing is not None:
            raise Unavailable(self._backlog.refusing)
        return self._reservations.serve(peer, call)

    async def show(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "opening"."""
        return await self.redoing.serve_opening(peer, call)

    async def redo(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "redo"."""
        return await self.redoing.serve_redo(peer, call)

    async def suspect(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "suspicion". Raises Unavailable where answers are believed."""
        if self._auditor is None:
            raise Unavailable("answers are believed in this run")
        return await self._auditor.serve_suspicion(peer, call)

    async def carry(
        self, process: wire.Process, x: WireTensor, tokens: WireTensor, deadline: float, held: Held | None = None
    ) -> Carried:
        """Take a microbatch from here to the last stage and back; the gradient returned is that of `x`.

        The feeder calls this for its own microbatches (x are the tokens, no gradient comes of it). Raises
        MicrobatchLost when the deadline passes first, RemoteFault when `x` itself is bad.
        """
        train = process.purpose == wire.PURPOSE_TRAIN
        if process.position == len(process.itinerary) - 1:
            return await self._finish(process, x, tokens, train, held)

        def forward() -> tuple[WireTensor, Tape | None, int]:
            steps = self._replica.inner_steps  # here: another step may follow before the event loop is told
            room = self._tape_nbytes + self._tape_nbytes_last <= self._tape_max
            y, tape = self._replica.forward(x, keep=train, graph=room, tokens=tokens)
            if tape is not None and room:
                self._tape_nbytes_last = tape.nbytes
            if train and not room:
                self._telemetry.count(name.RELEASED_TAPES)
            return y, tape, steps

        (y, tape, steps), queued_s = await self._timed(Priority.FORWARD, process.samples, forward)
        self.worked += FORWARD_SHARE * process.samples
        if tape is None:
            return await self._onward.send(process, y, tokens, deadline)
        nbytes = tape.nbytes
        self._hold(nbytes)
        pending = self._pending.opened(steps, asyncio.get_running_loop().time())
        try:
            carried = await self._return(process, x, y, tape, pending, tokens, deadline, held)
            carried.queued_s += queued_s
            return carried
        finally:
            self._pending.closed(pending)
            self._hold(-nbytes)

    async def _return(
        self,
        process: wire.Process,
        x: WireTensor,
        y: WireTensor,
        tape: Tape,
        pending: Pending,
        tokens: WireTensor,
        deadline: float,
        held: Held | None,
    ) -> Carried:
        """Send onward and run the gradient back through the tape; a bad one is the next peer's fault: ask another."""
        loop = asyncio.get_running_loop()
        while True:
            carried = await self._onward.send(process, y, tokens, deadline)
            gradient = carried.gradient
            assert gradient is not None, "a training microbatch came back without a gradient"

            def work(
                carried: Carried = carried, gradient: WireTensor = gradient, replicas: int = self._replicas()
            ) -> tuple[WireTensor | None, StepReport | None, Claim | None]:
                claim = self._claim(process, carried, y, tokens, gradient)
                given, step = self._backward(tape, pending, gradient, process.samples, held, loop, replicas)
                carried.prints = self._prints(x, tokens, given, claim)
                return given, step, claim

            try:
                (carried.gradient, step, claim), queued_s = await self._timed(Priority.BACKWARD, process.samples, work)
            except RemoteFault as fault:
                assert carried.peer is not None
                self._onward.blame(carried.peer, process.itinerary[process.position + 1], fault)
                if held is not None:
                    held.revoke()
                continue
            carried.queued_s += queued_s
            assert carried.peer is not None
            self.believed(carried.peer)
            self.worked += (1.0 - FORWARD_SHARE) * process.samples
            self._trained(process.samples, step)
            if claim is not None:
                assert self._auditor is not None
                if held is not None:
                    shown = Shown(y, gradient, claim.statement)
                    self.redoing.keep(bytes(process.microbatch_id), process.position, shown)
                self._auditor.saw(claim)
            return carried

    def _claim(
        self, process: wire.Process, carried: Carried, y: WireTensor, tokens: WireTensor, gradient: WireTensor
    ) -> Claim | None:
        """On the compute thread: what the next stage's server answered us, its statement checked. Raises
        RemoteFault."""
        if self._auditor is None:
            return None
        assert carried.peer is not None and carried.report is not None
        onward = wire.Process()
        onward.CopyFrom(process)
        onward.position += 1
        prints = Prints(*map(self._replica.fingerprint, (y, tokens, gradient)))
        stated = self._auditor.checked(onward, carried.peer, carried.report, prints)
        return Claim(stated, process.samples, y, tokens, gradient)

    def _prints(
        self, x: WireTensor, tokens: WireTensor, given: WireTensor | None, claim: Claim | None
    ) -> Prints | None:
        """On the compute thread: the fingerprints of a hop that answers `given`, of which `claim` is the next one.
        None where nobody signs, or nobody is answered."""
        if self._auditor is None or given is None:
            return None
        then = (claim.statement.tokens, claim.statement.x, claim.statement.gradient) if claim is not None else None
        of = self._replica.fingerprint
        if then is None:
            return Prints(of(x), of(tokens), of(given))
        return Prints(of(x), then[0], of(given), then[1], then[2])

    async def _finish(
        self, process: wire.Process, x: WireTensor, tokens: WireTensor, train: bool, held: Held | None
    ) -> Carried:
        """The last stage: loss and its gradient in one piece of work."""
        loop, replicas = asyncio.get_running_loop(), self._replicas()  # asked here: work runs on another thread

        def work() -> tuple[Carried, StepReport | None]:
            if held is not None and train:
                held.commit()
            result = self._replica.loss(x, tokens, process.samples, train=train)
            step = self._step(loop.time(), replicas) if train else None
            found = Carried(result.gradient, result.loss_sum, result.tokens)
            found.prints = self._prints(x, tokens, result.gradient, None)
            return found, step

        # Validation too: all other work of the last stage is backward, and it would never run on a busy replica.
        (carried, step), queued_s = await self._timed(Priority.BACKWARD, process.samples, work)
        carried.queued_s = queued_s
        self.worked += process.samples if train else FORWARD_SHARE * process.samples
        if train:
            self._telemetry.count(name.GRADIENTS, staleness=label(0))
            self.loss.add(carried.loss_sum / max(1, carried.tokens))
            self._telemetry.gauge(name.LOSS, self.loss.value, split="train")
            self._trained(process.samples, step)
        return carried

    async def _timed(self, priority: Priority, samples: int, work: Callable[[], T]) -> tuple[T, float]:
        """The value of `work`, and the seconds it waited for its turn on the compute thread."""
        loop = asyncio.get_running_loop()
        asked = loop.time()

        def timed() -> tuple[T, float]:
            waited_s = loop.time() - asked
            return work(), waited_s

        return await self._compute.run(priority, samples, timed)

    def _backward(
        self,
        tape: Tape,
        pending: Pending,
        gradient: WireTensor,
        samples: int,
        held: Held | None,
        loop: asyncio.AbstractEventLoop,
        replicas: int,
    ) -> tuple[WireTensor | None, StepReport | None]:
        """On the compute thread: the gradient of the input, and of an inner step what it did. A gradient that is too
        old is passed on and not added here."""
        if held is not None:
            held.commit()
        age = pending.age(self._replica.inner_steps)
        fresh = age <= self._manifest.pipeline.staleness_max
        before, clipped = self._replica.recomputed, self._replica.clipped
        given = self._replica.backward(tape, gradient, samples, accumulate=fresh)
        self._pending.closed(pending, loop.time())
        self._telemetry.count(name.GRADIENTS, staleness=label(age))
        if not fresh:
            self._telemetry.count(name.STALE_GRADIENTS)
        if self._replica.clipped > clipped:
            self._telemetry.count(name.CLIPPED_GRADIENTS)
        if self._replica.recomputed > before:
            self._telemetry.count(name.RECOMPUTED_TAPES)
            self.reworked += FORWARD_SHARE * samples
        return given, self._step(loop.time(), replicas)

    def _step(self, now_s: float, replicas: int) -> StepReport | None:
        """On the compute thread, right after a gradient was added, for so many `replicas` of this stage."""
        accumulated, samples_total, inner = self._replica.accumulated, self._samples_total(), self._manifest.inner
        together = inner_batch(inner, samples_total)
        if accumulated < replica_batch(self._manifest, together, replicas):
            return None
        most = PUT_OFF * replica_batch(self._manifest, max(together, inner.inner_batch_max), replicas)
        if accumulated < most and self._pending.put_off(self._replica.inner_steps, now_s):
            return None
        return self._replica.step(samples_total, together / max(1, replicas))

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

    def _check(self, process: wire.Process, tensors: Sequence[WireTensor]) -> tuple[WireTensor, WireTensor]:
        """The two tensors of a request, after checking all that can be checked without arithmetic."""
        check_way(self._manifest, self._stage, process)
        check_samples(self._manifest, process.samples, process.boundary_digest, self.boundary_digest)
        return check_inputs(self._manifest, process.samples, tensors)

"""The arithmetic of a replica's microbatches: forwards, backwards, losses, and an inner step once the batch is
complete. All of it runs on the compute thread, backward first; `hop.py` awaits it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from swarmnode.base.errors import Busy, LocalFault, Unavailable
from swarmnode.base.metrics import name
from swarmnode.base.parted_work import GivenEarly
from swarmnode.base.ports import StepReport, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.judge import Claim, Judge, TensorFingerprints
from swarmnode.net.membership.swarm import StageContext
from swarmnode.run.manifest.gossip_compat import averages_gradients
from swarmnode.train.pipeline.backlog import InFlight
from swarmnode.train.pipeline.microbatch_size import (
    PUT_OFF,
    PendingForward,
    PendingGradients,
    averaged,
    label,
    replica_batch,
    replica_share,
)
from swarmnode.train.pipeline.next_hop import MicrobatchResult, onward

T = TypeVar("T")

HALVINGS_MAX = 40  # of the memory for tapes, which is then none
ALL_AT_ONCE = nullcontext()
OWN_SHARE = 0.5  # guess: share of a dedicated device's free memory for tapes; rounds need the rest


@dataclass(frozen=True, slots=True)
class HopInput:
    """A microbatch as it arrived at this stage. `held` decides whether its gradient counts; None: it always does.
    `early`: the stage before waits for the gradient of `x`."""

    process: wire.Process
    x: WireTensor
    tokens: WireTensor
    held: InFlight | None = None
    train: bool = field(init=False)
    early: bool = field(init=False)

    def __post_init__(self) -> None:
        train = self.process.purpose == wire.PURPOSE_TRAIN
        object.__setattr__(self, "train", train)
        object.__setattr__(self, "early", train and self.process.position > 0)


@dataclass(slots=True)
class StageResult:
    """Result of a gradient or a loss on the compute thread: the gradient of `x`, and fingerprints for our statement,
    None if answers are not signed."""

    gradient: WireTensor | None
    prints: TensorFingerprints | None
    step: StepReport | None = None
    claim: Claim | None = None  # the verified answer of the next stage, if answers are signed
    early: bool = False  # whether the weights' gradients and the step are still to come
    recomputed: bool = False
    loss_sum: float = 0.0
    tokens: int = 0


class StageWorker:
    """Owns a replica, its tapes, its pending gradients and its steps. Every method runs on the compute thread. Other
    threads drop a `PendingForward`, which no longer counts here from then on."""

    def __init__(
        self,
        here: StageContext,
        now: Callable[[], float],
        judge: Judge,
        settled: Callable[[StepReport | None, Claim | None], None] = lambda step, claim: None,
    ) -> None:
        """`here.samples_total` and `now`, the event loop's clock, may be read from any thread. `settled` is called on
        the event loop when what an early result left has come: with the inner step, and the claim, measured."""
        manifest = here.manifest
        replica = here.replica
        self._here = here
        self._replica = replica
        self._now = now
        self._judge = judge
        self._tape_max = max(manifest.limits.tape_bytes_max, int(OWN_SHARE * replica.spare_nbytes))
        self._averages_gradients = averages_gradients(manifest)
        self._tape_nbytes_last = 0  # of the last tape with its graph: the next takes as much
        self.replicas = 1
        """Replicas of the stage, which share its inner batch. Told when it changes, on any thread."""
        self.pending = PendingGradients(manifest.pipeline.staleness_max)
        self._settled = settled
        self._out_of_memory = replica.out_of_memory  # times that memory ran out, as counted
        self._fault: LocalFault | None = None  # found when its microbatch had been answered

    def piece(
        self, queued_at: float, work: Callable[[HopInput], T], hop: HopInput
    ) -> tuple[T, float] | GivenEarly[tuple[T, float]]:
        """(`work` of `hop`, the seconds it queued since loop time `queued_at`). A gradient for the stage before is
        given early: what nobody waits for follows."""
        waited_s = self._now() - queued_at
        if self._fault is not None:
            raise self._fault
        try:
            value = work(hop)
        except BaseException:
            self._replica.settle()  # what a backward before the fault has left
            raise
        finally:
            if self._replica.out_of_memory > self._out_of_memory:
                self._count_out_of_memory()
        if isinstance(value, StageResult) and value.early:
            rest = partial(self._settle, hop, value.claim)
            return GivenEarly((value, waited_s), rest, lambda told: self._settled(*told))
        return value, waited_s

    def _settle(self, hop: HopInput, claim: Claim | None) -> tuple[StepReport | None, Claim | None]:
        """Do what an early result left: measures of `claim`, the gradients of weights, and the step. It must not raise:
        a fault is the next piece's."""
        step: StepReport | None = None
        try:
            claim = self._measured(claim)
            self._replica.settle()
            step = self._step()
        except Busy:  # told as OUT_OF_MEMORY: the gradients that had come together are dropped
            pass
        except LocalFault as fault:
            self._fault = fault
        if self._replica.out_of_memory > self._out_of_memory:
            self._count_out_of_memory()
        return step, claim

    def _count_out_of_memory(self) -> None:
        times = self._replica.out_of_memory
        self._here.telemetry.count(name.OUT_OF_MEMORY, times - self._out_of_memory)
        self._out_of_memory = times

    def forward(self, hop: HopInput) -> tuple[WireTensor, PendingForward | None]:
        """The activations to send on and, in training, the forward whose gradient is due. Raises Busy if memory runs
        out, RemoteFault for a bad `x`."""
        steps = self._replica.inner_steps
        used = self.pending.nbytes + self._tape_nbytes_last + self._replica.held_nbytes
        room = used <= self._tape_max >> min(self._replica.out_of_memory, HALVINGS_MAX)
        late = hop.train and self._late()
        y, tape = self._replica.forward(hop.x, keep=hop.train, graph=room, tokens=hop.tokens, late=late)
        if tape is None:
            return y, None
        if room:
            self._tape_nbytes_last = tape.nbytes
        else:
            self._here.telemetry.count(name.RELEASED_TAPES)
        pending = self.pending.opened(steps, self._now(), hop.process.samples, tape)
        mark = self._replica.mark()
        if not (late and self._here.manifest.pipeline.predicts_weights):  # predicted weights are no state's
            pending.mark = mark
        if hop.process.position == 0:  # those of a feeder are judged by weights of a step later at least
            hop.process.inner_steps = steps
            hop.process.mark = mark
        return y, pending

    def claim(self, hop: HopInput, y: WireTensor, answer: MicrobatchResult) -> Claim | None:
        """The verified claim of the next stage's `answer` to `y`; None if answers are not signed. Raises
        RemoteFault."""
        assert answer.peer is not None and answer.report is not None and answer.gradient is not None
        return self._judge.claim(onward(hop.process), answer.peer, answer.report, (y, hop.tokens, answer.gradient))

    def measured_claim(self, hop: HopInput, y: WireTensor, answer: MicrobatchResult) -> Claim | None:
        """`claim` with what checks compare."""
        return self._measured(self.claim(hop, y, answer))

    def _measured(self, claim: Claim | None) -> Claim | None:
        return None if claim is None else self._judge.measured(claim)

    def backward(self, y: WireTensor, answer: MicrobatchResult, pending: PendingForward, hop: HopInput) -> StageResult:
        """Run the gradient of `answer` back through the tape of `pending`, and step if the batch is complete. A
        gradient that is too old is passed on but not added here. Raises RemoteFault for a bad answer, Busy if memory
        runs out, and Unavailable if all callers gave up; nothing was added then."""
        # Before the gradient touches the tape: what was added to the weights' gradient cannot be taken out.
        claim = self.claim(hop, y, answer)
        if hop.held is not None:
            hop.held.commit()
        replica = self._replica
        samples = hop.process.samples
        gradient = answer.gradient
        tape = pending.tape
        if tape is None:
            raise Unavailable("this node has given up the microbatch")
        assert gradient is not None
        age = pending.age(replica.inner_steps)
        fresh = age <= self._here.manifest.pipeline.staleness_max
        before = replica.recomputed
        clipped = replica.clipped
        with replica.input_first() if hop.early else ALL_AT_ONCE:
            gradient_up = replica.backward(tape, gradient, samples, accumulate=fresh)
        self.pending.closed(pending, self._now())
        self._here.telemetry.count(name.GRADIENTS, staleness=label(age))
        if not fresh:
            self._here.telemetry.count(name.STALE_GRADIENTS)
        if replica.clipped > clipped:
            self._here.telemetry.count(name.CLIPPED_GRADIENTS)
        if recomputed := replica.recomputed > before:
            self._here.telemetry.count(name.RECOMPUTED_TAPES)
        result = self._result(hop, gradient_up, claim, pending.mark, pending.inner_steps)
        result.recomputed = recomputed
        return result

    def loss(self, hop: HopInput) -> StageResult:
        """The last stage: the loss, in training its gradient as well, and a step if the batch is complete. Raises as
        `backward`."""
        if hop.held is not None and hop.train:
            hop.held.commit()
        with self._replica.input_first() if hop.early else ALL_AT_ONCE:
            loss = self._replica.loss(hop.x, hop.tokens, hop.process.samples, train=hop.train)
        result = self._result(hop, loss.gradient, None, self._replica.mark(), self._replica.inner_steps)
        result.loss_sum = loss.loss_sum
        result.tokens = loss.tokens
        return result

    def fingerprints(self, tensors: Sequence[WireTensor]) -> tuple[bytes, ...]:
        """The fingerprint of each tensor."""
        return tuple(map(self._replica.fingerprint, tensors))

    def _result(
        self, hop: HopInput, gradient: WireTensor | None, claim: Claim | None, mark: bytes, steps: int
    ) -> StageResult:
        """The result with `gradient` for the stage before; `mark` and inner `steps`: of the weights at its forward.
        Where no stage is before, with the step."""
        step = None
        if hop.train and not hop.early:
            step = self._step()
            claim = self._measured(claim)
        prints = None
        if gradient is not None:
            prints = self._judge.prints(hop.process, (hop.x, hop.tokens, gradient), claim, mark, steps)
        return StageResult(gradient, prints, step, claim, hop.early)

    def _late(self) -> bool:
        """Whether the gradient of a forward made now will come after the next inner step: those before it complete a
        batch."""
        if self._averages_gradients:
            return False  # nobody steps while microbatches of a step are under way
        waiting = self._replica.accumulated + self.pending.samples
        return waiting >= replica_share(self._here.manifest, self.replicas)

    def _step(self) -> StepReport | None:
        """Take an inner step if the batch is complete."""
        accumulated = self._replica.accumulated
        manifest = self._here.manifest
        replicas = self.replicas
        if accumulated < replica_share(manifest, replicas):
            return None
        inner = manifest.inner
        most = PUT_OFF * replica_batch(manifest, max(inner.inner_batch, inner.inner_batch_max), replicas)
        if accumulated < most and self.pending.put_off(self._replica.inner_steps, self._now()):
            return None
        share = inner.inner_batch / max(1, replicas)
        return self._replica.step(self._here.samples_total(), share, averaged(manifest, replicas))

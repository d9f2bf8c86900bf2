"""The ports: everything a node asks of the world. Real ones live in transport/, node/, control/ and metrics/; the
simulator has its own. Node code sees only these, takes time from the event loop and chance from `ids.seeded`."""

from __future__ import annotations

import enum
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from swarmnode.ids import PeerId
from swarmnode.tensor import DTYPE_BYTES as DTYPE_BYTES
from swarmnode.tensor import Draft as Draft
from swarmnode.tensor import WireTensor as WireTensor
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2

T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """What one node asks of another. The transport fills in version, timeout and tensor specs."""

    header: wire.Request
    tensors: Sequence[WireTensor] = ()
    received_s: float = 0.0
    """At its handler: how long it took to come in, from its header to its last byte."""


@dataclass(slots=True)
class Answer:
    """What comes back: `header.status` is OK whenever `Transport.call` returns one."""

    header: wire.Reply
    tensors: Sequence[WireTensor] = ()
    urgent: bool = False
    """Goes before all else that waits for its turn on the line of who answers."""
    waited_s: float = 0.0
    """At the caller: how long the request waited for its turn on the caller's own line."""


Handler = Callable[[PeerId, Call], Awaitable[Answer]]
"""Serves one method. Raises Busy, Unavailable, RemoteFault (the request is wrong) to refuse; the caller sees the same
class raised by its `call`. It is cancelled when the caller gives up or dies."""

Admit = Callable[[PeerId, wire.Request], None]
"""Refuses a peer's call by its header alone, before tensors are read: raises Unavailable, RemoteFault."""


class Transport(Protocol):
    """Calls between nodes. The method is the name of the body set in the header's `oneof body`."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def line_queue(self) -> int: ...  # messages of bulk that wait for their turn on this node's line

    async def addresses(self) -> list[str]:
        """Multiaddrs (without /p2p) at which others reach this node."""
        ...

    def serve(self, method: str, handler: Handler, *, tensor_bytes_max: int, admit: Admit | None = None) -> None:
        """Answer calls of `method` (for example "process") with at most `tensor_bytes_max` bytes of tensors, of callers
        that `admit` lets pass (None: of all)."""
        ...

    async def call(self, peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Answer:
        """Ask `peer`. Raises Busy, Unavailable as the peer says; RemoteFault when it refuses, fails, dies, sends what
        does not parse; PeerTimeout after `timeout_s`. Cancelling the call reaches the peer's handler."""
        ...

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Make `peer` reachable at `addresses`. Raises Unavailable."""
        ...

    def bytes_by_method(self) -> dict[tuple[str, str], int]:
        """Payload and header bytes so far by (method, "sent" or "received")."""
        ...


class Directory(Protocol):
    """Where nodes publish records of themselves. Hints: late, stale, incomplete, but never forged."""

    async def announce(self, record: record_pb2.SignedRecord) -> bool:
        """Publish our record under its run and stage until its expiry. False when nobody stored it."""
        ...

    async def lookup(self, stage: int) -> list[record_pb2.SignedRecord]:
        """Verified, unexpired records of `stage` (newest per peer). Empty when none is found."""
        ...

    async def lookups(self, stages: Sequence[int]) -> list[list[record_pb2.SignedRecord]]:
        """`lookup` of some stages at once."""
        ...


class Priority(enum.IntEnum):
    """Order of work on the one compute thread: smaller first; then older first (1F1B emerges, design section 3)."""

    OUTER = 0
    BACKWARD = 1
    FORWARD = 2  # validation too: behind all training work it would never run on a busy replica
    BACKGROUND = 3  # hashing, saving: only when nothing else waits


class Compute(Protocol):
    """The device: runs one piece of arithmetic at a time."""

    async def run(self, priority: Priority, samples: int, work: Callable[[], T]) -> T:
        """Run `work` when its turn comes and return its value or raise its error. Cancelling before it starts drops it;
        after it has started, the work is completed and its value dropped. `samples` lets the simulator charge time.

        A value that is a Draft is returned as soon as it is there and finished in the same turn: `Draft.finished`."""
        ...

    @property
    def waiting(self) -> int:
        """Pieces of work not yet finished."""
        ...

    @property
    def worked_s(self) -> float:
        """Seconds the device has worked so far, or rested as its volunteer wants; waiting for work not counted."""
        ...


class Store(Protocol):
    """Named blobs on this node's disk, in a folder that nodes share, or in a bucket; each is written whole or not at
    all. Names are relative, "/" between their parts."""

    async def write(self, name: str, parts: Sequence[bytes | memoryview]) -> str:
        """Write, flush, fsync, rename; returns the SHA-256 (hex). Raises LocalFault with path and reason."""
        ...

    async def read(self, name: str, sha256: str | None = None) -> bytes | None:
        """None when there is no such blob. Raises DataError when it does not have the hash `sha256`, LocalFault when it
        cannot be read."""
        ...

    async def fill(self, name: str, parts: Sequence[memoryview], sha256: str) -> bool:
        """As `read`, into `parts`, which are filled one after the other: what is large is not copied. False when there
        is no such blob. Raises DataError also when it has another length; `parts` may then hold anything."""
        ...

    async def names(self, prefix: str = "") -> dict[str, int]:
        """Sizes of the blobs whose name begins with `prefix`, by name, sorted. Raises LocalFault."""
        ...

    async def delete(self, name: str) -> None:
        """Nothing when there is no such blob. Raises LocalFault."""
        ...


class Clock(Protocol):
    """Wall clock, only for expiry of records; waiting uses the event loop's time."""

    def unix_s(self) -> float: ...


class Telemetry(Protocol):
    """Events (JSON lines) and metrics; names come from metrics/name.py."""

    def event(self, event: str, *, level: str = "info", **fields: object) -> None: ...

    def count(self, metric: str, value: float = 1.0, **labels: str) -> None: ...

    def gauge(self, metric: str, value: float, **labels: str) -> None: ...

    def observe(self, metric: str, value: float, **labels: str) -> None: ...


@dataclass(slots=True)
class LossResult:
    """Of one microbatch at the last stage: `loss_sum` in nats over `tokens` target tokens, gradient if training."""

    loss_sum: float
    tokens: int
    gradient: WireTensor | None


@dataclass(slots=True)
class StepReport:
    """Of one inner step: gradient norm before clipping (of the mean gradient), learning rate, samples averaged."""

    step: int
    gradient_norm: float
    learning_rate: float
    samples: int


class Tape(Protocol):
    """What a forward keeps for its backward."""

    @property
    def nbytes(self) -> int: ...  # an estimate of the memory held, the input included


@dataclass(slots=True)
class State:
    """All a replica is: flat little-endian float32 sections, those that its run has (model/section.py), in their order;
    `packed` for lines, all but phi in bfloat16, theta as what it is more than phi. `bump_steps`: inner steps left at
    the higher learning rate that follows a rebuild."""

    sections: dict[str, memoryview]
    inner_steps: int
    gradient_norm: float
    bump_steps: int = 0
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Neighbour:
    """What the replica of a stage beside a lost one gives to rebuild it: flat float32 slow weights, and the EMA of its
    gradient norm before clipping."""

    stage: int
    phi: memoryview
    gradient_norm: float


@dataclass(slots=True)
class Packet:
    """What one partner contributes to an outer step. `weight` 0 only receives (a newcomer's first round)."""

    weight: float
    samples: int
    tensors: Sequence[WireTensor]
    bequest: bool = False  # of a replica that left, and nobody else has it (gossip/bequest.py)
    sender: str = ""  # a peer id; "" where nobody is held to account for it
    standin: bool = False  # of a replica that met another one, in place of a partner that failed (gossip/standin.py)


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one packet: how much of the partner's distance is taken (0: refused), by which step (robust.py), and why."""

    keep: float
    step: str
    reason: str


@dataclass(slots=True)
class OuterReport:
    """Of one outer step: replicas averaged (own included), norms of own pseudo-gradient and of the step taken, and the
    verdict on each packet in the order they were given."""

    members: int
    delta_norm: float
    step_norm: float
    verdicts: Sequence[Verdict] = ()
    probed: float | None = None  # nats that averaging with a packet changed our loss by, where that was tried
    apart: float | None = None  # how far our slow weights lie from the members' middle, by a fragment of them

    @property
    def believed(self) -> bool:
        """Whether anything was taken of any packet."""
        return any(verdict.keep > 0.0 for verdict in self.verdicts)


class Replica(Protocol):
    """One node's copy of a stage: plain arithmetic, called on the compute thread only, never awaited.

    Shapes: B samples of T = context tokens, width D. `tokens` is u16 or u32 [B, T+1] (inputs and targets overlap by
    T-1); activations between stages are [B, T, D] in the manifest's boundary dtype, or [B, T, k] in a subspace.
    """

    @property
    def parameters(self) -> int: ...  # elements in the flat buffer

    def boundary_digest(self) -> bytes:
        """Of what replicas must have in common to understand each other's activations; b"" where that is nothing."""

    def forward(
        self, x: WireTensor, *, keep: bool, graph: bool = True, tokens: WireTensor | None = None
    ) -> tuple[WireTensor, Tape | None]:
        """Not the last stage: x is tokens (first stage) or activations. keep=True returns a tape for `backward`; with
        graph=False it holds only the input, as after `release`, and costs no more memory than that. `tokens` are needed
        beside activations where the boundary is a subspace.

        Raises RemoteFault when x has the wrong dtype or shape, token ids out of range, or NaN or Inf."""

    @property
    def inner_steps(self) -> int: ...  # behind these weights

    def backward(self, tape: Tape, gradient: WireTensor, samples: int, *, accumulate: bool = True) -> WireTensor | None:
        """Accumulate this stage's gradient, unless told not to; return that of its input (None for the first stage). A
        tape whose graph was not kept is recomputed from its input. Raises RemoteFault for a bad gradient."""

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        """Last stage: forward, mean-free cross entropy, and with train=True backward, accumulated at once unless told
        not to."""

    def fingerprint(self, tensor: WireTensor) -> bytes:
        """SHA-256 of a tensor as it travels: 32 bytes."""

    def cosine(self, one: WireTensor, other: WireTensor, samples: int) -> float:
        """Of two activations or gradients of `samples` samples; 1 of two that are zero, 0 where one is. Raises
        RemoteFault for one that is malformed."""

    def release(self, tape: Tape) -> None:
        """Drop what the tape holds except its input, so that `backward` recomputes (memory bound)."""

    @property
    def spare_nbytes(self) -> int: ...  # of a device of its own that nobody has taken; 0 where it shares the machine's

    @property
    def recomputed(self) -> int:
        """Tapes run forward again so far, because their graph was not kept or the state was loaded since."""

    @property
    def clipped(self) -> int:
        """Gradients that came back much longer than is usual, so far."""

    @property
    def accumulated(self) -> int:
        """Samples whose gradient waits for the next inner step."""

    def step(self, samples_total: int, batch: float = math.inf) -> StepReport:
        """One inner step on the mean gradient, clipped to c/sqrt(S), at the rate of `samples_total` for `batch`."""

    def snapshot(self, *, packed: bool = False) -> State:
        """An immutable copy of everything this replica is: weights, fast and slow, momentum and moments."""

    def load(self, state: State) -> None:
        """Become `state`. Raises RemoteFault when sections are missing, of the wrong size, or not finite."""

    def sizes_of(self, stage: int) -> Mapping[str, int]:
        """Elements of each section of the state of a replica of `stage` of the same run."""

    def ends_of(self, stage: int) -> tuple[int, int]:
        """(first element, count) of the embedding or head in the flat buffer of `stage`; count 0 for an inner one."""

    def apart(self, one: memoryview | bytes, other: memoryview | bytes) -> float:
        """The distance of the same part of two replicas' slow weights, as snapshots carry them, in lengths of the
        longer one; inf where numbers are not finite. Parts begin at multiples of 64 elements."""

    def rebuild(self, method: str, neighbours: Sequence[Neighbour], ends: memoryview | None) -> None:
        """Become what `neighbours` make probable, by `method` (CheckFree): slow and fast weights alike, no momentum,
        fresh AdamW, a higher learning rate for a while. `ends` are the mirrored elements of `ends_of`. Raises
        RemoteFault, having changed nothing, when what was given is of the wrong size or not finite."""

    def message(self, round_index: int) -> Sequence[WireTensor]:
        """Mark the boundary of `round_index` (theta is copied) and return what partners need of it."""

    def bequest(self, round_index: int) -> Sequence[WireTensor]:
        """As `message`, of all weights, also where a round is about a fragment of them: for packets marked so."""

    def draft(self, round_index: int) -> Draft:
        """As `message`, which is this and `finish`; nothing else may be asked of the replica between the two."""

    def apply(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        """The outer step of the round `message` marked; no packets, or none that is believed, makes it a lone step, or
        without `lone` none: then the boundary stays marked for another `apply`. What theta gained since the boundary is
        kept. A packet that is misshapen or not finite, which no honest one is, is refused alone, by its verdict."""

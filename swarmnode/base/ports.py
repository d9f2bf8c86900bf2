"""The ports: interfaces to everything outside a node. The real ones live in transport/, machine/, control/ and
metrics/; the simulator has its own. Node code uses only these, takes time from the event loop and randomness from
`ids.seeded`."""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from swarmnode.base.ids import PeerId
from swarmnode.base.parted_work import GivenEarly, Parts
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.base.wire_tensor import DTYPE_BYTES as DTYPE_BYTES
from swarmnode.base.wire_tensor import StreamingMessage as StreamingMessage
from swarmnode.base.wire_tensor import WireTensor as WireTensor

T = TypeVar("T")
Data = bytes | bytearray | memoryview


@dataclass(slots=True)
class Call:
    """A request from one node to another. The transport fills in version, timeout and tensor specs."""

    header: wire.Request
    tensors: Sequence[WireTensor] = ()
    received_s: float = 0.0
    """In the handler: seconds from the request's header to its last byte."""
    arriving: asyncio.Future[Sequence[WireTensor]] | None = None
    """In the handler of a method of BOTH_WAYS: the tensors, which may still be on their way."""

    async def whole(self) -> Sequence[WireTensor]:
        """The tensors, once all of them are here. Raises ConnectionError or Busy if they do not come."""
        return self.tensors if self.arriving is None else await asyncio.shield(self.arriving)


@dataclass(slots=True)
class Answer:
    """The answer to a call. `header.status` is OK whenever `Transport.call` returns one."""

    header: wire.Reply
    tensors: Sequence[WireTensor] = ()
    urgent: bool = False
    """Skip ahead of everything else queued on the responder's uplink."""
    waited_s: float = 0.0
    """In the caller: seconds that the request queued on the caller's own uplink."""
    before_end: Callable[[], Awaitable[None]] | None = None
    """Awaited before the last byte of the tensors leaves; where it raises, the caller gets no answer."""


BOTH_WAYS = frozenset({"exchange"})
"""The methods whose answer travels while the request's tensors still come in, so that a pair needs the time of one
packet. The handler runs as soon as the request's header is admitted; a handler that refuses sends nothing else."""


Handler = Callable[[PeerId, Call], Awaitable[Answer]]
"""Serves one method. Refuses by raising Busy, Unavailable or RemoteFault (the request is wrong); the caller's `call`
raises the same class. The handler is cancelled when the caller gives up or dies."""

Admit = Callable[[PeerId, wire.Request], None]
"""Refuses a peer's call by its header alone, before its tensors are read. Raises Unavailable or RemoteFault."""


class Transport(Protocol):
    """Calls between nodes. The method is the name of the body set in the header's `oneof body`."""

    @property
    def peer_id(self) -> PeerId: ...

    @property
    def line_queue(self) -> int: ...  # bulk messages queued on this node's uplink

    @property
    def line_bytes_per_s(self) -> float: ...  # the most the uplink carried while it was busy; 0: not known

    async def addresses(self) -> list[str]:
        """Multiaddrs (without /p2p) at which other nodes reach this one."""
        ...

    def serve(self, method: str, handler: Handler, *, tensor_bytes_max: int, admit: Admit | None = None) -> None:
        """Answer calls of `method` (for example "process") with at most `tensor_bytes_max` bytes of tensors. `admit`
        filters callers; None admits all."""
        ...

    async def call(self, peer: PeerId, call: Call, *, timeout_s: float, reply_bytes_max: int) -> Answer:
        """Send `call` to `peer` and return its answer. Cancelling the call cancels the peer's handler.

        Raises Busy or Unavailable as the peer answers, PeerTimeout after `timeout_s`, and RemoteFault if the peer
        refuses, fails, dies, or sends data that does not parse.
        """
        ...

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Make `peer` reachable at `addresses`. Raises Unavailable if that fails."""
        ...

    def bytes_by_method(self) -> dict[tuple[str, str], int]:
        """Payload and header bytes so far by (method, "sent" or "received")."""
        ...


@dataclass(frozen=True, slots=True)
class Announced:
    """The outcome of publishing a record."""

    stored: bool
    """Whether a peer stored it."""
    others: Sequence[record_pb2.SignedRecord] = ()
    """Verified other records of its key that stood in its place, or stand there still: of this process's own past, of a
    former process, or of one beside it."""


class Directory(Protocol):
    """Records that nodes publish of themselves. They are hints: perhaps late, stale or incomplete, but never forged."""

    async def announce(self, record: record_pb2.SignedRecord) -> Announced:
        """Publish our record under its run and stage until it expires."""
        ...

    async def lookup(self, stage: int) -> list[record_pb2.SignedRecord]:
        """Verified, unexpired records of `stage` (newest per peer). Empty when none is found."""
        ...

    async def lookups(self, stages: Sequence[int]) -> list[list[record_pb2.SignedRecord]]:
        """`lookup` of some stages at once."""
        ...

    async def refresh(self, stages: Sequence[int]) -> list[list[record_pb2.SignedRecord]]:
        """`lookups` at a fraction of the bytes: in a large run what is new may be missing for some announce periods."""
        ...

    async def claimed(self) -> int:
        """Most samples that this node, its bootstraps or its contacts remember of the run; 0: none. It proves
        nothing. Raises Unavailable when this node remembers none and nobody that it knows answers."""
        ...


class Priority(enum.IntEnum):
    """Priority on the single compute thread: smaller first, then older first. Backward before forward gives a 1F1B
    schedule without a central scheduler."""

    OUTER = 0
    BACKWARD = 1
    FORWARD = 2  # validation too: behind all training work it would never run on a busy replica


class Compute(Protocol):
    """The device: runs one piece of arithmetic at a time."""

    async def run(self, priority: Priority, samples: int, work: Callable[[], T | Parts[T] | GivenEarly[T]]) -> T:
        """Run `work`, which may come in parts (parted_work.py), on its turn and return its value or raise its error.
        `samples` lets the simulator charge time.

        Cancelling before `work` starts drops it; after that it completes and its value is dropped. A StreamingMessage
        is returned as soon as it exists and finished within the same turn (its `finished`). So is the value of a
        GivenEarly, whose rest follows in the same turn.
        """
        ...

    @property
    def waiting(self) -> int:
        """Pieces of work not yet finished."""
        ...

    @property
    def worked_s(self) -> float:
        """Seconds so far that the device computed or rested on its volunteer's wish. Idle time does not count."""
        ...


class Store(Protocol):
    """Named blobs on this node's disk, in a shared folder, or in a bucket. Writes are atomic. Names are relative, with
    "/" between their parts."""

    async def write(self, name: str, parts: Sequence[bytes | memoryview]) -> str:
        """Write, flush, fsync and rename; return the SHA-256 (hex). Raises LocalFault with path and reason."""
        ...

    async def read(self, name: str, sha256: str | None = None) -> bytes | None:
        """The blob, or None if there is none. Raises DataError if its hash is not `sha256`, LocalFault if it cannot be
        read."""
        ...

    async def fill(self, name: str, parts: Sequence[memoryview], sha256: str) -> bool:
        """Read a blob into `parts`, filled one after the other, without a copy. False if there is no such blob.

        Raises as `read`, and DataError if the length differs; `parts` may then hold anything.
        """
        ...

    async def names(self, prefix: str = "") -> dict[str, int]:
        """Sizes of the blobs whose name begins with `prefix`, by name, sorted. Raises LocalFault."""
        ...

    async def delete(self, name: str) -> None:
        """Delete a blob; do nothing if there is none. Raises LocalFault."""
        ...


class Clock(Protocol):
    """Wall clock, used only for the expiry of records. Waiting uses the event loop's time."""

    def unix_s(self) -> float: ...


class Telemetry(Protocol):
    """Events (JSON lines) and metrics; names come from base/metrics/name.py and event.py."""

    def event(self, event: str, *, level: str = "info", **fields: object) -> None: ...

    def count(self, metric: str, value: float = 1.0, **labels: str) -> None: ...

    def gauge(self, metric: str, value: float, **labels: str) -> None: ...

    def observe(self, metric: str, value: float, **labels: str) -> None: ...


@dataclass(slots=True)
class LossResult:
    """Result of one microbatch at the last stage: `loss_sum` in nats over the `tokens` targets that count, and the
    gradient if training."""

    loss_sum: float
    tokens: int
    gradient: WireTensor | None


@dataclass(slots=True)
class StepReport:
    """Result of one inner step: norm of the mean gradient before clipping, learning rate, samples averaged."""

    step: int
    gradient_norm: float
    learning_rate: float
    samples: int


class Tape(Protocol):
    """Data that a forward keeps for its backward."""

    @property
    def nbytes(self) -> int: ...  # estimated memory held, including the input


@dataclass(slots=True)
class State:
    """The whole state of a replica: flat little-endian float32 sections, those its run has (model/section.py), in
    order.

    `packed` is the form for sending: all sections but phi in bfloat16, theta as its difference from phi. `bump_steps`:
    inner steps left at the raised learning rate after a rebuild.
    """

    sections: dict[str, memoryview]
    inner_steps: int
    gradient_norm: float
    bump_steps: int = 0
    packed: bool = False


@dataclass(frozen=True, slots=True)
class Neighbour:
    """State that a neighbouring stage's replica gives to rebuild a lost one: flat float32 slow weights, and the EMA of
    its gradient norm before clipping."""

    stage: int
    phi: memoryview
    gradient_norm: float


@dataclass(slots=True)
class Packet:
    """A partner's contribution to an outer step. A `weight` of 0 only receives (a newcomer's first round)."""

    weight: float
    samples: int
    tensors: Sequence[WireTensor]
    final_delta: bool = (
        False  # the final delta of a replica that left; no other node has it (train/gossip/final_delta.py)
    )
    sender: str = ""  # a peer id; "" if no peer is accountable
    fallback: bool = (
        False  # of a replica that met another one, in place of a partner that failed (train/gossip/fallback_partner.py)
    )


@dataclass(frozen=True, slots=True)
class DraftedPieces:
    """A replica's packet of a round, cut into pieces that are coded each by itself; the length of each as its receiver
    reads it, float32; and the targets behind the packet."""

    pieces: Sequence[Data]
    lengths: Sequence[float]
    targets: int


@dataclass(frozen=True, slots=True)
class GivenPiece:
    """One member's piece: the length of its whole packet, the targets behind that, its bytes (None: not here), and
    whether it counts in the mean."""

    length: float
    targets: int
    data: Data | None
    counts: bool = True


@dataclass(frozen=True, slots=True)
class MeanPiece:
    """The coded mean of one piece, and what each giver's part has in common with another's on average, in squares of a
    usual length; in the order of the givers, 0 for one that gave nothing."""

    data: Data
    agreements: Sequence[float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on one packet: the share `keep` of the partner's distance that is taken (0: refused), the deciding `step`
    (robust.py), and the reason."""

    keep: float
    step: str
    reason: str


EQUAL = "equal to our own"
"""The reason of a verdict on a packet that is our own, sent back."""


@dataclass(frozen=True, slots=True)
class PacketMeasures:
    """Measures of one packet: |D_i|, |theta_j - theta_i| and |phi_i|. For a packet of D_j, theta_j = phi_i + D_j."""

    own_norm: float
    gap: float
    weights_norm: float = math.inf


class Guard(Protocol):
    """One replica's memory of the packets that it took, which judges the next (trust/robust.py)."""

    def judge(self, measures: PacketMeasures) -> Verdict: ...

    def limit(self, measures: PacketMeasures) -> tuple[float, str]: ...


@dataclass(slots=True)
class OuterReport:
    """Result of one outer step: replicas averaged (own included), norms of the own pseudo-gradient and of the step
    taken, and the verdicts in the order of the packets."""

    members: int
    delta_norm: float
    step_norm: float
    verdicts: Sequence[Verdict] = ()
    apart: float | None = None  # distance of our slow weights from the members' middle, measured on a fragment
    inner: StepReport | None = None  # of the inner step that the round took

    @property
    def believed(self) -> bool:
        """Whether the step used anything of any packet."""
        return any(verdict.keep > 0.0 for verdict in self.verdicts)


class StageArithmetic(Protocol):
    """The arithmetic of a replica: forwards, backwards, inner steps.

    Shapes: B samples of T = context tokens, width D. `tokens` is u16 or u32 [B, T+1] (inputs and targets overlap by
    T-1; what does not count as a target is marked in it, data/sample.py); activations between stages are [B, T, D] in
    the manifest's boundary dtype, or [B, T, k] in a subspace.
    """

    def boundary_digest(self) -> bytes:
        """Digest of what replicas must share to understand each other's activations; b"" if nothing."""

    def forward(
        self, x: WireTensor, *, keep: bool, graph: bool = True, tokens: WireTensor | None = None, late: bool = False
    ) -> tuple[WireTensor, Tape | None]:
        """Forward of all stages but the last: x is tokens (first stage) or activations.

        keep=True returns a tape for `backward`. With graph=False the tape holds only the input: `backward` computes the
        rest again. late=True: the gradient is expected after the next inner step; the weights are then predicted, where
        the run does that. A subspace boundary, and documents read apart, need `tokens` beside the activations; the
        gradient is weighted by the targets that count in them.

        Raises RemoteFault if x has the wrong dtype or shape, token ids out of range, or NaN or Inf.
        """

    @property
    def inner_steps(self) -> int: ...  # of these weights

    def backward(self, tape: Tape, gradient: WireTensor, samples: int, *, accumulate: bool = True) -> WireTensor | None:
        """Return the gradient of the input (None for the first stage); add this stage's gradient unless
        accumulate=False. Without a kept graph the tape is recomputed from its input. Raises RemoteFault for a bad
        gradient."""

    def input_first(self) -> AbstractContextManager[None]:
        """Context in which `backward` and `loss` leave gradients of weights that nobody waits for to `settle`, which
        must come before anything else of this replica."""

    def settle(self) -> None:
        """Add what the last `backward` or `loss` has left: the same bits as without `input_first`. Raises Busy if
        memory runs out; then all that is accumulated is dropped."""

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        """Last stage: forward and summed cross entropy. train=True adds the backward, accumulated at once unless
        accumulate=False."""

    def mark(self, state: State | None = None) -> bytes:
        """Digest (8 bytes) of a few of its slow weights, or of those of `state`: another after a round; b"" during
        one where slow weights are on another device than fast ones. Of the fast ones where these look ahead."""

    def fingerprint(self, tensor: WireTensor) -> bytes:
        """SHA-256 (32 bytes) of a tensor in wire form."""

    def cosine(self, one: WireTensor, other: WireTensor, samples: int) -> float:
        """Cosine of two activations or gradients of `samples` samples: 1 if both are zero, 0 if one is. Raises
        RemoteFault for a malformed tensor."""

    def norm(self, tensor: WireTensor, samples: int) -> float:
        """Norm of an activation or gradient of `samples` samples, over their root. Raises RemoteFault as `cosine`."""

    def sketch(self, gradient: WireTensor, tokens: WireTensor, samples: int, seed: int) -> Sequence[float]:
        """A short vector linear in `gradient`: means of its rows with signs drawn by `seed` from their token ids, in
        units of `norm`. Equal rows have the length of their norm, independent ones next to none. Raises RemoteFault."""

    @property
    def spare_nbytes(self) -> int: ...  # free memory of a dedicated device; 0 if it shares the machine's memory

    @property
    def recomputed(self) -> int:
        """Tapes recomputed so far, because their graph was not kept or the state was loaded since."""

    @property
    def out_of_memory(self) -> int:
        """Times that memory ran out here so far. `forward`, `backward` and `loss` then raise Busy, unless a second
        attempt with half the memory for graphs succeeds. A step is always finished."""

    @property
    def held_nbytes(self) -> int:
        """Bytes beside the tapes that come and go: older weights, and the microbatch kept to judge weights by."""

    @property
    def clipped(self) -> int:
        """Gradients clipped so far for a norm far above the usual one."""

    @property
    def accumulated(self) -> int:
        """Samples whose gradient waits for the next inner step."""

    def step(self, samples_total: int, batch: float = math.inf, averaged: int = 1) -> StepReport:
        """An inner step on the mean gradient, clipped to c/sqrt(S), at the learning rate of `samples_total` for
        `batch`, of a replica that `averaged` replicas average with, itself among them."""


class StageState(Protocol):
    """The state of a replica: its copies for others, and its beginnings."""

    @property
    def undrawn(self) -> bool: ...  # whether its weights are neither drawn from the seed nor loaded yet

    def draw_weights(self) -> None:
        """Set the weights drawn from the manifest's seed: the replica begins the run."""

    def snapshot(self, *, packed: bool = False, only: Sequence[str] = ()) -> State:
        """An immutable copy of the whole state: fast and slow weights, momentum and moments; or of the sections `only`,
        which an archive of the run copies without the rest."""

    def snapshot_in_parts(self, *, packed: bool = False, only: Sequence[str] = ()) -> State | Parts[State]:
        """`snapshot`, or its parts where most of the work needs no device. Parts of the weights are then a few inner
        steps apart, which is less than two replicas are."""

    def load(self, state: State) -> None:
        """Adopt `state`: all of it, or its outer sections alone (model/section.py); then fast weights begin equal to
        the slow ones, and moments anew. Raises RemoteFault if sections are missing, of the wrong size, or not finite.
        """

    def place_weights(self, name: str, first: int, values: WireTensor) -> None:
        """Write `values` (bf16, f16 or f32) into the parameter `name` from its element `first` on. Once all are written
        call `weights_placed`. Beside adapters these are the frozen weights. Raises RemoteFault for numbers that are not
        finite."""

    def weights_placed(self) -> None:
        """Start from the weights that were placed: fast and slow ones alike, a fresh optimizer, no step taken. Adapters
        stay as they are."""

    def sizes_of(self, stage: int) -> Mapping[str, int]:
        """Elements of each state section of a replica of `stage` in the same run."""

    def ends_of(self, stage: int) -> tuple[int, int]:
        """(first element, count) of the embedding or head in the flat buffer of `stage`; count 0 for an inner stage."""

    def apart(self, one: memoryview | bytes, other: memoryview | bytes) -> float:
        """Distance between the same part of two replicas' slow weights (in snapshot form), relative to the longer one;
        inf if not finite. Parts begin at multiples of 64 elements."""

    def rebuild(self, method: str, neighbours: Sequence[Neighbour], ends: memoryview | None) -> None:
        """Rebuild this stage from its `neighbours` by `method` (CheckFree): equal slow and fast weights, no momentum,
        fresh AdamW, a raised learning rate for a while. `ends` are the mirrored elements of `ends_of`.

        Raises RemoteFault, with nothing changed, if an input has the wrong size or is not finite.
        """

    def table_part(self) -> WireTensor:
        """This end's part of a tied model's table, f16 [V D] (model/tied_table.py)."""

    def take_table(self, other: WireTensor) -> bool:
        """Take the `other` end's part into a tied model's table. False, and nothing is done, while a round's boundary
        is marked. Raises RemoteFault for a part of another size or numbers that are not finite."""

    def restart(self) -> None:
        """Begin this stage again with what the run's seed says: its weights, or adapters that change nothing."""


class StageRounds(Protocol):
    """The rounds of a replica: what it sends its partners, and the outer step with what they sent."""

    def message(self, round_index: int) -> Sequence[WireTensor]:
        """Mark the boundary of `round_index` (theta is copied) and return the tensors that partners need."""

    def final_delta(self, round_index: int) -> Sequence[WireTensor]:
        """Like `message`, but always of all weights, even if a round covers only a fragment. For packets marked
        `final_delta`."""

    def draft(self, round_index: int) -> StreamingMessage:
        """`message` in two parts, this and the result's `finish`. Call nothing else on the replica between the two."""

    def apply(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        """The outer step of the round that `message` marked. Progress of theta since the boundary is kept.

        Without a believed packet it is a lone step; with lone=False there is no step and the boundary stays marked for
        another `apply`. A misshapen or non-finite packet, which no honest partner sends, is refused by its verdict; the
        others count.
        """

    def apply_in_parts(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport | Parts[OuterReport]:
        """`apply`, or its parts: where slow weights lie in main memory, most of it goes beside the device."""

    # Rounds in which each member averages some pieces for all (gossip/butterfly/), for methods that can.

    def draft_pieces(self, round_index: int) -> DraftedPieces:
        """Mark the boundary of `round_index`, and return the packet in pieces."""

    def piece_digest(self, data: Data) -> bytes:
        """Digest (16 bytes) of a piece or a mean."""

    def check_piece(self, round_index: int, piece: int, data: Data, length: float | None) -> None:
        """Raises RemoteFault unless `data` can be this piece of a packet or, with `length` None, of a mean; and, where
        given, has this length."""

    def mean_piece(self, round_index: int, piece: int, given: Sequence[GivenPiece]) -> MeanPiece:
        """The mean of a piece, which this replica averages for all: of all givers of the round, those whose checked
        piece is here. What the codec loses of it goes into this replica's next packet, once `apply_pieces` has the
        mean."""

    def is_false_mean(self, round_index: int, piece: int, given: Sequence[GivenPiece], said: Data) -> bool:
        """Whether `said`, checked, is not the mean of what is given."""

    def apply_pieces(
        self,
        round_index: int,
        means: Sequence[Data | None],
        taken: Sequence[bool],
        final_deltas: Sequence[Packet],
    ) -> OuterReport:
        """The outer step by the `means` of all pieces, None where there is none. `taken`: whether our own piece is in
        it; else it is in our next packet. Without any mean there is no step. Verdicts are on the `final_deltas`."""


class Replica(StageArithmetic, StageState, StageRounds, Protocol):
    """A node's copy of a stage. It is called only on the compute thread and never awaited."""

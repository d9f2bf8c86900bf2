"""Replicas for the virtual world: tensors are declared bytes, and the weights are three numbers that do real outer
steps."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarmnode.base.errors import RemoteFault
from swarmnode.base.ports import (
    Data,
    DraftedPieces,
    GivenPiece,
    LossResult,
    MeanPiece,
    Neighbour,
    OuterReport,
    Packet,
    PacketMeasures,
    State,
    StepReport,
    StreamingMessage,
    Tape,
    Verdict,
    WireTensor,
)
from swarmnode.data.sample import counted_targets
from swarmnode.model.adapter import trained_count
from swarmnode.model.memory_budget import GraphMemory
from swarmnode.model.section import ITEMSIZE, PACKED_ITEMSIZE, outer_sections, section_sizes
from swarmnode.model.split import StageLayers, stages_of
from swarmnode.run.manifest import Manifest, boundary_codes, boundary_nbytes, boundary_width, constants, from_base
from swarmnode.train.gossip.compression import codec
from swarmnode.train.gossip.outer import ALL
from swarmnode.trust.robust import PacketGuard
from swarmsim.law import Laws

DIMENSIONS = 3
ROW = struct.Struct(f"<{2 + 2 * DIMENSIONS}d")  # replica, round, theta, phi: the repeated content of a fake packet
ROW_BYTES = 64
PIECES = 16  # of a fake packet
MARK = struct.Struct("<Q")
BOUNDARY = {"bf16": ("bf16", 2), "fp32": ("f32", 4), "subspace": ("bf16", 2)}
WEIGHTS_NORM = 1.0  # of a fresh replica, whose weights are the sum of its updates
VOID = -1
# Of an inner step, in every dimension.
DRIFT = 1e-3
NOISE = 1e-3

Vector = tuple[float, ...]


def repeated(row: bytes, nbytes: int) -> memoryview:
    """`nbytes` declared bytes that repeat `row`, without memory of their own."""
    size = math.gcd(len(row), nbytes)
    return np.ndarray((nbytes // size, size), np.uint8, row, strides=(0, 1)).data  # `first` finds the whole row


def first(data: memoryview | bytes | bytearray, size: int) -> bytes:
    """The first `size` bytes of real or declared data."""
    if isinstance(data, memoryview) and data.ndim == 2:
        row: bytes = data.obj.base  # type: ignore[attr-defined]  # made by `repeated`
        return row[:size]
    return bytes(memoryview(data)[:size])


def _base(data: Data) -> bytes:
    """The content that declared bytes repeat, or real bytes themselves."""
    if isinstance(data, memoryview) and data.ndim == 2:
        content: bytes = data.obj.base  # type: ignore[attr-defined]  # made by `repeated`
        return content
    return bytes(data)


@functools.cache
def packet_nbytes(name: str, parameters: int) -> int:
    """Bytes of a usual packet of the codec `name`."""
    return codec(name).least_nbytes(parameters)


def _whole_rows(nbytes: float) -> int:
    """`nbytes` in whole rows, one at least."""
    return max(1, math.ceil(nbytes / ROW_BYTES)) * ROW_BYTES


def fake(dtype: str, shape: tuple[int, ...], itemsize: int, row: bytes) -> WireTensor:
    return WireTensor(dtype, shape, repeated(row, math.prod(shape) * itemsize))


@dataclass(slots=True)
class FakeTape:
    """Implements ports.Tape: remembers its microbatch and the number of states loaded when it was made; VOID: its graph
    was not kept."""

    mark: int
    shape: tuple[int, ...]
    nbytes: int
    version: int


def fake_sizes(manifest: Manifest, part: StageLayers, state_share: float) -> dict[str, int]:
    """Elements that a fake replica of `part` keeps of each state section."""
    sizes = section_sizes(manifest, part)
    return {name: max(64, round(count * state_share) // 64 * 64) for name, count in sizes.items()}


class FakeReplica:
    """ports.Replica without arithmetic on activations. Its weights are DIMENSIONS numbers that drift with noise in each
    inner step and take NoLoCo's outer steps for real, so that spread and means can be observed."""

    def __init__(
        self,
        manifest: Manifest,
        part: StageLayers,
        number: int,
        laws: Laws,
        rng: random.Random,
        state_share: float,
    ) -> None:
        self._manifest = manifest
        self._part = part
        self.number = number  # unique among all replicas of the world
        self.stage = part.stage
        self._laws = laws
        self._rng = rng
        self._sent = trained_count(manifest, part)  # in a round
        self._state_share = state_share
        self._sizes = self.sizes_of(part.stage)
        self.parameters = self._sizes["theta"]
        # of one sample
        self._graph_nbytes = GraphMemory(manifest, part, ITEMSIZE, False, "cpu").tape_nbytes(1, False, None)
        self.theta: Vector = (0.0,) * DIMENSIONS
        self.phi: Vector = self.theta
        self.momentum: Vector = self.theta
        self._marked: tuple[int, Vector] | None = None
        # Of the marked round: giver, round made in, whether it was a fallback.
        self._refused: list[tuple[int, int, bool]] = []
        self._guard = None if manifest.gossip.acceptance == ALL else PacketGuard()
        self._version = 0
        self.accumulated = self.recomputed = self.clipped = self.out_of_memory = self.held_nbytes = 0
        self.inner_steps = 0
        self.gradient_norm = 0.0

    @property
    def spare_nbytes(self) -> int:
        return 0

    @property
    def undrawn(self) -> bool:
        return False

    def draw_weights(self) -> None:
        """Do nothing: the weights are three zeros."""

    def sizes_of(self, stage: int) -> dict[str, int]:
        parts = stages_of(self._manifest)
        return fake_sizes(self._manifest, parts[stage], self._state_share)

    def ends_of(self, stage: int) -> tuple[int, int]:
        ends = stage in (0, self._manifest.pipeline.stages - 1) and not from_base(self._manifest)
        return (0, ROW_BYTES // ITEMSIZE) if ends else (0, 0)

    def apart(self, one: memoryview | bytes, other: memoryview | bytes) -> float:
        """See ports.Replica. The few dimensions are near the origin, so lengths below 1 count as 1."""
        a, b = (ROW.unpack(bytes(data[:ROW_BYTES]))[2 + DIMENSIONS :] for data in (one, other))
        if not all(map(math.isfinite, (*a, *b))):
            return math.inf
        return math.dist(a, b) / max(1.0, math.hypot(*a), math.hypot(*b))

    def rebuild(self, method: str, neighbours: Sequence[Neighbour], ends: memoryview | None) -> None:
        """Become the mean of the neighbours' slow weights, or one of them."""
        rows = [ROW.unpack(first(one.phi, ROW_BYTES))[2 + DIMENSIONS :] for one in neighbours]
        if not all(math.isfinite(value) for row in rows for value in row):
            raise RemoteFault("slow weights that are not finite")
        # None at an end, too, if no neighbour keeps it: that part begins from the seed (ladder.py).
        assert ends is None or self.ends_of(self.stage)[1] > 0, "embedding and head are mirrored, and nothing else"
        used = rows[:1] if method == "copy" else rows
        self._begin_anew(tuple(math.fsum(values) / len(used) for values in zip(*used, strict=True)))

    def table_part(self) -> WireTensor:
        """The table is none of the few dimensions."""
        count = self._manifest.model.vocabulary * self._manifest.model.width
        return fake("f16", (count,), 2, _row(self.number, self.inner_steps, self.theta, self.phi))

    def take_table(self, other: WireTensor) -> bool:
        _check_finite(other, "a tied table")
        return self._marked is None

    def restart(self) -> None:
        """Become what it was when the run began."""
        self._begin_anew((0.0,) * DIMENSIONS)

    def _begin_anew(self, weights: Vector) -> None:
        self.theta = self.phi = weights
        self.momentum = (0.0,) * DIMENSIONS
        self.inner_steps = 0
        self.accumulated = 0
        self._marked = None
        self._version += 1

    def _activations(self, samples: int, mark: int, *, back: bool = False) -> WireTensor:
        """`back`: their gradient."""
        model = self._manifest.model
        row = MARK.pack(mark)
        kind = boundary_codes(self._manifest.pipeline.boundary)[back]
        shape = (samples, model.context, boundary_width(self._manifest))
        if kind in BOUNDARY:
            return fake(BOUNDARY[kind][0], shape, BOUNDARY[kind][1], row)
        nbytes = -(-boundary_nbytes(kind, samples * model.context, model.width) // MARK.size) * MARK.size
        return WireTensor("f32", shape, repeated(row, nbytes), kind)

    def boundary_digest(self) -> bytes:
        return b""

    def forward(
        self, x: WireTensor, *, keep: bool, graph: bool = True, tokens: WireTensor | None = None, late: bool = False
    ) -> tuple[WireTensor, Tape | None]:
        _check_finite(x, "activations")  # as the real one does (simulated: everything, seed 3028)
        mark = MARK.unpack(first(x.data, MARK.size))[0]
        y = self._activations(x.shape[0], mark)
        if not keep:
            return y, None
        nbytes = x.nbytes + (x.shape[0] * self._graph_nbytes if graph else 0)
        return y, FakeTape(mark, x.shape, nbytes, self._version if graph else VOID)

    def backward(self, tape: Tape, gradient: WireTensor, samples: int, *, accumulate: bool = True) -> WireTensor | None:
        assert isinstance(tape, FakeTape)
        _check_finite(gradient, "gradient")
        mark = MARK.unpack(first(gradient.data, MARK.size))[0]
        if mark != tape.mark:
            self._laws.mixed(self.number, tape.mark, mark)
        if tape.version != self._version:
            self.recomputed += 1
        if accumulate:
            self._laws.counted(self.number, self.stage, tape.mark, samples)
            self.accumulated += samples
        return None if self.stage == 0 else self._activations(samples, tape.mark, back=True)

    def input_first(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def settle(self) -> None:
        """Nothing is left."""

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        _check_finite(x, "activations")
        mark = MARK.unpack(first(x.data, MARK.size))[0]
        count = counted_targets(tokens, self._manifest.data.document_end)
        loss_sum = count * (2.0 + 3.0 / (1.0 + self.inner_steps / 100.0))
        if not train:
            return LossResult(loss_sum, count, None)
        if accumulate:
            self._laws.counted(self.number, self.stage, mark, samples)
            self.accumulated += samples
        return LossResult(loss_sum, count, self._activations(samples, mark, back=True))

    def mark(self, state: State | None = None) -> bytes:
        phi = self.phi if state is None else ROW.unpack(first(state.sections["phi"], ROW_BYTES))[2 : 2 + DIMENSIONS]
        steps = self.inner_steps if state is None else state.inner_steps  # they decide the loss here
        moves = self._marked is not None and not self._manifest.gossip.delay
        return b"" if moves else hashlib.sha256(repr((phi, steps)).encode()).digest()[:8]

    def fingerprint(self, tensor: WireTensor) -> bytes:
        return hashlib.sha256(first(tensor.data, MARK.size)).digest()

    def cosine(self, one: WireTensor, other: WireTensor, samples: int) -> float:
        return float(first(one.data, MARK.size) == first(other.data, MARK.size))

    def norm(self, tensor: WireTensor, samples: int) -> float:
        return 1.0

    def sketch(self, gradient: WireTensor, tokens: WireTensor, samples: int, seed: int) -> Sequence[float]:
        return (0.0,)

    def step(self, samples_total: int, batch: float = math.inf, averaged: int = 1) -> StepReport:
        draw = self._rng.gauss
        self.theta = tuple(value + DRIFT + draw(0.0, NOISE) for value in self.theta)
        samples = self.accumulated
        self.accumulated = 0
        self.inner_steps += 1
        self.gradient_norm = 1.0
        return StepReport(self.inner_steps, 1.0, self._manifest.inner.learning_rate, samples)

    def snapshot(self, *, packed: bool = False, only: Sequence[str] = ()) -> State:
        values = {"theta": self.theta, "phi": self.phi, "momentum": self.momentum}
        wanted = {n: (values.get(n, self.theta), self._section_nbytes(n, packed)) for n in only or self._sizes}
        made = {
            (vector, nbytes): memoryview(_row(self.number, self.inner_steps, vector, self.phi) * (nbytes // ROW_BYTES))
            for vector, nbytes in wanted.values()
        }
        sections = {name: made[row] for name, row in wanted.items()}  # three of them share one memory
        return State(sections, self.inner_steps, self.gradient_norm, packed=packed)

    snapshot_in_parts = snapshot

    def _section_nbytes(self, name: str, packed: bool) -> int:
        return (PACKED_ITEMSIZE[name] if packed else ITEMSIZE) * self._sizes[name]

    def place_weights(self, name: str, first: int, values: WireTensor) -> None:
        """Placed weights are those of a fresh replica here."""

    def weights_placed(self) -> None:
        self.phi = self.theta

    def load(self, state: State) -> None:
        values = {}
        outer = outer_sections(self._sizes)
        for name in outer if tuple(state.sections) == outer else self._sizes:
            data = state.sections[name]
            if data.nbytes != self._section_nbytes(name, state.packed):
                raise RemoteFault(f"state with {data.nbytes} bytes of {name}")
            row = ROW.unpack(bytes(data[:ROW_BYTES]))
            if not all(map(math.isfinite, row)):
                raise RemoteFault(f"state, section {name}: not finite")
            values[name] = row[2 : 2 + DIMENSIONS]
        self._laws.loaded(self.number, int(row[0]))
        self.phi = values["phi"]
        self.momentum = values.get("momentum", self.momentum)
        self.theta = values.get("theta", self.phi)
        self.inner_steps = state.inner_steps
        self.gradient_norm = state.gradient_norm
        self.accumulated = 0
        self._marked = None
        self._version += 1

    def message(self, round_index: int) -> Sequence[WireTensor]:
        self._marked = (round_index, self.theta)
        self._refused = []
        self._laws.boundary(self.number, self.stage, round_index)
        return self._tensors(round_index, self._sent // self._manifest.gossip.fragments)

    def final_delta(self, round_index: int) -> Sequence[WireTensor]:
        self.message(round_index)
        return self._tensors(round_index, self._sent)

    def _tensors(self, round_index: int, count: int) -> list[WireTensor]:
        """Tensors for `count` parameters."""
        gossip = self._manifest.gossip
        row = _row(self.number, round_index, self.theta, self.phi)
        if gossip.codec in BOUNDARY:
            dtype, itemsize = BOUNDARY[gossip.codec]
            tensor = fake(dtype, (count,), itemsize, row)
        else:
            nbytes = _whole_rows(packet_nbytes(gossip.codec, count))
            tensor = WireTensor("f32", (count,), repeated(row, nbytes), gossip.codec)
        step = constants(gossip)
        return [tensor] * (1 if step.gamma == step.beta else 2)

    def _dimensions(self, round_index: int) -> list[int]:
        """Dimensions of the round's fragment: d is in fragment d mod F. With more fragments than dimensions some are
        empty."""
        of = self._manifest.gossip.fragments
        return [k for k in range(DIMENSIONS) if k % of == round_index % of]

    def draft(self, round_index: int) -> StreamingMessage:
        return StreamingMessage(self.message(round_index))

    def apply(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        assert self._marked is not None and self._marked[0] == round_index, f"{self._marked} is not {round_index}"
        boundary = self._marked[1]
        judged = [self._judge(own_weight, packet, boundary, round_index) for packet in packets]
        verdicts = [verdict for verdict, _ in judged]
        whole = [(p, row, v.keep) for p, (v, row) in zip(packets, judged, strict=True) if row is not None]
        said = [(int(row[0]), int(row[1]), packet.fallback) for packet, row, _ in whole]
        report = OuterReport(0, 0.0, 0.0, verdicts)
        if not lone and not report.believed:
            self._refused += said
            return report
        self._marked = None
        refused = self._refused
        self._refused = []
        for giver, made_in, _ in (one for one in said if one[2]):
            self._laws.fell_back(self.number, round_index, giver, made_in)
        met = [(giver, made_in) for giver, made_in, fallback in (*refused, *said) if not fallback]
        self._laws.applied(self.number, self.stage, round_index, met)
        taken = [(p, self._drawn_back(row, boundary, keep)) for p, row, keep in whole if keep > 0.0]
        phi = list(self.phi)
        momentum = list(self.momentum)
        theta = list(self.theta)
        due = self._dimensions(round_index)
        for k in range(DIMENSIONS):
            givers = [(packet.weight, row) for packet, row in taken if packet.final_delta or k in due]
            if givers or k in due:
                momentum[k] = self._momentum(k, own_weight, boundary, givers)
                phi[k] += momentum[k]
                theta[k] = phi[k] + theta[k] - boundary[k]
        self.theta = tuple(theta)
        self.phi = tuple(phi)
        self.momentum = tuple(momentum)
        return OuterReport(len(taken) + (own_weight > 0.0 or not taken), 0.0, 0.0, verdicts)

    apply_in_parts = apply

    def draft_pieces(self, round_index: int) -> DraftedPieces:
        targets = max(1, self.accumulated)
        nbytes = sum(tensor.nbytes for tensor in self.message(round_index))
        piece = repeated(_row(self.number, round_index, self.theta, self.phi), _whole_rows(nbytes / PIECES))
        return DraftedPieces([piece] * PIECES, [1.0] * PIECES, targets)

    def piece_digest(self, data: Data) -> bytes:
        return hashlib.sha256(_base(data)).digest()[:16]

    def check_piece(self, round_index: int, piece: int, data: Data, length: float | None) -> None:
        if not all(map(math.isfinite, ROW.unpack(first(data, ROW_BYTES)))):
            raise RemoteFault("piece that is not finite")

    def mean_piece(self, round_index: int, piece: int, given: Sequence[GivenPiece]) -> MeanPiece:
        here = [one for one in given if one.data is not None]
        nbytes = memoryview(here[0].data).nbytes if here[0].data is not None else ROW_BYTES
        return MeanPiece(
            repeated(self._mean_row(round_index, given), nbytes), [float(one.data is not None) for one in given]
        )

    def is_false_mean(self, round_index: int, piece: int, given: Sequence[GivenPiece], said: Data) -> bool:
        return _base(said) != self._mean_row(round_index, given)

    @staticmethod
    def _mean_row(round_index: int, given: Sequence[GivenPiece]) -> bytes:
        """The content of a mean: a row whose weights are the mean ones, and the numbers of those in it."""
        rows = [ROW.unpack(first(one.data, ROW_BYTES)) for one in given if one.data is not None and one.counts]
        mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)] if rows else [0.0] * (2 + 2 * DIMENSIONS)
        numbers = [float(len(rows)), *[row[0] for row in rows]]
        row = ROW.pack(VOID, round_index, *mean[2:]) + struct.pack(f"<{len(numbers)}d", *numbers)
        return row.ljust(_whole_rows(len(row)), b"\0")

    def apply_pieces(
        self, round_index: int, means: Sequence[Data | None], taken: Sequence[bool], final_deltas: Sequence[Packet]
    ) -> OuterReport:
        assert self._marked is not None and self._marked[0] == round_index, f"{self._marked} is not {round_index}"
        boundary = self._marked[1]
        mean = next((mean for mean in means if mean is not None), None)
        report = OuterReport(0, 0.0, 0.0, [Verdict(1.0, "accepted", "") for _ in final_deltas])
        self._marked = None
        if mean is None:
            return report
        row = _base(mean)
        (count,) = struct.unpack_from("<d", row, ROW.size)
        numbers = struct.unpack_from(f"<{int(count)}d", row, ROW.size + 8)
        met = [(int(number), round_index) for number in numbers if int(number) != self.number]
        self._laws.applied(self.number, self.stage, round_index, met)
        self.phi = ROW.unpack_from(row)[2 : 2 + DIMENSIONS]
        self.theta = tuple(phi + now - before for phi, now, before in zip(self.phi, self.theta, boundary, strict=True))
        report.members = int(count)
        return report

    def _momentum(self, k: int, own_weight: float, boundary: Vector, givers: Sequence[tuple[float, Vector]]) -> float:
        """Momentum of dimension `k` after the packets of `givers`, by NoLoCo's equations or plain averaging."""
        total = own_weight + sum(weight for weight, _ in givers)
        own = own_weight / total if givers else 1.0
        step = constants(self._manifest.gossip)
        at = 2 + DIMENSIONS
        delta = own * (boundary[k] - self.phi[k])
        delta += sum(w / total * (row[2 + k] - row[at + k]) for w, row in givers)
        mean = own * self.phi[k] + sum(w / total * row[at + k] for w, row in givers)
        return step.alpha * self.momentum[k] + step.beta * delta + step.gamma * (mean - self.phi[k])

    def _judge(
        self, own_weight: float, packet: Packet, boundary: Vector, round_index: int
    ) -> tuple[Verdict, Vector | None]:
        """(the real guard's verdict; the packet's content unless it is misshapen)."""
        try:
            row = self._open(packet)
        except RemoteFault as fault:
            return Verdict(0.0, "misshapen", str(fault)), None
        if packet.weight == 0.0:
            return Verdict(0.0, "newcomer", "a newcomer gives nothing"), row
        if self._guard is None:
            return Verdict(1.0, "accepted", "whatever is well-formed"), row
        about = range(DIMENSIONS) if packet.final_delta else self._dimensions(round_index)
        theirs, ours, phi = ([flat[k] for k in about] for flat in (row[2 : 2 + DIMENSIONS], boundary, self.phi))
        own = math.dist(ours, phi) if own_weight > 0.0 else 0.0
        weights_norm = math.hypot(WEIGHTS_NORM, *phi)
        return self._guard.judge(PacketMeasures(own, math.dist(theirs, ours), weights_norm)), row

    def _drawn_back(self, row: Vector, boundary: Vector, keep: float) -> Vector:
        """The packet, with only `keep` of its distance from our own weights."""
        ours = (*row[:2], *boundary, *self.phi)
        return tuple(mine + keep * (their - mine) for mine, their in zip(ours, row, strict=True))

    def _open(self, packet: Packet) -> Vector:
        count = self._sent if packet.final_delta else self._sent // self._manifest.gossip.fragments
        if not packet.tensors or packet.tensors[0].shape != (count,):
            raise RemoteFault(f"packet of {len(packet.tensors)} tensors with wrong shapes")
        row = ROW.unpack(first(packet.tensors[0].data, ROW_BYTES))
        if not all(map(math.isfinite, row)):
            raise RemoteFault("packet that is not finite")
        return row


def _check_finite(tensor: WireTensor, what: str) -> None:
    if first(tensor.data, MARK.size) == b"\xff" * MARK.size:
        raise RemoteFault(f"{what} that is not finite")


def _row(number: int, count: int, theta: Vector, phi: Vector) -> bytes:
    return ROW.pack(number, count, *theta, *phi)

"""A wrapper that meters any replica's cost and reports its state transfers to the laws."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swarmnode.app.planner.plan import PIECE_TOKENS
from swarmnode.base.ports import (
    Data,
    DraftedPieces,
    GivenPiece,
    LossResult,
    MeanPiece,
    Neighbour,
    OuterReport,
    Packet,
    Replica,
    State,
    StepReport,
    StreamingMessage,
    Tape,
    WireTensor,
)
from swarmnode.base.wire.record_pb2 import Progress
from swarmnode.keep.transfer.snapshot import CHUNK_NBYTES, Snapshot
from swarmnode.model.adapter import trained_count
from swarmnode.model.section import outer_sections, section_sizes, snapshot_nbytes, state_nbytes
from swarmnode.model.split import StageLayers
from swarmnode.run.gossip_rules import codecs
from swarmnode.run.manifest import Manifest
from swarmsim.law import Laws
from swarmsim.machine import HASH_RATE, Meter
from swarmsim.network import FINE
from swarmsim.replica import PIECES

STATE_TRAFFIC = 2  # memory traffic of copying a state: each byte is read and written
STEP_TRAFFIC = 28  # bytes per parameter: AdamW reads four and writes three float32
OUTER_TRAFFIC = 40
FINE_NBYTES = CHUNK_NBYTES // FINE


class MeteredReplica:
    """Any replica, with its cost charged to `meter` and its state transfers reported to the laws."""

    def __init__(
        self,
        inner: Replica,
        manifest: Manifest,
        part: StageLayers,
        meter: Meter,
        laws: Laws,
        number: int,
        work_factor: float,
        repeated: int = 0,
    ) -> None:
        """`repeated`: forwards done again in each backward for want of memory (model/memory_budget.py)."""
        self.inner = inner
        self._repeated = repeated
        self.number = number
        self._meter = meter
        self._laws = laws
        self._flops = part.cost * manifest.model.context * work_factor  # forward, of one sample
        self._idle = self._flops * PIECE_TOKENS / manifest.model.context
        self._nbytes = float(trained_count(manifest, part))
        sizes = section_sizes(manifest, part)
        self._outer = outer_sections(sizes)
        gossip = manifest.gossip
        pieces_ns = codecs()[gossip.codec].coding_ns * self._nbytes / gossip.fragments
        self._piece_s = 0.5e-9 * pieces_ns / PIECES  # to code a piece, or to read one
        self._copied = float(STATE_TRAFFIC * state_nbytes(sizes))
        meter.state_nbytes = float(snapshot_nbytes(sizes))

    def __getattr__(self, name: str) -> Any:
        """A member that costs nothing: the inner replica's."""
        return getattr(self.inner, name)

    def forward(
        self, x: WireTensor, *, keep: bool, graph: bool = True, tokens: WireTensor | None = None, late: bool = False
    ) -> tuple[WireTensor, Tape | None]:
        self._arithmetic(x.shape[0])
        return self.inner.forward(x, keep=keep, graph=graph, tokens=tokens, late=late)

    def backward(self, tape: Tape, gradient: WireTensor, samples: int, *, accumulate: bool = True) -> WireTensor | None:
        before = self.inner.recomputed
        given = self.inner.backward(tape, gradient, samples, accumulate=accumulate)
        self._arithmetic(samples, 2.0 + max(self._repeated, self.inner.recomputed - before))
        return given

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        self._arithmetic(samples, 3.0 + self._repeated if train else 1.0)
        return self.inner.loss(x, tokens, samples, train=train, accumulate=accumulate)

    def fingerprint(self, tensor: WireTensor) -> bytes:
        self._meter.add(nbytes=tensor.nbytes)
        return self.inner.fingerprint(tensor)

    def cosine(self, one: WireTensor, other: WireTensor, samples: int) -> float:
        self._meter.add(nbytes=one.nbytes + other.nbytes)
        return self.inner.cosine(one, other, samples)

    def sketch(self, gradient: WireTensor, tokens: WireTensor, samples: int, seed: int) -> Sequence[float]:
        self._meter.add(nbytes=gradient.nbytes)
        return self.inner.sketch(gradient, tokens, samples, seed)

    def step(self, samples_total: int, batch: float = math.inf, averaged: int = 1) -> StepReport:
        self._meter.add(nbytes=STEP_TRAFFIC * self._nbytes)
        return self.inner.step(samples_total, batch, averaged)

    def snapshot(self, *, packed: bool = False, only: Sequence[str] = ()) -> State:
        self._meter.add(nbytes=self._copied)
        state = self.inner.snapshot(packed=packed, only=only)
        self._laws.given(_digests(state))
        if not only:  # newcomers download a part
            self._laws.given(_digests(replace(state, sections={name: state.sections[name] for name in self._outer})))
        return state

    snapshot_in_parts = snapshot

    def load(self, state: State) -> None:
        self._meter.add(nbytes=self._copied)
        self.inner.load(state)
        self._laws.taken(self.number, _digests(state))

    def place_weights(self, name: str, first: int, values: WireTensor) -> None:
        self._meter.add(nbytes=float(STATE_TRAFFIC * values.nbytes))
        self.inner.place_weights(name, first, values)

    def weights_placed(self) -> None:
        self._meter.add(nbytes=self._copied)
        self.inner.weights_placed()

    def rebuild(self, method: str, neighbours: Sequence[Neighbour], ends: memoryview | None) -> None:
        self._meter.add(nbytes=self._copied)
        self.inner.rebuild(method, neighbours, ends)

    def table_part(self) -> WireTensor:
        part = self.inner.table_part()
        self._meter.add(nbytes=float(STATE_TRAFFIC * part.nbytes))
        return part

    def take_table(self, other: WireTensor) -> bool:
        self._meter.add(nbytes=float(STATE_TRAFFIC * other.nbytes))
        return self.inner.take_table(other)

    def restart(self) -> None:
        self._meter.add(nbytes=self._copied)
        self.inner.restart()

    def message(self, round_index: int) -> Sequence[WireTensor]:
        self._meter.add(nbytes=OUTER_TRAFFIC * self._nbytes)
        return self.inner.message(round_index)

    def final_delta(self, round_index: int) -> Sequence[WireTensor]:
        self._meter.add(nbytes=OUTER_TRAFFIC * self._nbytes)
        return self.inner.final_delta(round_index)

    def draft(self, round_index: int) -> StreamingMessage:
        """`message`, complete: in the virtual world work has no intermediate state."""
        return StreamingMessage(self.message(round_index))

    def apply(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        self._meter.add(nbytes=OUTER_TRAFFIC * self._nbytes)
        return self.inner.apply(round_index, own_weight, packets, lone=lone)

    apply_in_parts = apply

    def draft_pieces(self, round_index: int) -> DraftedPieces:
        self._meter.add(nbytes=OUTER_TRAFFIC * self._nbytes, seconds=PIECES * self._piece_s)
        return self.inner.draft_pieces(round_index)

    def piece_digest(self, data: Data) -> bytes:
        self._meter.add(seconds=memoryview(data).nbytes / HASH_RATE)
        return self.inner.piece_digest(data)

    def check_piece(self, round_index: int, piece: int, data: Data, length: float | None) -> None:
        self._meter.add(seconds=self._piece_s)
        self.inner.check_piece(round_index, piece, data, length)

    def mean_piece(self, round_index: int, piece: int, given: Sequence[GivenPiece]) -> MeanPiece:
        """Each that was given is read, and the mean is coded."""
        self._meter.add(seconds=(1 + len(given)) * self._piece_s)
        return self.inner.mean_piece(round_index, piece, given)

    def is_false_mean(self, round_index: int, piece: int, given: Sequence[GivenPiece], said: Data) -> bool:
        self._meter.add(seconds=(1 + len(given)) * self._piece_s)
        return self.inner.is_false_mean(round_index, piece, given, said)

    def apply_pieces(
        self, round_index: int, means: Sequence[Data | None], taken: Sequence[bool], final_deltas: Sequence[Packet]
    ) -> OuterReport:
        self._meter.add(nbytes=OUTER_TRAFFIC * self._nbytes, seconds=PIECES * self._piece_s)
        return self.inner.apply_pieces(round_index, means, taken, final_deltas)

    def probe(self, samples: int) -> None:
        """Forward one synthetic microbatch, to be timed."""
        self._arithmetic(samples)

    def _arithmetic(self, samples: int, forwards: float = 1.0) -> None:
        """Charge `samples`, at `forwards` times the cost of a forward."""
        self._meter.add(forwards * self._flops * samples, idle=forwards * self._idle)


def _digests(state: State) -> list[tuple[int, bytes]]:
    """(index, hash) of each chunk, or part of one: a download may get them from several replicas."""
    whole = Snapshot(state, 0, 0, Progress(), FINE_NBYTES)
    return [(index, hashlib.sha256(whole.chunk(index)).digest()) for index in range(whole.chunks)]

"""A node's copy of a stage: the model's arithmetic together with the outer optimizer's slow weights.

Its state is in replica_state.py, its second try for want of memory in memory_retry.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from swarmnode.app.machine.memory_retry import MemoryRetry
from swarmnode.app.machine.replica_state import ReplicaState
from swarmnode.base.errors import UsageError
from swarmnode.base.large_buffer import large_buffer
from swarmnode.base.parted_work import Parts, run_whole
from swarmnode.base.ports import (
    Data,
    DraftedPieces,
    GivenPiece,
    LossResult,
    MeanPiece,
    Neighbour,
    OuterReport,
    Packet,
    State,
    StepReport,
    StreamingMessage,
    Tape,
    WireTensor,
)
from swarmnode.keep.transfer.state_slices import apart
from swarmnode.model.device import free_nbytes, tried
from swarmnode.model.memory_budget import PASS_SHARE
from swarmnode.model.running_mean import RunningMean
from swarmnode.model.stage import StageReplica
from swarmnode.model.state_stream import Buffers
from swarmnode.model.tensor import cosine, decode_tokens, sketch
from swarmnode.model.turn import WHOLE, Turn
from swarmnode.run.manifest import Manifest
from swarmnode.run.manifest.gossip_compat import averages_gradients
from swarmnode.train.gossip.butterfly.word import short_digest
from swarmnode.train.gossip.outer import Outer, outer

if TYPE_CHECKING:
    from swarmnode.model.tied_table import TiedTable

MARKED = 256  # guess: slow weights in a mark, spread over all, so that a round of a fragment moves some


class ReplicaRounds:
    """Drafts and steps of `outer`, whose fast weights are those of `stage`."""

    def __init__(self, stage: StageReplica, outer: Outer, retry: MemoryRetry) -> None:
        self._stage = stage
        self._outer = outer
        self._retry = retry

    def draft(self, round_index: int) -> StreamingMessage:
        """The packet of `round_index`, whose boundary is marked, before it is written."""
        if self._outer.steps_early:
            self._before_step()
        draft = self._retry.in_round(lambda: self._outer.draft(round_index))
        return draft.written_beside() if self._outer.splits else draft

    def apply(self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool) -> OuterReport:
        """The outer step with `packets`, all of it at once."""
        if self._outer.splits:
            return run_whole(self.apply_in_parts(round_index, own_weight, packets, lone=lone))
        self._before_step()
        report = self._retry.in_round(lambda: self._outer.apply(round_index, own_weight, packets, lone=lone))
        if lone or report.believed:
            self._hold()
        return report

    def apply_in_parts(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool
    ) -> Parts[OuterReport]:
        """The outer step with `packets` where slow weights are beside the device: they step there, fast ones follow."""
        outer = self._outer
        self._retry.in_round(partial(outer.prepare, packets))

        def slow() -> OuterReport:
            report = outer.apply_slow(round_index, own_weight, packets, lone=lone)
            if lone or report.believed:
                self._stage.hold(outer.phi)
            return report

        report: OuterReport = yield from self._retry.beside(slow)
        if lone or report.believed:
            self._before_step()
            self._retry.in_round(outer.follow)
            self._retry.in_round(lambda: self._stage.hold(outer.theta))
        return report

    def apply_pieces(
        self, round_index: int, means: Sequence[Data | None], taken: Sequence[bool], final_deltas: Sequence[Packet]
    ) -> OuterReport:
        """The outer step by the `means` of pieces."""
        self._before_step()
        report = self._retry.in_round(lambda: self._outer.in_pieces.apply(round_index, means, taken, final_deltas))
        self._hold()
        return report

    def _before_step(self) -> None:
        """Tapes keep the fast weights as they are now."""
        self._stage.stash.before_step(inner=False)

    def _hold(self) -> None:
        # Coding errors of packets lie partly outside the subspace. The step is linear: this projects each packet.
        self._retry.in_round(lambda: self._stage.hold(self._outer.theta, self._outer.phi))


def mark_of(phi: Tensor) -> bytes:
    """Digest of a few of the slow weights `phi`."""
    few = phi[:: max(1, len(phi) // MARKED)].to("cpu", torch.float32)
    return hashlib.sha256(few.contiguous().numpy().data).digest()[:8]


class TorchReplica:
    """`ports.Replica` on `device`, initialised from the manifest's seed: fast weights in `stage`, slow ones in
    `outer`."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        autocast: bool = False,
        sender: str = "",
        optimizer_state: str = "device",
        draw: bool = True,
        buffers: Buffers = large_buffer,
    ) -> None:
        """`sender`, the peer id, seeds the rounding of lossy codecs: all should not round alike.
        `optimizer_state`: of `--optimizer-state`; without `draw` the weights are drawn by `draw_weights`, or loaded.
        `buffers` makes room for snapshots."""
        self.stage = StageReplica(
            manifest,
            stage,
            device,
            dtype,
            autocast=autocast,
            optimizer_state=optimizer_state,
            draw=draw,
        )
        # Autograd does not notice outer steps (`data`): tapes find theta restored, see model/weight_stash.py.
        self.outer: Outer = outer(manifest.gossip, self.stage.theta.data, sender)
        share = manifest.inner.average_share
        beside = self.stage.device.type != "cpu"
        self.average = RunningMean(share, beside=beside) if share > 0.0 else None
        self._retry = MemoryRetry(self.stage, self.outer)
        self._rounds = ReplicaRounds(self.stage, self.outer, self._retry)
        self._state = ReplicaState(self.stage, self.outer, self.average, buffers)
        if (free := free_nbytes(str(self.stage.device))) is not None:
            self.stage.backprop.limit(int(PASS_SHARE * free))
        if self.outer.averages_moments and optimizer_state != "device":
            raise UsageError(f"gossip.method {manifest.gossip.method} needs moments: give --optimizer-state device")
        if self.outer.averages_moments:
            self.outer.attend(self.stage.exp_avg, self.stage.exp_avg_sq)
        self.steps_in_rounds = averages_gradients(manifest)
        if self.steps_in_rounds:
            self.outer.attend_gradients(self)

    @property
    def out_of_memory(self) -> int:
        return self._retry.times

    @property
    def tied(self) -> TiedTable | None:
        """The table of a tied model, where both ends of the pipeline train it."""
        return self._state.tied

    @property
    def accumulated(self) -> int:
        return 0 if self.steps_in_rounds else self.stage.accumulated

    @property
    def recomputed(self) -> int:
        return self.stage.recomputed

    @property
    def held_nbytes(self) -> int:
        return self.stage.held_nbytes

    @property
    def clipped(self) -> int:
        return self.stage.incoming.clips

    @property
    def spare_nbytes(self) -> int:
        return free_nbytes(str(self.stage.device)) or 0

    @property
    def inner_steps(self) -> int:
        return self.stage.inner_steps

    def forward(
        self, x: WireTensor, *, keep: bool, graph: bool = True, tokens: WireTensor | None = None, late: bool = False
    ) -> tuple[WireTensor, Tape | None]:
        def work() -> tuple[WireTensor, Tape | None]:
            with contextlib.nullcontext() if keep else self._averaged():
                return self.stage.forward(x, keep=keep, graph=graph and not self._retry.short, tokens=tokens, late=late)

        return self._retry.microbatch(work)

    def backward(self, tape: Tape, gradient: WireTensor, samples: int, *, accumulate: bool = True) -> WireTensor | None:
        return self._retry.microbatch(lambda: self.stage.backward(tape, gradient, samples, accumulate=accumulate))

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        def work() -> LossResult:
            if train:
                return self.stage.loss(x, tokens, samples, train=True, accumulate=accumulate)
            with self._averaged():
                return self.stage.loss(x, tokens, samples, train=False)

        return self._retry.microbatch(work)

    @contextlib.contextmanager
    def input_first(self) -> Iterator[None]:
        self.stage.backprop.input_first = True
        try:
            yield
        finally:
            self.stage.backprop.input_first = False

    def settle(self) -> None:
        self._retry.settle()

    def mark(self, state: State | None = None) -> bytes:
        if state is not None:
            return mark_of(torch.from_numpy(np.frombuffer(state.sections["phi"], "<f4").copy()))
        if self.outer.round is not None and (self.outer.steps_early or self.outer.splits):
            return b""  # one kind of weights steps before the other
        return mark_of(self.outer.theta if self.outer.delayed else self.outer.phi)

    def fingerprint(self, tensor: WireTensor) -> bytes:
        digest = hashlib.sha256(f"{tensor.dtype} {tensor.codec} {tensor.shape}".encode())
        digest.update(tensor.data)
        return digest.digest()

    def cosine(self, one: WireTensor, other: WireTensor, samples: int) -> float:
        return cosine(self.stage.compared(one, samples), self.stage.compared(other, samples))

    def norm(self, tensor: WireTensor, samples: int) -> float:
        return float(torch.linalg.vector_norm(self.stage.compared(tensor, samples).float())) / math.sqrt(samples)

    def sketch(self, gradient: WireTensor, tokens: WireTensor, samples: int, seed: int) -> Sequence[float]:
        model = self.stage.manifest.model
        ids, _ = decode_tokens(tokens, model.context, model.vocabulary, "tokens of a gradient")
        return sketch(self.stage.compared(gradient, samples), ids[:, :-1], model.vocabulary, seed)

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the weights are the running mean, if there is one: held-out losses are of the exported
        weights."""
        if self.average is None or self.average.value is None:
            return contextlib.nullcontext()
        return self.stage.instead(self.average.value)

    def step(self, samples_total: int, batch: float = math.inf, averaged: int = 1, turn: Turn = WHOLE) -> StepReport:
        report = self.stage.step(samples_total, batch, averaged, turn)
        if (average := self.average) is not None:
            done, _ = tried(lambda: average.see(self.stage.theta, samples_total))
            self._retry.times += not done  # the mean does without these weights
        return report

    def message(self, round_index: int) -> list[WireTensor]:
        return list(self.draft(round_index).finish())

    def final_delta(self, round_index: int) -> Sequence[WireTensor]:
        return self.outer.final_delta(round_index)

    def draft(self, round_index: int) -> StreamingMessage:
        return self._rounds.draft(round_index)

    def apply(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        return self._rounds.apply(round_index, own_weight, packets, lone=lone)

    def apply_in_parts(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport | Parts[OuterReport]:
        step = self._rounds.apply_in_parts if self.outer.splits else self.apply
        return step(round_index, own_weight, packets, lone=lone)

    def draft_pieces(self, round_index: int) -> DraftedPieces:
        return self._retry.in_round(lambda: self.outer.in_pieces.draft(round_index))

    def piece_digest(self, data: Data) -> bytes:
        return short_digest(data)

    def check_piece(self, round_index: int, piece: int, data: Data, length: float | None) -> None:
        self.outer.in_pieces.check(round_index, piece, data, length)

    def mean_piece(self, round_index: int, piece: int, given: Sequence[GivenPiece]) -> MeanPiece:
        return self._retry.in_round(lambda: self.outer.in_pieces.mean(round_index, piece, given))

    def is_false_mean(self, round_index: int, piece: int, given: Sequence[GivenPiece], said: Data) -> bool:
        return self._retry.in_round(lambda: self.outer.in_pieces.is_false(round_index, piece, given, said))

    def apply_pieces(
        self,
        round_index: int,
        means: Sequence[Data | None],
        taken: Sequence[bool],
        final_deltas: Sequence[Packet],
    ) -> OuterReport:
        return self._rounds.apply_pieces(round_index, means, taken, final_deltas)

    def boundary_digest(self) -> bytes:
        return b"" if self.stage.subspace is None else self.stage.subspace.digest

    def digest(self) -> bytes:
        """SHA-256 of the slow weights as little-endian float32: equal at two replicas exactly if every bit is."""
        flat = self.outer.phi.to("cpu", torch.float32)
        return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest()

    @torch.no_grad()
    def snapshot(self, *, packed: bool = False, only: Sequence[str] = ()) -> State:
        return run_whole(self._state.copied(packed, only))

    def snapshot_in_parts(self, *, packed: bool = False, only: Sequence[str] = ()) -> State | Parts[State]:
        if self.stage.device.type == "cpu":
            return self.snapshot(packed=packed, only=only)
        return self._state.copied(packed, only)

    def load(self, state: State) -> None:
        """Accumulated gradients, a marked boundary and tapes become invalid. Raises RemoteFault, with nothing changed,
        and Busy if memory runs out: load again before anything else."""
        self._retry.microbatch(lambda: self._state.load(state))

    def place_weights(self, name: str, first: int, values: WireTensor) -> None:
        self._state.place_weights(name, first, values)

    def weights_placed(self) -> None:
        self._state.begin_placed()

    @property
    def undrawn(self) -> bool:
        return self.stage.undrawn

    def draw_weights(self) -> None:
        self._state.draw_weights()

    def restart(self) -> None:
        self._state.restart()

    def rebuild(self, method: str, neighbours: Sequence[Neighbour], ends: memoryview | None) -> None:
        self._state.rebuild(method, neighbours, ends)

    def sizes_of(self, stage: int) -> dict[str, int]:
        return self._state.sizes_of(stage)

    def ends_of(self, stage: int) -> tuple[int, int]:
        return self._state.ends_of(stage)

    def apart(self, one: memoryview | bytes, other: memoryview | bytes) -> float:
        return apart(one, other)

    def table_part(self) -> WireTensor:
        return self._state.table_part()

    def take_table(self, other: WireTensor) -> bool:
        return self._state.take_table(other)

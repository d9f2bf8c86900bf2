"""A node's copy of a stage: the model's arithmetic together with the outer optimizer's slow weights."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from swarmnode.base.errors import LocalFault, RemoteFault, UsageError
from swarmnode.base.ids import stage_name
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
from swarmnode.keep.recovery import checkfree
from swarmnode.keep.transfer.state_slices import apart
from swarmnode.model.device import free_nbytes, tried, twice
from swarmnode.model.memory_budget import PASS_SHARE
from swarmnode.model.running_mean import RunningMean
from swarmnode.model.section import SECTIONS, section_sizes
from swarmnode.model.split import TABLE, StageLayers, is_writer, stages_of
from swarmnode.model.stage import BUMP_STEPS, StageReplica
from swarmnode.model.state_stream import Buffers, GivenState, Part, section_parts, spans_of
from swarmnode.model.tensor import check_finite, cosine, decode, decode_flat, decode_tokens, encode, sketch
from swarmnode.model.tied_table import TiedTable
from swarmnode.model.turn import WHOLE, Turn
from swarmnode.run.manifest import Manifest, from_base
from swarmnode.run.manifest.gossip_compat import averages_gradients
from swarmnode.train.gossip.butterfly.word import short_digest
from swarmnode.train.gossip.outer import Outer, outer

T = TypeVar("T")
MARKED = 256  # guess: slow weights in a mark, spread over all, so that a round of a fragment moves some


def slow_and_fast(
    stage: StageReplica,
    outer: Outer,
    slow_step: Callable[[], OuterReport],
    again_beside: Callable[[Callable[[], Any]], Parts[Any]],
    *,
    lone: bool,
) -> Parts[OuterReport]:
    """The parts of `slow_step`, which is `outer.apply_slow`, and of what follows on the device of `stage`.

    `again_beside` does its argument beside the device, once more where memory ran out. `lone`: as in `apply`."""

    def slow() -> OuterReport:
        report = slow_step()
        if lone or report.believed:
            stage.hold(outer.phi)
        return report

    report: OuterReport = yield from again_beside(slow)
    if lone or report.believed:
        stage.stash.before_step(inner=False)
        run_whole(again_beside(outer.follow))
        run_whole(again_beside(lambda: stage.hold(outer.theta)))
    return report


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
        self.out_of_memory = 0
        self._short = False  # memory has run out in the piece of work that is under way
        self._sizes = self.sizes_of(stage)
        self.tied: TiedTable | None = None  # where both ends of the pipeline train a tied model's table
        if "table" in self._sizes:
            at = slice(*spans_of(self.stage.shapes, TABLE.__eq__)[0])
            self.tied = TiedTable(self.outer.phi[at], self.outer.theta[at], first=self.stage.part.has_embedding)
        self._buffers = buffers
        assert self._sizes == {name: len(part) for name, part in self._parts_of_state().items()}, self._sizes
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
    def accumulated(self) -> int:
        """Samples whose gradient waits for the next inner step."""
        return 0 if self.steps_in_rounds else self.stage.accumulated

    @property
    def recomputed(self) -> int:
        """Tapes run forward again so far."""
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
        """Inner steps of these weights, including those before a download."""
        return self.stage.inner_steps

    def forward(
        self, x: WireTensor, *, keep: bool, graph: bool = True, tokens: WireTensor | None = None, late: bool = False
    ) -> tuple[WireTensor, Tape | None]:
        def work() -> tuple[WireTensor, Tape | None]:
            with contextlib.nullcontext() if keep else self._averaged():
                return self.stage.forward(x, keep=keep, graph=graph and not self._short, tokens=tokens, late=late)

        return self._twice(work)

    def backward(self, tape: Tape, gradient: WireTensor, samples: int, *, accumulate: bool = True) -> WireTensor | None:
        return self._twice(lambda: self.stage.backward(tape, gradient, samples, accumulate=accumulate))

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        def work() -> LossResult:
            if train:
                return self.stage.loss(x, tokens, samples, train=True, accumulate=accumulate)
            with self._averaged():
                return self.stage.loss(x, tokens, samples, train=False)

        return self._twice(work)

    @contextlib.contextmanager
    def input_first(self) -> Iterator[None]:
        self.stage.backprop.input_first = True
        try:
            yield
        finally:
            self.stage.backprop.input_first = False

    def settle(self) -> None:
        try:
            self._twice(self.stage.settle)
        except BaseException:
            self.stage.give_up()
            raise

    def _twice(self, work: Callable[[], T]) -> T:
        """`work`; if memory runs out, once again with less. Raises Busy if it runs out again: then nothing of the
        microbatch is counted."""
        self._short = False
        try:
            return twice(work, self._relieve, stage_name(self.stage.part.stage))
        except BaseException:
            if self.stage.unsettled is None:
                self.stage.give_up()
            raise
        finally:
            self._short = False

    def _again(self, work: Callable[[], T]) -> T:
        """A round's `work`; if memory runs out, once again without the graphs of microbatches. Raises LocalFault if it
        runs out again, or where the work cannot be repeated."""
        return run_whole(self._again_beside(work))

    def _again_beside(self, work: Callable[[], T]) -> Parts[T]:
        """`_again`, with `work` beside the device."""
        for _ in range(2):
            done, value = yield partial(tried, work)
            if done:
                return value  # type: ignore[no-any-return]
            if self.outer.stepping:
                break
            self._relieve()
        raise LocalFault(
            f"memory ran out in a round of {stage_name(self.stage.part.stage)}, also without microbatches: free some "
            f"memory of {self.stage.device}, or serve a smaller stage"
        )

    def _relieve(self) -> None:
        self.out_of_memory += 1
        self._short = True
        self.stage.relieve()

    def mark(self, state: State | None = None) -> bytes:
        in_round = state is None and self.outer.round is not None
        if in_round and (self.outer.steps_early or self.outer.splits):  # one kind of weights before the other
            return b""
        phi = self.outer.phi if state is None else torch.from_numpy(np.frombuffer(state.sections["phi"], "<f4").copy())
        few = phi[:: max(1, len(phi) // MARKED)].to("cpu", torch.float32)
        return hashlib.sha256(few.contiguous().numpy().data).digest()[:8]

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
            self.out_of_memory += not done  # the mean does without these weights
        return report

    def message(self, round_index: int) -> list[WireTensor]:
        """Mark the boundary of `round_index` and return the tensors that partners need, which own their memory."""
        return list(self.draft(round_index).finish())

    def final_delta(self, round_index: int) -> Sequence[WireTensor]:
        return self.outer.final_delta(round_index)

    def draft(self, round_index: int) -> StreamingMessage:
        """Like `message`, before the tensors are written."""
        if self.outer.steps_early:
            self.stage.stash.before_step(inner=False)
        draft = self._again(lambda: self.outer.draft(round_index))
        return draft.written_beside() if self.outer.splits else draft

    def apply(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport:
        if self.outer.splits:
            parts = self.apply_in_parts(round_index, own_weight, packets, lone=lone)
            return parts if isinstance(parts, OuterReport) else run_whole(parts)
        self.stage.stash.before_step(inner=False)
        report = self._again(lambda: self.outer.apply(round_index, own_weight, packets, lone=lone))
        if not lone and not report.believed:
            return report
        # Coding errors of packets lie partly outside the subspace. The step is linear: this projects each packet.
        self._again(lambda: self.stage.hold(self.outer.theta, self.outer.phi))
        return report

    def apply_in_parts(
        self, round_index: int, own_weight: float, packets: Sequence[Packet], *, lone: bool = True
    ) -> OuterReport | Parts[OuterReport]:
        if not self.outer.splits:
            return self.apply(round_index, own_weight, packets, lone=lone)
        slow = partial(self.outer.apply_slow, round_index, own_weight, packets, lone=lone)
        self._again(partial(self.outer.prepare, packets))
        return slow_and_fast(self.stage, self.outer, slow, self._again_beside, lone=lone)

    def draft_pieces(self, round_index: int) -> DraftedPieces:
        return self._again(lambda: self.outer.in_pieces.draft(round_index))

    def piece_digest(self, data: Data) -> bytes:
        return short_digest(data)

    def check_piece(self, round_index: int, piece: int, data: Data, length: float | None) -> None:
        self.outer.in_pieces.check(round_index, piece, data, length)

    def mean_piece(self, round_index: int, piece: int, given: Sequence[GivenPiece]) -> MeanPiece:
        return self._again(lambda: self.outer.in_pieces.mean(round_index, piece, given))

    def is_false_mean(self, round_index: int, piece: int, given: Sequence[GivenPiece], said: Data) -> bool:
        return self._again(lambda: self.outer.in_pieces.is_false(round_index, piece, given, said))

    def apply_pieces(
        self,
        round_index: int,
        means: Sequence[Data | None],
        taken: Sequence[bool],
        final_deltas: Sequence[Packet],
    ) -> OuterReport:
        self.stage.stash.before_step(inner=False)
        report = self._again(lambda: self.outer.in_pieces.apply(round_index, means, taken, final_deltas))
        self._again(lambda: self.stage.hold(self.outer.theta, self.outer.phi))
        return report

    def boundary_digest(self) -> bytes:
        """Digest of the frozen subspace, b"" if there is none: replicas of a run must agree."""
        return b"" if self.stage.subspace is None else self.stage.subspace.digest

    def digest(self) -> bytes:
        """SHA-256 of the slow weights as little-endian float32: equal at two replicas exactly if every bit is."""
        flat = self.outer.phi.to("cpu", torch.float32)
        return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest()

    @torch.no_grad()
    def snapshot(self, *, packed: bool = False, only: Sequence[str] = ()) -> State:
        """A copy of the persistent state: 12 to 20 bytes a parameter, 8 to 12 if `packed` (model/section.py); only the
        sections `only`, if given. Accumulated gradients are not included."""
        return run_whole(self._copied(packed, only))

    def snapshot_in_parts(self, *, packed: bool = False, only: Sequence[str] = ()) -> State | Parts[State]:
        if self.stage.device.type == "cpu":
            return self.snapshot(packed=packed, only=only)
        return self._copied(packed, only)

    def _copied(self, packed: bool, only: Sequence[str]) -> Parts[State]:
        parts = self._parts_of_state()
        stage = self.stage
        at_once = spans_of(stage.shapes, is_writer) if stage.subspace is not None else ()  # or they leave the span
        sections = yield from section_parts(
            parts, tuple(only or parts), self._buffers, packed=packed, theta_at_once=at_once
        )
        return State(sections, stage.inner_steps, stage.gradient_norm, bump_steps=stage.bump_steps, packed=packed)

    def load(self, state: State) -> None:
        """Adopt `state`; accumulated gradients, a marked boundary and tapes become invalid. Raises RemoteFault, with
        nothing changed, if sections are missing, of the wrong size or not finite, a second moment is negative or, as
        sent and where rounds mix none, too small for its first, or weights are outside this run's subspace. Raises Busy
        if memory runs out: load again before anything else."""
        self._twice(lambda: self._load(state))

    @torch.no_grad()
    def _load(self, state: State) -> None:
        parts = self._parts_of_state()
        sections = GivenState(state, self._sizes)
        sections.check()
        if not 0 <= state.bump_steps <= BUMP_STEPS:
            raise RemoteFault(f"state with {state.bump_steps} steps at a higher rate; expected 0 to {BUMP_STEPS}")
        if state.inner_steps < 0 or not (math.isfinite(state.gradient_norm) and state.gradient_norm >= 0.0):
            raise RemoteFault(f"state after {state.inner_steps} inner steps with gradient norm {state.gradient_norm}")
        self._check_stray(sections)
        if state.packed and "exp_avg_sq" in sections.sections and not self.outer.averages_moments:
            sections.check_moments(self.stage.manifest, self.stage.part)
        for name in ("theta", "exp_avg", "exp_avg_sq"):
            if name in sections.sections:
                sections.copy_to(name, parts[name])
        self.outer.reset(sections.sections["phi"], sections.sections.get("momentum"))
        if self.tied is not None:
            sections.copy_to("table", self.tied)
        if sections.outer_alone:
            self.stage.theta.data.copy_(self.outer.phi)
        self.stage.hold(self.stage.theta, self.outer.phi)
        counters = state.inner_steps, state.gradient_norm, state.bump_steps
        self.stage.loaded(*counters, fresh=sections.outer_alone)
        self._anew()

    @torch.no_grad()
    def place_weights(self, name: str, first: int, values: WireTensor) -> None:
        values_flat = decode(values).view(-1)
        check_finite(values_flat, f"weights of {name}")
        if self.stage.frozen is not None:
            self.stage.frozen.place(name, first, values_flat)
            return
        self.stage.named(self.stage.theta)[name].view(-1)[first : first + values_flat.numel()].copy_(values_flat)

    @torch.no_grad()
    def weights_placed(self) -> None:
        if self.stage.frozen is not None:
            self.stage.touched()
            return
        self._begin_anew(raised=False)

    @property
    def undrawn(self) -> bool:
        return self.stage.undrawn

    def draw_weights(self) -> None:
        self.stage.draw_weights()
        self.outer.reset(self.stage.theta)
        if self.tied is not None:
            self.tied.begin()
        self._anew()

    def sizes_of(self, stage: int) -> dict[str, int]:
        return section_sizes(self.stage.manifest, self._parts()[stage])

    def ends_of(self, stage: int) -> tuple[int, int]:
        """(first element, count) of the embedding or head of `stage`; count 0 for an inner stage, and if the base
        model has them."""
        if from_base(self.stage.manifest):
            return 0, 0
        return checkfree.ends(self.stage.manifest.model, self._parts()[stage])

    def apart(self, one: memoryview | bytes, other: memoryview | bytes) -> float:
        return apart(one, other)

    @torch.no_grad()
    def rebuild(self, method: str, neighbours: Sequence[Neighbour], ends: memoryview | None) -> None:
        """Rebuild from neighbours (keep/recovery/checkfree.py). Raises RemoteFault, with nothing changed."""
        tensors: dict[int, Tensor] = {}
        for one in neighbours:
            tensors[one.stage] = decode_flat(
                one.phi, self.sizes_of(one.stage)["phi"], f"slow weights of {stage_name(one.stage)}"
            )
        norms = {one.stage: one.gradient_norm for one in neighbours}
        manifest = self.stage.manifest
        stage = self.stage.part.stage
        flat = checkfree.rebuild(manifest.model, self._parts(), stage, method, tensors, norms)
        first, count = self.ends_of(stage)
        if count and ends is None and self.undrawn:
            self.draw_weights()
        if count and ends is None:  # no neighbour kept them: use the values drawn from the seed
            flat[first : first + count] = self.stage.theta[first : first + count]
        elif count:
            assert ends is not None
            flat[first : first + count] = decode_flat(ends, count, f"embedding or head of {stage_name(stage)}")
        self.stage.theta.copy_(flat)
        self._begin_anew()
        if self.tied is not None and ends is not None:
            self.tied.begin(known=False)

    @torch.no_grad()
    def restart(self) -> None:
        self.stage.initialize()
        self._begin_anew(raised=False)

    def _begin_anew(self, *, raised: bool = True) -> None:
        self.stage.hold(self.stage.theta)
        self.outer.reset(self.stage.theta)
        if self.tied is not None:
            self.tied.begin()
        self.stage.begin_anew(raised=raised)
        self._anew()

    def _anew(self) -> None:
        """Other weights are here: what was gathered of the former ones is of no use."""
        if self.average is not None:
            self.average.forget()

    @torch.no_grad()
    def table_part(self) -> WireTensor:
        assert self.tied is not None
        return encode(self.tied.read(0, len(self.tied)).to(torch.float16))

    @torch.no_grad()
    def take_table(self, other: WireTensor) -> bool:
        assert self.tied is not None
        if other.dtype != "f16" or tuple(other.shape) != (len(self.tied),):
            raise RemoteFault(f"a tied table of {other.shape} {other.dtype[:8]}; ours has {len(self.tied)} f16")
        theirs = decode(other)
        check_finite(theirs, "the other end's part of the tied table")
        if self.outer.round is not None:
            return False
        self.stage.stash.before_step(inner=False)
        self.tied.take(theirs)
        return True

    def _parts(self) -> tuple[StageLayers, ...]:
        return stages_of(self.stage.manifest)

    def _parts_of_state(self) -> dict[str, Part]:
        """The live buffers of the run's sections."""
        slow = self.outer
        moments = self.stage.moments
        parts: dict[str, Part] = {"theta": self.stage.theta.data, "phi": slow.phi, "momentum": slow.momentum, **moments}
        if self.tied is not None:
            parts["table"] = self.tied
        return {name: parts[name] for name in SECTIONS if name in parts and len(parts[name])}

    def _check_stray(self, given: GivenState) -> None:
        """Raises RemoteFault if weights were trained in another subspace than this run's, or in none."""
        if (subspace := self.stage.subspace) is None:
            return
        for section in ("theta", "phi") if "theta" in given.sections else ("phi",):
            if (name := subspace.stray(given.by_name(section, self.stage.shapes))) is not None:
                raise RemoteFault(f"state whose {name} is not in this run's subspace: was it trained in another run?")

"""A replica's arithmetic: forward, backward, loss and inner step of a stage on flat buffers.

Gradients are those of the summed loss of the counted targets, over T. They flow between stages and add up in `grad` in
this form. The inner step divides by the targets counted, over T, which equals the samples accumulated if all count. So
every step is on the mean over counted targets, however they are distributed over microbatches.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swarmnode.base.errors import Busy, LocalFault
from swarmnode.base.ids import stage_name
from swarmnode.base.ports import LossResult, StepReport, Tape, WireTensor
from swarmnode.base.work import Work
from swarmnode.model.adapter import has_adapters, initial_adapter, trained_shapes
from swarmnode.model.backprop import Backprop, ForwardGraph
from swarmnode.model.boundary_code import decode_boundary, encode_boundary
from swarmnode.model.decoder import Decoder
from swarmnode.model.device import give_back, half_dtype, tried, twice
from swarmnode.model.inner_optimizer import IncomingNorms, optimizer_of, sections_of
from swarmnode.model.memory_budget import GraphMemory, Passes
from swarmnode.model.optimizer import corrected_ema, learning_rate
from swarmnode.model.split import TABLE, StageLayers, initial, stages_of
from swarmnode.model.stage_input import InputReader, StageInput
from swarmnode.model.tensor import to_device
from swarmnode.model.turn import WHOLE, Turn
from swarmnode.model.weight_stash import WeightStash, WeightVersion, WorkingCopy, WorkingVersion, instead
from swarmnode.run.manifest import Manifest, boundary_codes

if TYPE_CHECKING:
    from swarmnode.model.frozen import FrozenParameters
    from swarmnode.model.subspace import Subspace


@dataclass(slots=True, eq=False, weakref_slot=True)
class StageTape:
    """A forward's input as it arrived, the weights it used, and its graph while that is kept."""

    kept: StageInput
    graph: ForwardGraph | None
    weights: WeightVersion | WorkingVersion | None
    version: int
    graph_nbytes: int

    @property
    def output(self) -> Tensor | None:
        """The graph's output, while it is kept."""
        return None if self.graph is None else self.graph.output

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes + (self.graph_nbytes if self.graph is not None else 0)


Draw = Callable[[str, tuple[int, ...]], Tensor]


def drawing(manifest: Manifest) -> Draw | None:
    """The function that draws a trained parameter, by its name and shape; None if a base model has its values."""
    if has_adapters(manifest):
        return partial(initial_adapter, manifest)
    return None if manifest.base.index else partial(initial, manifest.model, manifest.seed)


def stage_module(
    manifest: Manifest, part: StageLayers, device: torch.device, dtype: torch.dtype, trained: Mapping[str, Tensor]
) -> tuple[Decoder, FrozenParameters | None]:
    """(the layers of `part`, with `trained` as its parameters; the frozen ones beside adapters)."""
    with torch.device("meta"):
        module = Decoder(manifest.model, part)
    frozen = None
    if has_adapters(manifest):
        from swarmnode.model.frozen import FrozenParameters

        frozen = FrozenParameters(module, manifest, part, device, dtype, trained)
        if not manifest.base.index:
            frozen.fill(partial(initial, manifest.model, manifest.seed))
    else:
        module.load_state_dict(trained, assign=True)
    for name in ("cos", "sin"):
        module.register_buffer(name, module.get_buffer(name).to(device, dtype), persistent=False)
    return module, frozen


def attach_gradients(module: Decoder, gradients: Mapping[str, Tensor], frozen: str | None) -> None:
    """Let the gradients of `module` add up in `gradients`, by parameter name; others, and `frozen`, are not trained."""
    for name, parameter in module.named_parameters():
        parameter.grad = gradients.get(name)
        parameter.requires_grad_(name != frozen and name in gradients)


BUMP = 0.1
BUMP_STEPS = 500
"""A rebuilt stage learns at 1.1 of the rate, which decays back over so many inner steps (the factor: CheckFree, arXiv
2506.15461; the decay: guess)."""


class StageReplica:
    """The stage `stage` of `manifest` on `device`, freshly initialised from the manifest's seed; zeros in a run that
    starts from a base model, whose weights come later.

    All trained parameters are views of `theta` (matrices, then vectors: `adapter.trained_shapes`), their gradients of
    `grad`. The optimizer's first moments `exp_avg` have the same layout, [N] all three; the second, `exp_avg_sq` [Q],
    exist for elements stepped by AdamW (section.py). All are in `dtype` and may be written in place on the compute
    thread; call `touched` afterwards. Frozen weights are the module's own (frozen.py). With `autocast`, matrices
    multiply in bfloat16.
    """

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        autocast: bool = False,
        optimizer_state: str = "device",
        draw: bool = True,
    ) -> None:
        """`optimizer_state`: as `--optimizer-state` (moments.py). Without `draw` the weights are zeros until
        `draw_weights`, or until a state is loaded."""
        self.manifest = manifest
        self.part = stages_of(manifest)[stage]
        self.device = torch.device(device)
        self.shapes = trained_shapes(manifest, self.part)
        self.theta = torch.zeros(sum(map(math.prod, self.shapes.values())), dtype=dtype, device=self.device)
        self.grad = torch.zeros_like(self.theta)
        self.undrawn = not draw and not manifest.base.index and not has_adapters(manifest)
        if not self.undrawn:
            self.initialize()
        self.subspace: Subspace | None = None
        if manifest.pipeline.boundary == "subspace":
            from swarmnode.model.subspace import Subspace

            self.subspace = Subspace.of(manifest, self.device, dtype)
            self.subspace.constrain_(self.named(self.theta))
        self.module, self.frozen = stage_module(manifest, self.part, self.device, dtype, self.named(self.theta))
        attach_gradients(self.module, self.named(self.grad), TABLE if self.subspace is not None else None)
        copied = self.frozen is None and WorkingCopy.possible(self.device, autocast=autocast)
        self.backprop = Backprop(
            self.module,
            self.part,
            self.subspace,
            self.device,
            dtype,
            autocast=autocast,
            memory=GraphMemory(manifest, self.part, dtype.itemsize, autocast, self.device.type, copied),
        )
        self._tapes: weakref.WeakSet[StageTape] = weakref.WeakSet()  # with a graph
        flats = self.shapes, self.theta, self.grad, self.subspace
        self._optimizer = optimizer_of(manifest, *flats, autocast=autocast, state=optimizer_state)
        if optimizer_state == "device":
            self.exp_avg = self._optimizer.exp_avg
            self.exp_avg_sq = self._optimizer.exp_avg_sq
        self.moments = sections_of(self._optimizer, self.parameters)
        self.inner_steps = 0
        self.moments_since = 0  # inner steps when the moments began: AdamW corrects their bias by their age
        self.gradient_norm = 0.0
        self.version = 0  # grows with `touched`
        stashed = torch.bfloat16 if autocast else dtype
        predicts = manifest.pipeline.predicts_weights
        self.stash: WeightStash | WorkingCopy = WeightStash(self.theta, stashed, predicts)
        if copied:
            dtype = half_dtype(self.device)
            watch = self.backprop.watch
            self.stash = WorkingCopy(self.module, self.shapes, self.theta, self.named(self.grad), dtype, watch)
        self.recomputed = 0  # tapes run forward again
        self.bump_steps = 0  # inner steps left at a raised rate
        self.accumulated: int = 0  # samples whose gradient waits for the next inner step
        self._weight = 0.0  # of the accumulated gradient: as `_weight_of`
        self.unsettled: tuple[int, float] | None = None  # samples and weight of a backward with something left to add
        self.incoming = IncomingNorms()
        self.codes = boundary_codes("fp64" if dtype == torch.float64 else manifest.pipeline.boundary)
        self._reader = InputReader(manifest, self.part, self.codes[0], self.device)

    def initialize(self) -> None:
        """Set theta to the values that the run begins with, drawn from its seed. Weights of a base model stay as they
        are: a node places them, or loads a state."""
        if (draw := drawing(self.manifest)) is None:
            return
        for name, view in self.named(self.theta).items():
            view.copy_(draw(name, self.shapes[name]))

    def draw_weights(self) -> None:
        """Set the weights drawn from the manifest's seed: a replica made without them begins the run."""
        self.initialize()
        self.hold(self.theta)
        self.undrawn = False
        self.touched()

    def hold(self, *flats: Tensor) -> None:
        """Restore the constraints on weights [N] written from outside: with a subspace boundary, project writers into
        its span and reset the token table; else do nothing."""
        if self.subspace is not None:
            for flat in flats:
                self.subspace.constrain_(self.named(flat))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """`flat` [N], in theta's layout, as views by parameter name."""
        assert flat.shape == self.theta.shape, flat.shape
        pieces = torch.split(flat, [math.prod(shape) for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    @property
    def parameters(self) -> int:
        """Elements in the flat buffer."""
        return self.theta.numel()

    def touched(self) -> None:
        """Invalidate tapes, because theta was written from outside and not by a step."""
        self.version += 1
        self.stash.clear()
        self.incoming.forget()

    @contextlib.contextmanager
    def instead(self, flat: Tensor) -> Iterator[None]:
        """Context in which theta [N] has the values of `flat` [N]; tapes find it restored."""
        self.stash.on_weights_written()
        try:
            with instead(self.theta, flat):
                yield
        finally:
            self.stash.on_weights_written()

    def discard(self) -> None:
        """Drop the gradient accumulated so far: it belongs to other weights."""
        self.grad.zero_()
        self.accumulated = 0
        self._weight = 0.0

    def begin_anew(self, *, raised: bool = True) -> None:
        """Other weights are here: fresh AdamW, no gradient, and if `raised` a higher rate for BUMP_STEPS steps."""
        self.loaded(0, 0.0, BUMP_STEPS if raised else 0, fresh=True)

    def loaded(self, inner_steps: int, gradient_norm: float, bump_steps: int, *, fresh: bool) -> None:
        """Weights after `inner_steps` steps are here, and their moments unless those begin `fresh`."""
        for section in self.moments.values() if fresh else ():
            section.zero_()
        if self.subspace is not None and not fresh:  # first moments, too, keep writers in the span
            self.subspace.project_moments(self.moments["exp_avg"], self.shapes)
        self.undrawn = False
        self.moments_since = inner_steps if fresh else 0
        self.inner_steps = inner_steps
        self.gradient_norm = gradient_norm
        self.bump_steps = bump_steps
        self.discard()
        self.touched()

    # A microbatch

    def forward(
        self, x: WireTensor, *, keep: bool, graph: bool = True, tokens: WireTensor | None = None, late: bool = False
    ) -> tuple[WireTensor, Tape | None]:
        """All stages but the last: the activations for the next stage, and with `keep` a tape for `backward`; without
        `graph` the tape holds only its input. `tokens` [B, T+1] are read if the boundary is a subspace. If `late`, the
        weights are those that the next step should leave.

        Raises RemoteFault if x has the wrong dtype or shape, token ids out of range, NaN or Inf.
        """
        assert not self.part.has_head, "the last stage has a loss"
        kept = self._reader.read(x, tokens)
        by_layer = self.backprop.passes(kept.samples) != Passes(kept.samples, False)
        graph = graph and (not by_layer or self.backprop.keeps_graph(kept.samples))
        self.stash.refresh()
        version = self.stash.ahead() if late else self.stash.today()
        with self.stash.back(version):  # type: ignore[arg-type]
            made = self.backprop.run(kept, train=keep and graph, by_layer=by_layer)
        y = encode_boundary(made.output, self.codes[0])
        if not keep:
            return y, None
        if not graph:
            return y, StageTape(kept, None, version, self.version, 0)
        nbytes = self.backprop.memory.tape_nbytes(kept.samples, by_layer, kept.filled)
        tape = StageTape(kept, made, version, self.version, nbytes)
        self._tapes.add(tape)
        return y, tape

    def relieve(self) -> None:
        """Memory has run out: drop all graphs, which backward makes again, and allow graphs half the memory."""
        for tape in list(self._tapes):
            self.release(tape)
        self.backprop.halve(self.manifest.inner.microbatch)
        give_back(self.device)

    @property
    def held_nbytes(self) -> int:
        """Bytes of older weights."""
        return self.stash.nbytes

    def give_up(self) -> None:
        """Leave the microbatch in work. If its gradient is partly counted, drop all that is accumulated."""
        if self.backprop.progress.begun:
            self.discard()
        self.unsettled = None
        self.backprop.restart()

    def release(self, tape: Tape) -> None:
        """Drop all of the tape but its input to save memory; `backward` then recomputes."""
        assert isinstance(tape, StageTape)
        tape.graph = None

    def backward(self, tape: Tape, gradient: WireTensor, samples: int, *, accumulate: bool = True) -> WireTensor | None:
        """Accumulate this stage's gradient and return that of its input (None for the first stage). Consumes the tape.
        With accumulate=False only the input's gradient is computed.

        A gradient much longer than usual is clipped first (gradient_clip.py). A released tape is recomputed. The
        weights of the forward are used, whatever steps came since (weight_stash.py); if theta was loaded from
        elsewhere, the tape is recomputed with the current ones. Raises RemoteFault for a bad gradient, before anything
        is accumulated.
        """
        assert isinstance(tape, StageTape)
        self._reader.check_samples(samples, tape.kept.x)
        shape = (samples, self.manifest.model.context, self._reader.width)
        what = f"gradient for {self._reader.name}"
        dy = decode_boundary(gradient, self.codes[1], shape, what, self.device)
        weight = self._weight_of(tape.kept)
        there = to_device(dy, self.device)
        if (factor := self.incoming.factor(there, weight, learn=accumulate)) < 1.0:
            there = there * factor
        weights = tape.weights
        if tape.version != self.version:
            self.release(tape)
            weights = None
        with self.stash.back(weights):  # type: ignore[arg-type]  # as this stash gave it
            self.stash.refresh()
            held = tape.graph
            self.recomputed += held is None
            self.release(tape)
            self._sound(input_gradient := self.backprop.backward(tape.kept, there, held, accumulate=accumulate))
            wire_gradient = None if input_gradient is None else encode_boundary(input_gradient, self.codes[1])
        tape.weights = None
        self._over(samples, weight, accumulate=accumulate)
        return wire_gradient

    def _over(self, samples: int, weight: float, *, accumulate: bool) -> None:
        """A backward of `samples` samples of `weight` has made the input's gradient."""
        self.unsettled = (samples, weight) if accumulate else (0, 0.0)
        if not self.backprop.input_first:
            self.settle()

    def settle(self) -> None:
        """Add the gradients of weights that the last backward has left, and count its samples."""
        if self.unsettled is None:
            return
        if self.backprop.matrices is not None:
            self.backprop.matrices.add()
        samples, weight = self.unsettled
        self.backprop.restart()
        self.unsettled = None
        self.accumulated += samples
        self._weight += weight

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        """Last stage: summed cross entropy of the counted ones of the B · T next tokens; with `train` also backward,
        accumulated at once unless accumulate=False.

        A single stage reads its input from `x` like the first: tokens. Raises RemoteFault for bad x or tokens, and
        LocalFault if the loss is not finite although x is (theta has diverged).
        """
        assert self.part.has_head, "only the last stage has a loss"
        kept = self._reader.read(x, tokens)
        targets = self._reader.targets(tokens)
        self._reader.check_samples(samples, kept.x)
        self._reader.check_samples(samples, targets)
        self.stash.refresh()
        share = 1.0 / self.manifest.model.context
        loss_sum, gradient = self.backprop.loss(kept, targets, share, train=train, accumulate=accumulate)
        value = float(loss_sum)
        if not math.isfinite(value):
            self.give_up()
            raise LocalFault(
                f"{stage_name(self.part.stage)}: the loss is {value} on a finite input: theta has diverged"
            )
        self._sound(gradient)
        wire_gradient = None if gradient is None else encode_boundary(gradient, self.codes[1])
        self._over(samples, self._weight_of(kept), accumulate=train and accumulate)
        return LossResult(value, kept.counted, wire_gradient)

    def compared(self, tensor: WireTensor, samples: int) -> Tensor:
        """An activation or gradient of `samples` samples, in main memory. Raises RemoteFault for a malformed one."""
        shape = (samples, self.manifest.model.context, self._reader.width)
        code = self.codes[1] if tensor.codec == self.codes[1] else self.codes[0]
        return decode_boundary(tensor, code, shape, "tensor compared")

    @property
    def gathered(self) -> Work:
        """The work behind the gradient that waits for the next inner step."""
        context = self.manifest.model.context
        return Work.of(self.accumulated, context, round(self._weight * context))

    def gather(self, work: Work) -> None:
        """`work` is behind that gradient from now on."""
        self.accumulated = work.samples
        self._weight = work.targets / self.manifest.model.context

    def _weight_of(self, kept: StageInput) -> float:
        """Samples that a microbatch's counted targets amount to."""
        return kept.counted / self.manifest.model.context

    # An inner step

    def step(self, samples_total: int, batch: float = math.inf, averaged: int = 1, turn: Turn = WHOLE) -> StepReport:
        """Take one optimizer step of the rows in `turn` on the accumulated mean gradient, clipped to c / sqrt(S). The
        learning rate follows `samples_total`; if more samples were accumulated than the `batch` it is meant for, it
        grows by the root of the ratio (arXiv 2205.10287, section 4), and by the root of `averaged`, the replicas whose
        steps are averaged.

        Raises LocalFault if the gradient is not finite: theta has diverged. The gradient is dropped."""
        assert self.accumulated > 0, "an inner step needs a gradient"
        samples = self.accumulated
        self.accumulated = 0
        weight = self._weight or 1.0  # if no target counted, the gradient is zero
        self._weight = 0.0
        try:
            norm = twice(lambda: self._clip_mean(weight), self.relieve, "an inner step")
        except Busy:
            self.discard()
            return StepReport(self.inner_steps, self.gradient_norm, 0.0, samples)
        if not math.isfinite(norm) and self._overflowed():
            return StepReport(self.inner_steps, self.gradient_norm, 0.0, samples)
        if not math.isfinite(norm):
            self.grad.zero_()
            raise LocalFault(
                f"{stage_name(self.part.stage)}: gradient norm {norm} in inner step {self.inner_steps + 1}"
            )
        rate = learning_rate(self.manifest.inner, samples_total) * (1.0 + BUMP * self.bump_steps / BUMP_STEPS)
        rate *= math.sqrt(max(1.0, samples / batch) * averaged)
        self.bump_steps = max(0, self.bump_steps - 1)
        self.stash.before_step()
        before = self.inner_steps - self.moments_since
        if not tried(lambda: self._optimizer.step(before, rate, turn))[0]:
            self.relieve()
            tried(lambda: self._optimizer.finish(before, rate))  # where that fails, matrices miss this step
        self.grad.zero_()
        self.inner_steps += 1
        self.gradient_norm = corrected_ema(self.gradient_norm, norm, self.inner_steps)
        return StepReport(self.inner_steps, norm, rate, samples)

    @contextlib.contextmanager
    def stepping_by(self, mean: Tensor) -> Iterator[None]:
        """Context in which an inner step is by the gradient `mean` [N], which is overwritten; what is gathered
        stays."""
        gathered = self.grad
        kept = self.gathered
        if self.backprop.scale != 1.0:
            mean.mul_(self.backprop.scale)
        self.grad = mean
        self.gather(Work.of(1, self.manifest.model.context, self.manifest.model.context))  # a mean already
        self._optimizer.use(mean)
        try:
            yield
        finally:
            self.grad = gathered
            self._optimizer.use(gathered)
            self.gather(kept)

    def views(self, flat: Tensor, turn: Turn) -> list[Tensor]:
        """The parts of `flat` [N], in theta's layout, that an inner step of `turn` moves."""
        return self._optimizer.views(flat, turn)

    def _overflowed(self) -> bool:
        """Whether a gradient may have left float16's range: then it is dropped, and later ones are scaled half as
        much."""
        if self.backprop.scale == 1.0:
            return False
        self.discard()
        self.backprop.scale_less()
        return True

    def _sound(self, gradient: Tensor | None) -> None:
        """Raises Busy if the gradient of an input has left float16's range; nothing of the microbatch is counted."""
        if gradient is not None and self.backprop.scale != 1.0 and not bool(torch.isfinite(gradient).all()):
            self.give_up()
            self._overflowed()
            raise Busy(f"{stage_name(self.part.stage)}: a gradient left float16's range; it is scaled less from now on")

    def _clip_mean(self, weight: float) -> float:
        """Make `grad` the mean over `weight` samples, in the span and clipped; returns its norm before clipping."""
        if self.subspace is not None:
            self.subspace.project_(self.named(self.grad))
        inner = self.manifest.inner
        stages = self.manifest.pipeline.stages
        return self._optimizer.clip_mean(weight * self.backprop.scale, inner.clip_norm / math.sqrt(stages))

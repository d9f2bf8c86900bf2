"""One replica's arithmetic: forward, backward, loss and inner step of a stage on flat buffers.

Gradients are those of the sum over samples of each sample's mean loss over its T tokens. They flow between stages and
add up in `grad` as such; the inner step divides by the samples accumulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.errors import LocalFault, RemoteFault
from swarmnode.manifest import Manifest, boundary_width
from swarmnode.model.boundary import decode_boundary, encode_boundary
from swarmnode.model.incoming import IncomingNorms
from swarmnode.model.llama import Llama, initial
from swarmnode.model.memory import graph_nbytes
from swarmnode.model.muon import FlatMuon, Matrix
from swarmnode.model.optimizer import FlatAdamW, Span, corrected_ema
from swarmnode.model.schedule import learning_rate
from swarmnode.model.section import Stepped, stepped
from swarmnode.model.split import TABLE, is_writer, parameter_shapes, split
from swarmnode.model.stash import Stash, Weights, instead
from swarmnode.model.subspace import Subspace
from swarmnode.model.tensor import cosine, decode_tokens
from swarmnode.ports import LossResult, StepReport, Tape, WireTensor

BUMP, BUMP_STEPS = 0.1, 500
"""A rebuilt stage learns at 1.1 of the rate, which decays back over so many inner steps (CheckFree, arXiv 2506.15461:
the factor; the decay: design section 7)."""


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """What a stage reads: token ids [B, T], or activations [B, T, D] or [B, T, k]; then `tokens` [B, T] go with them
    where the boundary is a subspace."""

    x: Tensor
    tokens: Tensor | None = None

    @property
    def samples(self) -> int:
        return self.x.shape[0]

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + (0 if self.tokens is None else self.tokens.nbytes)


@dataclass(slots=True, eq=False)
class StageTape:
    """A forward's input as it arrived, what it was made with, and its graph while it is kept."""

    kept: Input
    output: Tensor | None
    leaf: Tensor | None
    weights: Weights | None
    version: int
    graph_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes + (self.graph_nbytes if self.output is not None else 0)


@dataclass(slots=True)
class Probe:
    """A microbatch and what tells how good a stage's output on it is."""

    kept: Input
    wanted: Tensor  # the gradient of the output, or on the last stage the next tokens [B, T]

    def value(self, output: Tensor) -> float:
        """Nats per token, up to what does not depend on this stage's weights."""
        if self.wanted.is_floating_point():
            return float((self.wanted.double() * output.double()).sum()) / len(self.wanted)
        return float(F.cross_entropy(output.flatten(0, 1).float(), self.wanted.flatten()))


class StageReplica:
    """The stage `stage` of `manifest` on `device`, freshly initialised from the manifest's seed.

    All parameters are views of `theta` (matrices, then norms: `split.parameter_shapes`), their gradients of `grad`; the
    optimizer's first moments `exp_avg` are flat alike, [N] all three; the second, `exp_avg_sq` [Q], are those of what
    AdamW steps (section.py). All are in `dtype` and may be written in place on the compute thread, after which
    `touched` must be called. With `autocast`, matrices multiply in bfloat16.
    """

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        autocast: bool = False,
    ) -> None:
        self.manifest = manifest
        self.part = split(manifest.model, manifest.pipeline.stages)[stage]
        self.device = torch.device(device)
        self.shapes = parameter_shapes(manifest.model, self.part)
        self.theta = torch.empty(self.part.parameters, dtype=dtype, device=self.device)
        self.grad = torch.zeros_like(self.theta)
        for name, view in self.named(self.theta).items():
            view.copy_(initial(manifest.model, manifest.seed, name, self.shapes[name]))
        self.subspace: Subspace | None = None
        if manifest.pipeline.boundary == "subspace":
            self.subspace = Subspace.of(manifest, self.device, dtype)
            self.subspace.constrain_(self.named(self.theta))
        self.module = self._module(dtype)
        self._autocast = autocast
        self._optimizer = self._made_optimizer()
        self.exp_avg = self._optimizer.exp_avg
        self.exp_avg_sq = self._optimizer.exp_avg_sq
        self.inner_steps = 0
        self.gradient_norm = 0.0
        self.version = 0  # grows with `touched`
        self.stash = Stash(self.theta, torch.bfloat16 if autocast else dtype)
        self.recomputed = 0  # tapes run forward again
        self.bump_steps = 0  # inner steps left at a higher rate
        self._accumulated = 0
        self.keeps_probe = False  # the last microbatch trained is kept for `probe`
        self._probe: Probe | None = None
        self.incoming = IncomingNorms()
        self._boundary = "fp64" if dtype == torch.float64 else manifest.pipeline.boundary

    def _module(self, dtype: torch.dtype) -> Llama:
        """The stage's layers, their parameters views of theta and their gradients of grad."""
        with torch.device("meta"):
            module = Llama(self.manifest.model, self.part)
        module.load_state_dict(self.named(self.theta), assign=True)
        module.cos = module.cos.to(self.device, dtype)
        module.sin = module.sin.to(self.device, dtype)
        gradients = self.named(self.grad)
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name]
            if self.subspace is not None and name == TABLE:
                parameter.requires_grad_(False)
        return module

    def _made_optimizer(self) -> FlatAdamW | FlatMuon:
        """The manifest's optimizer. Matrices decay; where the stream is kept in a subspace, the token table stays as it
        is and writers stay in the span."""
        inner = self.manifest.inner
        first = 0
        spans: list[Span] = []
        matrices: list[Matrix] = []
        shared: list[tuple[int, tuple[int, ...]]] = []
        for name, shape in self.shapes.items():
            last = first + math.prod(shape)
            match stepped(self.manifest, name, shape):
                case Stepped.MUON:
                    matrices.append(Matrix(first, shape, self.subspace is not None and is_writer(name)))
                case Stepped.SHARED:
                    shared.append((first, shape))
                case Stepped.ADAMW if spans and spans[-1].last == first and spans[-1].decays == (len(shape) > 1):
                    spans[-1] = Span(spans[-1].first, last, len(shape) > 1)
                case Stepped.ADAMW:
                    spans.append(Span(first, last, len(shape) > 1))
            first = last
        theta = self.theta.data  # autograd is not told of steps: `backward` sees to it that theta is the graph's
        if inner.optimizer == "muon":
            subspace, autocast = self.subspace, self._autocast
            return FlatMuon(theta, self.grad, inner, matrices, spans, subspace=subspace, autocast=autocast)
        return FlatAdamW(theta, self.grad, inner, spans, shared=shared, rank=boundary_width(self.manifest))

    def hold(self, *flats: Tensor) -> None:
        """Put weights [N] that were written from outside back where they belong: where the stream is kept in a
        subspace, writers into its span and the token table as it was; elsewhere nothing is to be done."""
        if self.subspace is not None:
            for flat in flats:
                self.subspace.constrain_(self.named(flat))

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """`flat` [N], laid out as theta is, as views by parameter name."""
        assert flat.shape == (self.parameters,), flat.shape
        pieces = torch.split(flat, [math.prod(shape) for shape in self.shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}

    @property
    def parameters(self) -> int:
        """Elements in the flat buffer."""
        return self.part.parameters

    @property
    def accumulated(self) -> int:
        """Samples whose gradient waits for the next inner step."""
        return self._accumulated

    def touched(self) -> None:
        """Theta was written from outside, and not by a step: tapes made before are stale."""
        self.version += 1
        self.stash.clear()
        self.incoming.forget()

    def discard(self) -> None:
        """Drop the gradient accumulated so far: it belongs to other weights."""
        self.grad.zero_()
        self._accumulated = 0

    def moments_loaded(self) -> None:
        """First moments were written from outside: they, too, keep writers in the span."""
        if self.subspace is not None:
            self.subspace.project_(self.named(self.exp_avg))

    def begin_anew(self) -> None:
        """Theta was rebuilt: fresh AdamW, no gradient, and a higher learning rate for the next BUMP_STEPS steps."""
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()
        self.inner_steps, self.gradient_norm, self.bump_steps = 0, 0.0, BUMP_STEPS
        self.discard()
        self.touched()

    # A microbatch

    def _input(self, x: WireTensor, tokens: WireTensor | None) -> Input:
        """What this stage reads, checked: token ids int64, or activations as they travel."""
        model, what = self.manifest.model, f"input of stage {self.part.stage}"
        if self.part.has_embedding:
            ids = decode_tokens(x, model.context, model.vocabulary, what)[:, :-1]
            return Input(ids)
        shape = (None, model.context, boundary_width(self.manifest))
        found = Input(decode_boundary(x, self._boundary, shape, what))
        if self.subspace is None:
            return found
        assert tokens is not None, "a stream in a subspace needs its tokens"
        ids = decode_tokens(tokens, model.context, model.vocabulary, f"tokens of stage {self.part.stage}")[:, :-1]
        self._check_samples(found.samples, ids)
        return Input(found.x, ids)

    def _run(self, kept: Input, *, train: bool) -> tuple[Tensor, Tensor]:
        """(input, output) as they travel, with a graph when training; the input is then a leaf that wants a gradient,
        unless it is token ids."""
        leaf = kept.x.to(self.device) if self.part.has_embedding else kept.x.to(self.device, self.theta.dtype)
        if train and not self.part.has_embedding:
            leaf = leaf.detach().requires_grad_()
        ids = leaf if kept.tokens is None else kept.tokens.to(self.device)
        with torch.set_grad_enabled(train):
            x = leaf if self.subspace is None or self.part.has_embedding else self.subspace.up(leaf, ids)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
                y = self.module(x)
            if self.subspace is not None and not self.part.has_head:
                y = self.subspace.down(y, ids)
        return leaf, y

    def _to_wire(self, tensor: Tensor) -> WireTensor:
        return encode_boundary(tensor, self._boundary)

    def forward(
        self, x: WireTensor, *, keep: bool, graph: bool = True, tokens: WireTensor | None = None
    ) -> tuple[WireTensor, Tape | None]:
        """Not the last stage: the activations for the next one, and with `keep` a tape for `backward`, which without
        `graph` holds no more than its input. `tokens` [B, T+1] are looked at where the boundary is a subspace.

        Raises RemoteFault when x has the wrong dtype or shape, token ids out of range, NaN or Inf.
        """
        assert not self.part.has_head, "the last stage has a loss, not a forward"
        kept = self._input(x, tokens)
        leaf, output = self._run(kept, train=keep and graph)
        y = self._to_wire(output)
        if not keep:
            return y, None
        if not graph:
            return y, StageTape(kept, None, None, self.stash.today(), self.version, 0)
        model, count = self.manifest.model, kept.samples * self.manifest.model.context
        width = boundary_width(self.manifest)
        nbytes = graph_nbytes(model, self.part, count, width, self.theta.itemsize, self._autocast)
        return y, StageTape(kept, output, leaf, self.stash.today(), self.version, nbytes)

    def release(self, tape: Tape) -> None:
        """Drop what the tape holds except its input, so that `backward` recomputes (memory bound)."""
        assert isinstance(tape, StageTape)
        tape.output = tape.leaf = None

    def backward(self, tape: Tape, gradient: WireTensor, samples: int, *, accumulate: bool = True) -> WireTensor | None:
        """Accumulate this stage's gradient; return that of its input (None for the first stage). The tape is spent.
        Without `accumulate` only the input's gradient is computed.

        One much longer than usual is clipped first (incoming.py). A released tape is recomputed. All is done with the
        weights of the forward, whatever steps came between (stash.py); when theta was loaded from elsewhere, a tape is
        recomputed with today's. Raises RemoteFault for a bad gradient, before anything is accumulated.
        """
        assert isinstance(tape, StageTape)
        self._check_samples(samples, tape.kept.x)
        shape = (samples, self.manifest.model.context, boundary_width(self.manifest))
        dy = decode_boundary(gradient, self._boundary, shape, f"gradient for stage {self.part.stage}")
        dy = self.incoming.clipped(dy, samples, learn=accumulate)
        weights, tape.weights = tape.weights, None
        if tape.version != self.version:
            self.release(tape)
            weights = None
        with self.stash.back(weights):
            if tape.output is None or tape.leaf is None:
                tape.leaf, tape.output = self._run(tape.kept, train=True)
                self.recomputed += 1
            output, leaf = tape.output, tape.leaf
            self.release(tape)
            dy = dy.to(self.device, output.dtype)
            if not accumulate:
                if leaf.requires_grad:
                    (leaf.grad,) = torch.autograd.grad(output, leaf, dy)
                return self._input_gradient(leaf)
            if self.keeps_probe:
                self._probe = Probe(tape.kept, dy)
            torch.autograd.backward(output, dy)
        self._accumulated += samples
        return self._input_gradient(leaf)

    def loss(
        self, x: WireTensor, tokens: WireTensor, samples: int, *, train: bool, accumulate: bool = True
    ) -> LossResult:
        """Last stage: summed cross entropy of the B · T next tokens; with `train` also backward, accumulated at once
        unless told not to.

        An only stage reads its input from `x` as the first does: tokens. Raises RemoteFault for bad x or tokens, and
        LocalFault when the loss is not finite although x is (theta has diverged).
        """
        assert self.part.has_head, "only the last stage has a loss"
        model = self.manifest.model
        kept = self._input(x, tokens)
        targets = decode_tokens(tokens, model.context, model.vocabulary, "tokens of the loss")[:, 1:]
        self._check_samples(samples, kept.x)
        self._check_samples(samples, targets)
        leaf, logits = self._run(kept, train=train)
        with torch.set_grad_enabled(train):
            flat = logits.flatten(0, 1)  # (B * T, V)
            flat = flat.float() if flat.dtype == torch.bfloat16 else flat
            loss_sum = F.cross_entropy(flat, targets.to(self.device).flatten(), reduction="sum")
        value = float(loss_sum.detach())
        if not math.isfinite(value):
            raise LocalFault(f"stage {self.part.stage}: the loss is {value} on a finite input: theta has diverged")
        if not train:
            return LossResult(value, targets.numel(), None)
        share = torch.full_like(loss_sum, 1.0 / model.context)
        if not accumulate:
            if leaf.requires_grad:
                (leaf.grad,) = torch.autograd.grad(loss_sum, leaf, share)
            return LossResult(value, targets.numel(), self._input_gradient(leaf))
        if self.keeps_probe:
            self._probe = Probe(kept, targets.to(self.device))
        torch.autograd.backward(loss_sum, share)
        self._accumulated += samples
        return LossResult(value, targets.numel(), self._input_gradient(leaf))

    def cosine(self, one: WireTensor, other: WireTensor, samples: int) -> float:
        """See ports.Replica."""
        shape = (samples, self.manifest.model.context, boundary_width(self.manifest))
        return cosine(*(decode_boundary(each, self._boundary, shape, "tensor compared") for each in (one, other)))

    def probe(self, before: Tensor, after: Tensor) -> float | None:
        """Nats per token by which the loss on the last microbatch trained here changes when theta goes from `before` to
        `after`, both [N]; None when nothing was trained yet. Exact on the last stage; on others to first order,
        dL/dy · (y' - y), which for a convex loss is the least it can be. Theta is left as it was."""
        if self._probe is None:
            return None
        values = []
        for flat in (before, after):
            with instead(self.theta, flat):
                values.append(self._probe.value(self._run(self._probe.kept, train=False)[1]))
        return values[1] - values[0]

    def _check_samples(self, samples: int, kept: Tensor) -> None:
        if samples != kept.shape[0]:
            raise RemoteFault(f"stage {self.part.stage}: {samples} samples announced, {kept.shape[0]} sent")

    def _input_gradient(self, leaf: Tensor) -> WireTensor | None:
        return None if leaf.grad is None else self._to_wire(leaf.grad)

    # An inner step

    def step(self, samples_total: int, batch: float = math.inf) -> StepReport:
        """One step of the optimizer on the accumulated mean gradient, clipped to c / sqrt(S). The learning rate follows
        `samples_total`; where more samples came together than the `batch` it is meant for, it grows by the root of the
        ratio (arXiv 2205.10287, section 4).

        Raises LocalFault when the gradient is not finite (what came in was, so theta has diverged); it is dropped.
        """
        assert self._accumulated > 0, "an inner step needs a gradient"
        samples, self._accumulated = self._accumulated, 0
        if self.subspace is not None:
            self.subspace.project_(self.named(self.grad))
        clip_norm = self.manifest.inner.clip_norm / math.sqrt(self.manifest.pipeline.stages)
        norm = self._optimizer.clip_mean(samples, clip_norm)
        if not math.isfinite(norm):
            self.grad.zero_()
            raise LocalFault(f"stage {self.part.stage}: gradient norm {norm} in inner step {self.inner_steps + 1}")
        rate = learning_rate(self.manifest.inner, samples_total) * (1.0 + BUMP * self.bump_steps / BUMP_STEPS)
        rate *= math.sqrt(max(1.0, samples / batch))
        self.bump_steps = max(0, self.bump_steps - 1)
        self.stash.before_step()
        self._optimizer.step(self.inner_steps, rate)
        self.grad.zero_()
        self.inner_steps += 1
        self.gradient_norm = corrected_ema(self.gradient_norm, norm, self.inner_steps)
        return StepReport(self.inner_steps, norm, rate, samples)

"""A stage's forward and backward over a microbatch, in passes, and how much of a gradient is counted.

Memory may run out at any allocation. What was added to `grad` by then stays there and is remembered, parameter by
parameter, so that a second attempt adds the rest and nothing twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from swarmnode.data.sample import IGNORED
from swarmnode.model import memory_budget
from swarmnode.model.architecture import architecture_of
from swarmnode.model.decoder import Decoder
from swarmnode.model.device import half_dtype
from swarmnode.model.matrix_gradients import MatrixGradients, MatrixProduct
from swarmnode.model.memory_budget import GraphMemory, Passes, choose_passes
from swarmnode.model.split import StageLayers
from swarmnode.model.stage_input import StageInput
from swarmnode.model.tensor import to_device

if TYPE_CHECKING:
    from swarmnode.model.subspace import Subspace

# The summed cross entropy of a linear head, in chunks of rows, so that the logits of a microbatch never exist at once.
#
#     z = W h,   loss = sum over counted rows of (logsumexp(z) - z[target])
#     dL/dz = softmax(z) - onehot(target),   dL/dh = W^T dL/dz,   dL/dW = sum of dL/dz h^T
#
# Loss and gradients of a chunk are found while its logits are there: no logits are kept for a backward, none are
# computed twice, and rows whose target does not count are left out. [Cut cross-entropy: arXiv 2411.09009; Liger
# kernels: arXiv 2410.10989, section 3.2; here with PyTorch's own operations on any device.] The size of a chunk is that
# of memory_budget.py. One chunk takes .84 to 1.06 of autograd's time [measured: a thread, 512 to 2,048 rows,
# vocabularies of 256 to 49,152].


@dataclass(slots=True)
class HeadProgress:
    """`rows`: of a microbatch, the first rows whose part of the head's gradient is added. Where memory runs out, a
    second attempt adds the rest."""

    rows: int = 0


@dataclass(frozen=True, slots=True)
class HeadLoss:
    """`loss_sum`: a scalar in nats, on the device. `gradient` [N, D]: of `share` · loss with respect to the rows; None
    without training."""

    loss_sum: Tensor
    gradient: Tensor | None


def head_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    share: float,
    train: bool,
    progress: HeadProgress | None = None,
    autocast: torch.dtype | None = None,
) -> HeadLoss:
    """Summed cross entropy of `targets` [N], IGNORED where they do not count, under the logits x · weight^T of rows `x`
    [N, D] and the head `weight` [V, D].

    Targets may lie on the CPU: then no device is waited for to find those that count. With `train` also the gradient
    of `share` · loss by x, and with `progress` that by the weight, which is added to `weight.grad` for rows from
    `progress.rows` on. Products are in `autocast` where given, losses then in float32.
    """
    itemsize = x.itemsize if autocast is None else autocast.itemsize
    rows = memory_budget.chunk_rows(x.shape[0], weight.shape[0], itemsize, x.device.type)
    into = progress if weight.requires_grad else None
    counts = targets != IGNORED
    if bool(counts.all()):
        return _chunked(x, weight, targets.to(x.device), rows, share, train, into, autocast)
    counted = counts.nonzero().flatten()
    wanted = targets[counted].to(x.device)
    counted = counted.to(x.device)
    result = _chunked(x.detach()[counted], weight, wanted, rows, share, train, into, autocast)
    if result.gradient is None:
        return result
    return HeadLoss(result.loss_sum, torch.zeros_like(x).index_copy_(0, counted, result.gradient))


@torch.no_grad()
def _chunked(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: int,
    share: float,
    train: bool,
    progress: HeadProgress | None,
    autocast: torch.dtype | None,
) -> HeadLoss:
    """`head_loss` in chunks of `rows` rows, of which all count."""
    dtype = x.dtype if autocast is None else autocast
    head = weight.detach().to(dtype)
    exact = torch.promote_types(dtype, torch.float32)
    loss_sum = torch.zeros((), dtype=exact, device=x.device)
    gradient = torch.empty_like(x) if train else None
    add = _ProductSum(weight.grad, head) if train and progress is not None and weight.grad is not None else None
    logits = torch.empty(min(rows, x.shape[0]), head.shape[0], dtype=dtype, device=x.device)
    for start in range(0, x.shape[0], rows):
        chunk = x[start : start + rows].to(dtype)  # (R, D)
        z = torch.mm(chunk, head.T, out=logits[: chunk.shape[0]])  # (R, V)
        _softmax_minus_target(z, targets[start : start + rows], loss_sum, train=train, exact=exact)
        if gradient is None:
            continue
        here = gradient[start : start + rows]
        if dtype == x.dtype:
            torch.mm(z, head, out=here).mul_(share)
        else:
            here.copy_(z @ head).mul_(share)
        if add is not None and progress is not None and progress.rows <= start:
            add(z, chunk, share)
            progress.rows = start + chunk.shape[0]
    return HeadLoss(loss_sum, gradient)


def _softmax_minus_target(z: Tensor, targets: Tensor, loss_sum: Tensor, *, train: bool, exact: torch.dtype) -> None:
    """Add to `loss_sum` the loss of logits `z` [R, V], and with `train` replace them by the loss's gradient."""
    each = max(1, memory_budget.SOFTMAX_NBYTES // (z.shape[1] * exact.itemsize))
    for part, wanted in zip(torch.split(z, each), torch.split(targets, each), strict=True):
        logs = torch.log_softmax(part, 1, dtype=exact)
        at = wanted.unsqueeze(1)
        loss_sum.sub_(logs.gather(1, at).sum())
        if train:
            part.copy_(logs.exp_().scatter_add_(1, at, logs.new_full((), -1.0).expand_as(at)))


class _ProductSum:
    """Adds products z^T x to `into` [V, D], float32. It allocates nothing while it adds: all of a product is added, or
    none of it."""

    def __init__(self, into: Tensor, head: Tensor) -> None:
        """`head` [V, D] has the products' dtype."""
        self._into = into
        rows = max(1, memory_budget.TILE_NBYTES // (head.shape[1] * head.itemsize))
        self._tile = None if into.dtype == head.dtype else torch.empty_like(head[:rows])

    def __call__(self, z: Tensor, x: Tensor, share: float) -> None:
        """Add share · z^T x for z [R, V] and x [R, D]."""
        if self._tile is None:
            self._into.addmm_(z.T, x, alpha=share)
            return
        rows = len(self._tile)
        for tile, columns in zip(torch.split(self._into, rows), torch.split(z, rows, 1), strict=True):
            tile.add_(torch.mm(columns.T, x, out=self._tile[: len(tile)]), alpha=share)


@dataclass(slots=True)
class GradientProgress:
    """The part of a microbatch's gradient that is in `grad`: that of its first `samples`, and of the pass up to sample
    `last` (0: none has begun) that by `parameters` and by `head`. `loss_sum` and `gradient` [B, T, D], of the input,
    are those of the first samples."""

    parameters: set[int]
    accumulates: bool = False
    samples: int = 0
    last: int = 0
    head: HeadProgress = field(default_factory=HeadProgress)
    loss_sum: Tensor | None = None
    gradient: Tensor | None = None

    @property
    def begun(self) -> bool:
        """Whether anything is in `grad`."""
        return self.accumulates and bool(self.samples or self.parameters or self.head.rows)

    def passed(self) -> None:
        """The pass under way is counted as a whole."""
        self.samples = self.last
        self.last = 0
        self.parameters.clear()
        self.head = HeadProgress()


@dataclass(frozen=True, slots=True)
class ForwardGraph:
    """The graph of a forward: input, output, and the products by matrices between them, where they are noted."""

    leaf: Tensor
    output: Tensor
    products: list[MatrixProduct]


class Backprop:
    """Runs `module`, the layers of `part`, on `device`; with `autocast` in bfloat16.

    `budget`: bytes that a pass may take, by `memory`; None: any number. `progress`: of the microbatch in work. `scale`:
    parameters' gradients are so many times too long, with float16 products, whose small numbers are few [loss scaling:
    arXiv 1710.03740, section 3.2].
    """

    def __init__(
        self,
        module: Decoder,
        part: StageLayers,
        subspace: Subspace | None,
        device: torch.device,
        dtype: torch.dtype,
        *,
        autocast: bool,
        memory: GraphMemory,
    ) -> None:
        self.memory = memory
        self.budget: int | None = None
        self.scale = 1.0
        self._counted: set[int] = set()  # parameters whose gradient has been added in the pass in work, by id
        self.progress = GradientProgress(self._counted)
        self._module = module
        self._part = part
        self._subspace = subspace
        self._device = device
        self._dtype = dtype
        self._autocast = half_dtype(device) if autocast else None
        if self._autocast == torch.float16:  # derived: a token's own gradient, not over T; float16 ends at 6e-8
            self.scale = 2.0 ** round(math.log2(memory.manifest.model.context))
        self._by_layer = False
        self.input_first = False  # whether the gradients of matrices are left to `matrices.add`
        self.matrices: MatrixGradients | None = None  # where the input has a gradient, and each product is a module's
        model = memory.manifest.model
        if not part.has_embedding and not model.experts and architecture_of(model) is None:
            self.matrices = MatrixGradients(module, self._counted)
        for parameter in module.parameters():
            if parameter.requires_grad:
                self.watch(parameter)

    def watch(self, parameter: nn.Parameter) -> None:
        """Note when the gradient of `parameter`, which the module uses or will use, has been added."""
        counted = self._counted  # not self: a dropped replica must be freed at once, without the garbage collector
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda parameter: counted.add(id(parameter))
        )

    def restart(self) -> None:
        """The microbatch in work is over."""
        if self.matrices is not None:
            self.matrices.drop()
        self._counted.clear()
        self.progress = GradientProgress(self._counted)

    def passes(self, samples: int) -> Passes:
        """The passes over a microbatch of `samples`."""
        if self.budget is None:
            return Passes(samples, False)
        return choose_passes(samples, self.budget, self.memory.pass_nbytes)

    def keeps_graph(self, samples: int) -> bool:
        """Whether the graph of a forward over all `samples`, at least by layer, may wait for its backward."""
        return self.budget is None or self.memory.pass_nbytes(samples, True) <= self.budget

    def limit(self, nbytes: int) -> None:
        """Allow a pass so many bytes."""
        self.budget = nbytes

    def scale_less(self) -> None:
        """Scale gradients half as much from now on."""
        self.scale /= 2.0

    def halve(self, samples: int) -> None:
        """Allow graphs half the memory from now on; microbatches have up to `samples`."""
        if self.budget is None:
            self.budget = self.memory.pass_nbytes(samples, False)
        self.budget //= 2

    def run(self, kept: StageInput, *, train: bool, by_layer: bool = False) -> ForwardGraph:
        """The graph of the layers, empty unless training; the input is then a leaf with a gradient, unless it is token
        ids. On the last stage the output is what enters the head."""
        tokens = self._part.has_embedding
        given = to_device(kept.x, self._device)
        leaf = given if tokens else given.to(self._dtype)
        if train and not tokens:
            leaf = leaf.detach().requires_grad_()
        ids = leaf if kept.tokens is None else kept.tokens.to(self._device)
        documents = None if kept.documents is None else kept.documents.to(self._device)
        with torch.set_grad_enabled(train):
            x = leaf if self._subspace is None or tokens else self._subspace.up(leaf, ids)
            with torch.autocast(
                self._device.type, self._autocast or torch.bfloat16, enabled=self._autocast is not None
            ):
                layers = partial(self._module.hidden, x, documents, by_layer=by_layer and train)
                products: list[MatrixProduct] = []
                noted = self.input_first or not self._part.has_head  # a last stage's backward follows at once
                if self.matrices is not None and train and not by_layer and noted:
                    y, products = self.matrices.noted(layers)
                else:
                    y = layers()
            if self._subspace is not None and not self._part.has_head:
                y = self._subspace.down(y, ids)
        return ForwardGraph(leaf, y, products)

    def backward(self, kept: StageInput, dy: Tensor, held: ForwardGraph | None, *, accumulate: bool) -> Tensor | None:
        """The gradient [B, T, D] of the input of a microbatch with the gradient `dy` of its output; None for tokens.
        That of the parameters is added to theirs, unless accumulate=False; with `input_first` some may be left.
        `held`: a graph that is still there."""
        for first, last in self._spans(kept, held, accumulate=accumulate):
            self.progress.last = last
            if held is not None:
                graph = held
                held = None
            else:
                graph = self.run(self._part_of(kept, first, last), train=True, by_layer=self._by_layer)
            here = dy[first:last].to(self._device).to(graph.output.dtype)
            here = here * self.scale if self.scale != 1.0 else here
            self._differentiate(kept, graph, here, first, last, accumulate=accumulate)
        return self.progress.gradient

    def loss(
        self, kept: StageInput, targets: Tensor, share: float, *, train: bool, accumulate: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Last stage: (the summed loss of `targets` [B, T], a scalar on the device; with `train` as `backward` the
        gradient of `share` · loss)."""
        for first, last in self._spans(kept, None, accumulate=train and accumulate):
            self.progress.last = last
            graph = self.run(self._part_of(kept, first, last), train=train, by_layer=self._by_layer)
            loss_sum, dy = self.head(
                graph.output,
                targets[first:last],
                share * self.scale,
                train=train,
                progress=self.progress.head if accumulate else None,
            )
            before = self.progress.loss_sum
            total = loss_sum if before is None else before + loss_sum
            if dy is not None:
                self._differentiate(kept, graph, dy, first, last, accumulate=accumulate)
            else:
                self.progress.passed()
            self.progress.loss_sum = total
        assert self.progress.loss_sum is not None
        return self.progress.loss_sum, self.progress.gradient

    def head(
        self, hidden: Tensor, targets: Tensor, share: float, *, train: bool, progress: HeadProgress | None
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of what enters the head [B, T, D], and with `train` its gradient, of `share` · loss. With `progress`
        the head's own gradient is added, too."""
        result = head_loss(
            hidden.detach().flatten(0, 1),
            self._module.head if self._autocast else self._module.head.to(hidden.dtype),
            targets.flatten(),
            share=share,
            train=train,
            progress=progress if train else None,
            autocast=self._autocast,
        )
        return result.loss_sum, None if result.gradient is None else result.gradient.view_as(hidden)

    def _spans(self, kept: StageInput, held: ForwardGraph | None, *, accumulate: bool) -> list[tuple[int, int]]:
        """(first, last) samples of the passes that are left."""
        passes = self.passes(kept.samples)
        progress = self.progress
        progress.accumulates = accumulate
        self._by_layer = passes.by_layer
        if held is not None:
            assert not progress.begun, "a graph is only there for the first attempt"
            passes = Passes(kept.samples, False)
        broken_off = bool(progress.parameters or progress.head.rows)  # a pass: the rest of it is added first
        spans = [(progress.samples, progress.last)] if broken_off else []
        first = progress.last if broken_off else progress.samples
        return [*spans, *passes.spans(first, kept.samples)]

    def _left_for_later(self, graph: ForwardGraph, whole: bool) -> set[int]:
        """The matrices, by id, whose gradients the backward of `graph` leaves for later: those of a first attempt at a
        `whole` microbatch, where memory has room for what enters them."""
        if self.matrices is None:
            return set()
        self.matrices.drop()  # of an attempt for which memory did not last
        room = self.budget is None or self.memory.later_nbytes(graph.leaf.shape[0]) <= self.budget
        if self.input_first and whole and room and not self.progress.parameters:
            here = {id(weight) for weight in self._module.parameters()}
            later = {id(product.weight) for product in graph.products}
            if later <= here:  # else of a version that was dropped
                self.matrices.leave(graph.products)
                return later
        graph.products.clear()
        return set()

    def _part_of(self, kept: StageInput, first: int, last: int) -> StageInput:
        return kept if last - first == kept.samples else kept.part(first, last)

    def _differentiate(
        self, kept: StageInput, graph: ForwardGraph, dy: Tensor, first: int, last: int, *, accumulate: bool
    ) -> None:
        """The backward of one pass over samples [first, last), added to `progress`."""
        progress = self.progress
        whole = last - first == kept.samples
        leaf = graph.leaf
        output = graph.output
        if not whole and leaf.requires_grad and progress.gradient is None:
            progress.gradient = leaf.new_empty(kept.samples, *leaf.shape[1:])
        if accumulate:
            inputs = None
            later = self._left_for_later(graph, whole)
            if progress.parameters or later:
                done = progress.parameters | later
                left = [one for one in self._module.parameters() if one.requires_grad and id(one) not in done]
                inputs = [*left, leaf] if leaf.requires_grad else left
            if output.requires_grad and inputs != []:
                torch.autograd.backward(output, dy, inputs=inputs)
            gradient = leaf.grad
        else:
            graph.products.clear()
            gradient = torch.autograd.grad(output, leaf, dy)[0] if leaf.requires_grad else None
        if gradient is not None and self.scale != 1.0:
            gradient = gradient / self.scale
        if whole:
            progress.gradient = gradient
        elif gradient is not None and progress.gradient is not None:
            progress.gradient[first:last].copy_(gradient)
        progress.passed()

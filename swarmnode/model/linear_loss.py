"""The summed cross entropy of a linear head, in chunks of rows, so that the logits of a microbatch never exist at once.

    z = W h,   loss = sum over counted rows of (logsumexp(z) - z[target])
    dL/dz = softmax(z) - onehot(target),   dL/dh = W^T dL/dz,   dL/dW = sum of dL/dz h^T

Loss and gradients of a chunk are found while its logits are there: no logits are kept for a backward, none are computed
twice, and rows whose target does not count are left out. [Cut cross-entropy: arXiv 2411.09009; Liger kernels: arXiv
2410.10989, section 3.2; here with PyTorch's own operations on any device.] Logits that fit into one chunk take
autograd's path. The size of a chunk is that of memory_estimate.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.data.sample import IGNORED
from swarmnode.model import memory_estimate


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
    rows = memory_estimate.chunk_rows(x.shape[0], weight.shape[0], itemsize, x.device.type)
    into = progress if weight.requires_grad else None
    if rows == x.shape[0]:
        return _at_once(x, weight, targets.to(x.device), share, train, into, autocast)
    counts = targets != IGNORED
    if bool(counts.all()):
        return _chunked(x, weight, targets.to(x.device), rows, share, train, into, autocast)
    counted = counts.nonzero().flatten()
    wanted, counted = targets[counted].to(x.device), counted.to(x.device)
    result = _chunked(x.detach()[counted], weight, wanted, rows, share, train, into, autocast)
    if result.gradient is None:
        return result
    return HeadLoss(result.loss_sum, torch.zeros_like(x).index_copy_(0, counted, result.gradient))


def _at_once(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    share: float,
    train: bool,
    progress: HeadProgress | None,
    autocast: torch.dtype | None,
) -> HeadLoss:
    """`head_loss` by autograd."""
    leaf = x.detach().requires_grad_(train)
    with torch.set_grad_enabled(train):
        with torch.autocast(x.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            logits = F.linear(leaf, weight)  # (N, V)
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        loss_sum = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    if not train:
        return HeadLoss(loss_sum, None)
    adds = progress is not None and progress.rows == 0 and weight.grad is not None  # a frozen head has none
    gradients = torch.autograd.grad(loss_sum, (leaf, weight) if adds else (leaf,), torch.full_like(loss_sum, share))
    if progress is not None and weight.grad is not None and adds:
        weight.grad.add_(gradients[1])
        progress.rows = x.shape[0]
    return HeadLoss(loss_sum.detach(), gradients[0])


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
    each = max(1, memory_estimate.SOFTMAX_NBYTES // (z.shape[1] * exact.itemsize))
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
        rows = max(1, memory_estimate.TILE_NBYTES // (head.shape[1] * head.itemsize))
        self._tile = None if into.dtype == head.dtype else torch.empty_like(head[:rows])

    def __call__(self, z: Tensor, x: Tensor, share: float) -> None:
        """Add share · z^T x for z [R, V] and x [R, D]."""
        if self._tile is None:
            self._into.addmm_(z.T, x, alpha=share)
            return
        rows = len(self._tile)
        for tile, columns in zip(torch.split(self._into, rows), torch.split(z, rows, 1), strict=True):
            tile.add_(torch.mm(columns.T, x, out=self._tile[: len(tile)]), alpha=share)

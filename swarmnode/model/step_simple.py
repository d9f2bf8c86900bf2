"""An inner step of a pipeline, in its simplest form: stages of a model that call each other, and AdamW on each.

Sources: SWARM, arXiv 2301.11913 (a microbatch is a call, its answer is the gradient); AdamW, arXiv 1711.05101. The real
parts do the same on flat buffers (optimizer.py), in little memory (backprop.py), while other microbatches are on their
way (weight_stash.py), and with gradients that strangers send (inner_optimizer.py). tests/model/test_step_simple.py
holds stage.py against this module.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnode.model.optimizer import learning_rate
from swarmnode.run.manifest import InnerSpec


class SimpleStage:
    """Some consecutive layers, the gradient gathered for their next step, and AdamW's moments."""

    def __init__(self, layers: nn.Module, inner: InnerSpec, stages: int) -> None:
        self.layers = layers
        self.inner = inner
        self.clip_norm = inner.clip_norm / math.sqrt(stages)  # so that the norm of all stages is at most clip_norm
        self.samples = 0  # behind the gathered gradient
        self.steps = 0
        self.first = {name: torch.zeros_like(weight) for name, weight in layers.named_parameters()}
        self.second = {name: torch.zeros_like(weight) for name, weight in layers.named_parameters()}

    def step(self, samples_total: int) -> float:
        """Step by the mean gradient, clipped; the rate follows the samples of the whole run. Returns the norm of the
        mean before it was clipped."""
        gradients: dict[str, Tensor] = {}
        for name, weight in self.layers.named_parameters():
            assert weight.grad is not None, "a step needs a gradient"
            gradients[name] = weight.grad / self.samples
            weight.grad = None
        self.samples = 0
        self.steps += 1
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        factor = min(1.0, self.clip_norm / norm) if norm else 1.0
        for name, weight in self.layers.named_parameters():
            self._adamw(name, weight.data, factor * gradients[name], learning_rate(self.inner, samples_total))
        return norm

    def _adamw(self, name: str, weight: Tensor, gradient: Tensor, rate: float) -> None:
        """m <- b1 m + (1 - b1) g, v <- b2 v + (1 - b2) g^2, w <- w - rate (m' / (sqrt(v') + eps) + decay w), with m'
        and v' corrected for their beginning at zero. Vectors do not decay."""
        inner = self.inner
        first = self.first[name].lerp_(gradient, 1.0 - inner.beta1) / (1.0 - inner.beta1**self.steps)
        second = self.second[name].lerp_(gradient.square(), 1.0 - inner.beta2) / (1.0 - inner.beta2**self.steps)
        decay = inner.weight_decay if weight.dim() > 1 else 0.0
        weight -= rate * (first / (second.sqrt() + inner.eps) + decay * weight)


def microbatch(stages: Sequence[SimpleStage], x: Tensor, tokens: Tensor) -> tuple[float, Tensor | None]:
    """Pass a microbatch of B samples through `stages`. Each runs its forward, calls the next one, and runs its backward
    with the answer.

    `tokens` [B, T + 1]; `x`: the tokens but the last for the first stage, activations [B, T, D] for the others. Returns
    (summed cross entropy, gradient of `x`; None where `x` is tokens). Gradients are gathered, per sample and token.
    """
    stage = stages[0]
    if x.is_floating_point():
        x = x.detach().requires_grad_()
    y = stage.layers(x)
    if len(stages) == 1:
        loss = F.cross_entropy(y.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        torch.autograd.backward(loss / (tokens.shape[1] - 1))
        loss_sum = float(loss.detach())
    else:
        loss_sum, gradient = microbatch(stages[1:], y.detach(), tokens)
        torch.autograd.backward(y, gradient)
    stage.samples += len(tokens)
    return loss_sum, x.grad


def inner_step(stages: Sequence[SimpleStage], microbatches: Sequence[Tensor], samples_total: int) -> float:
    """Train on `microbatches`, tokens [B, T + 1] each; then all stages step. Returns nats per token."""
    loss_sum = 0.0
    targets = 0
    for tokens in microbatches:
        loss, _ = microbatch(stages, tokens[:, :-1], tokens)
        loss_sum += loss
        targets += tokens[:, 1:].numel()
    for stage in stages:
        stage.step(samples_total)
    return loss_sum / targets

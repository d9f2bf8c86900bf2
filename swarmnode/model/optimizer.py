"""AdamW over flat buffers: torch's own fused kernel on two large slices instead of one small tensor per parameter."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swarmnode.manifest import InnerSpec

NORM_EMA = 0.1  # weight of the newest gradient norm [guess]
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s own


class FlatAdamW:
    """AdamW [arXiv 1711.05101] on `theta` by `grad`, both [N]; the first `decayed` elements decay, the rest do not.

    `exp_avg` and `exp_avg_sq` are flat [N] too. They and `theta` may be overwritten in place between steps. The
    arithmetic is the kernel of `torch.optim.AdamW(fused=True)`, called by its own name: the class around it imports
    torch's compiler, which is 70 MiB and a second for each node process (measured).
    """

    def __init__(self, theta: Tensor, grad: Tensor, decayed: int, inner: InnerSpec) -> None:
        self.grad = grad
        self.exp_avg = torch.zeros_like(theta)
        self.exp_avg_sq = torch.zeros_like(theta)
        self._inner = inner
        self._slices = [
            (weight_decay, [flat[part] for flat in (theta, grad, self.exp_avg, self.exp_avg_sq)])
            for part, weight_decay in ((slice(0, decayed), inner.weight_decay), (slice(decayed, None), 0.0))
        ]
        self._step = torch.zeros((), dtype=torch.float32, device=theta.device)

    @torch.no_grad()
    def step(self, steps_before: int, learning_rate: float) -> None:
        """Update theta in place as step number `steps_before` + 1 (which corrects the moments' bias)."""
        self._step.fill_(steps_before + 1)
        for weight_decay, (weights, gradient, exp_avg, exp_avg_sq) in self._slices:
            torch._fused_adamw_(
                [weights],
                [gradient],
                [exp_avg],
                [exp_avg_sq],
                [],
                [self._step],
                lr=learning_rate,
                beta1=self._inner.beta1,
                beta2=self._inner.beta2,
                weight_decay=weight_decay,
                eps=self._inner.eps,
                amsgrad=False,
                maximize=False,
            )

    def clip_mean(self, samples: int, clip_norm: float) -> float:
        """Turn the summed gradient of `samples` samples into the mean, clipped to `clip_norm`, in place. Returns the
        norm of the mean before clipping; NaN or Inf when the gradient is."""
        norm = float(torch.linalg.vector_norm(self.grad)) / samples
        self.grad.mul_(min(1.0, clip_norm / (norm + CLIP_EPS)) / samples)
        return norm


def corrected_ema(before: float, value: float, count: int) -> float:
    """The bias-corrected exponential mean after `value`, the `count`-th one (from 1), given the one `before` it."""
    assert count >= 1 and math.isfinite(value), (count, value)
    keep = 1.0 - NORM_EMA
    raw = before * (1.0 - keep ** (count - 1))
    return float((keep * raw + NORM_EMA * value) / (1.0 - keep**count))

"""AdamW over flat buffers: torch's own optimizer on two large slices instead of one small tensor per parameter."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from swarmnode.manifest import InnerSpec

NORM_EMA = 0.1  # weight of the newest gradient norm [guess]
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_'s own


class FlatAdamW:
    """AdamW [arXiv 1711.05101] on `theta` by `grad`, both [N]; the first `decayed` elements decay, the rest do not.

    `exp_avg` and `exp_avg_sq` are flat [N] too. They and `theta` may be overwritten in place between steps.
    """

    def __init__(self, theta: Tensor, grad: Tensor, decayed: int, inner: InnerSpec) -> None:
        self.grad = grad
        self.exp_avg = torch.zeros_like(theta)
        self.exp_avg_sq = torch.zeros_like(theta)
        self._steps: list[Tensor] = []
        groups = []
        slices = ((slice(0, decayed), inner.weight_decay), (slice(decayed, None), 0.0))
        for part, weight_decay in slices:
            weights = nn.Parameter(theta[part])
            weights.grad = grad[part]
            groups.append({"params": [weights], "weight_decay": weight_decay})
        self._adamw = torch.optim.AdamW(
            groups, lr=inner.learning_rate, betas=(inner.beta1, inner.beta2), eps=inner.eps, fused=True
        )
        for group, (part, _) in zip(groups, slices, strict=True):
            assert isinstance(group["params"], list)
            step = torch.zeros((), dtype=torch.float32, device=theta.device)
            self._steps.append(step)
            self._adamw.state[group["params"][0]] = {
                "step": step,
                "exp_avg": self.exp_avg[part],
                "exp_avg_sq": self.exp_avg_sq[part],
            }

    def step(self, steps_before: int, learning_rate: float) -> None:
        """Update theta in place as step number `steps_before` + 1 (which corrects the moments' bias)."""
        for step in self._steps:
            step.fill_(steps_before)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()

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

"""Baseline of `bench learning`: a small Llama and a Muon in plain PyTorch, without code shared with the swarm.

Sizes: as in swarmnode/app/bench/pytorch_model.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from swarmnode.app.bench.pytorch_model import PlainLayer, positions
from swarmnode.run.manifest import ModelSpec

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan, "Muon", 2024: a quintic iteration with a steep slope at zero
NEWTON_SCHULZ_STEPS = 5  # Jordan, 2024
UPDATE_RMS = 0.2  # arXiv 2502.16982, section 2.2: the update's root mean square is that of a usual AdamW step


class PlainLlama(nn.Module):
    """Token ids [B, T] to logits [B, T, V]."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.vocabulary, model.width)
        self.layers = nn.ModuleList(PlainLayer(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.width, eps=model.norm_eps)
        self.head = nn.Linear(model.width, model.vocabulary, bias=False)
        cos, sin = positions(model)
        self.register_buffer("cos", cos, persistent=False)  # (T, h)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos = self.cos[: tokens.shape[1]]
        sin = self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


@torch.no_grad()
def initialise(net: PlainLlama, model: ModelSpec, seed: int) -> None:
    """Normal values of standard deviation sqrt(2 / 5D) (arXiv 1910.05895), less by sqrt(2 layers) for the projections
    that write into the residual stream (GPT-2); norms are one."""
    chance = torch.Generator().manual_seed(seed)
    deviation = math.sqrt(2 / (5 * model.width))
    for name, parameter in net.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            writes = name.endswith((".o.weight", ".down.weight"))
            parameter.normal_(0.0, deviation / (math.sqrt(2 * model.layers) if writes else 1.0), generator=chance)


def newton_schulz(matrices: Tensor) -> Tensor:
    """The orthogonal factor of each matrix in [..., m, n] with m <= n, approximately: its singular values become 0.7 to
    1.2 (Jordan, 2024)."""
    a, b, c = NEWTON_SCHULZ
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    estimate: Tensor = x
    return estimate


class PlainMuon(torch.optim.Optimizer):
    """Muon (Jordan, 2024) with Nesterov momentum. The update is scaled by 0.2 sqrt(max(m, n)) and the weight decay is
    decoupled, as arXiv 2502.16982 does. Parameters must be matrices [m, n]; those of one shape are orthogonalised
    together, in `dtype` (in bfloat16 that halves the seconds of a step of the demo's model, measured)."""

    def __init__(
        self, matrices: Iterable[Tensor], lr: float, momentum: float, weight_decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is not evaluated again"
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    alike.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
            for matrices in alike.values():
                wanted = [self._direction(matrix, group["momentum"]) for matrix in matrices]
                wide = [x.mT if x.shape[0] > x.shape[1] else x for x in wanted]
                updates = newton_schulz(torch.stack(wide).to(self._dtype)).float()
                for matrix, update in zip(matrices, updates, strict=True):
                    step = update.mT if matrix.shape[0] > matrix.shape[1] else update
                    matrix.mul_(1.0 - group["lr"] * group["weight_decay"])
                    matrix.add_(step, alpha=-group["lr"] * UPDATE_RMS * math.sqrt(max(matrix.shape)))

    def _direction(self, matrix: Tensor, momentum: float) -> Tensor:
        """The gradient with Nesterov momentum."""
        assert matrix.grad is not None
        buffer: Tensor = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
        buffer.lerp_(matrix.grad, 1.0 - momentum)
        return matrix.grad.lerp(buffer, momentum)

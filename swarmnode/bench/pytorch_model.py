"""Baseline of `bench learning`: a small Llama and a Muon in plain PyTorch, without code shared with the swarm.

The model is LlamaForCausalLM of Hugging Face: root mean square norms, rotary positions, grouped queries, SwiGLU and an
untied head. Sizes: B samples, T tokens, D width, H heads, K heads of keys and values, h = D / H, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnode.manifest import ModelSpec

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan, "Muon", 2024: a quintic iteration with a steep slope at zero
NEWTON_SCHULZ_STEPS = 5  # Jordan, 2024
UPDATE_RMS = 0.2  # arXiv 2502.16982, section 2.2: the update's root mean square is that of a usual AdamW step


class PlainLayer(nn.Module):
    """A decoder layer, [B, T, D] to [B, T, D]."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.head_width = model.width // model.heads
        key_width = model.kv_heads * self.head_width
        self.attention_norm = nn.RMSNorm(model.width, eps=model.norm_eps)
        self.q = nn.Linear(model.width, model.width, bias=False)
        self.k = nn.Linear(model.width, key_width, bias=False)
        self.v = nn.Linear(model.width, key_width, bias=False)
        self.o = nn.Linear(model.width, model.width, bias=False)
        self.feed_norm = nn.RMSNorm(model.width, eps=model.norm_eps)
        self.gate = nn.Linear(model.width, model.ffn, bias=False)
        self.up = nn.Linear(model.width, model.ffn, bias=False)
        self.down = nn.Linear(model.ffn, model.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        heads = (x.shape[0], x.shape[1], -1, self.head_width)
        q = rotated(self.q(normed).view(heads).transpose(1, 2).float(), cos, sin)  # (B, H, T, h)
        k = rotated(self.k(normed).view(heads).transpose(1, 2).float(), cos, sin)  # (B, K, T, h)
        v = self.v(normed).view(heads).transpose(1, 2).float()  # (B, K, T, h)
        with torch.autocast("cpu", enabled=False):  # bfloat16 attention takes three times as long on a CPU (measured)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.feed_norm(x)
        output: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return output


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
        half = model.width // model.heads // 2
        frequencies = model.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(model.context, dtype=torch.float32), frequencies)  # (T, h / 2)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)  # (T, h)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) of x [..., T, h], which pair the halves of a head as Hugging Face does."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


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

"""Baseline of `bench gpu` and of `benchmarks/`: layers of Llama in plain PyTorch, with no code of the swarm.

The model is LlamaForCausalLM of Hugging Face: root mean square norms, rotary positions, grouped queries, SwiGLU and an
untied head. Sizes: B samples, T tokens, D width, H heads, K heads of keys and values, h = D / H, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnode.run.manifest import ModelSpec


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


def positions(model: ModelSpec) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary positions, [T, h] each."""
    half = model.width // model.heads // 2
    frequencies = model.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(model.context, dtype=torch.float32), frequencies)  # (T, h / 2)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (arXiv 2104.09864) of x [..., T, h], which pair the halves of a head as Hugging Face does."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin

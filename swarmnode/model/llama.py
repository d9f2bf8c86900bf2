"""The model: a LLaMA-style decoder in one file, whole or the part of it that a stage holds.

Names of parameters are those of Hugging Face's LlamaForCausalLM, with global layer numbers, so that a state dict of any
part is a subset of the whole's. Sizes: B samples, T tokens, D width, H heads, K heads of keys and values, h = D / H,
F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarmnode.ids import seeded
from swarmnode.manifest import ModelSpec
from swarmnode.model.split import Part

INIT_CHUNK_ELEMENTS = 1 << 22  # 32 MiB of random bytes at a time


class ScaledNorm(torch.autograd.Function):
    """y = x · r · w with r = 1 / sqrt(mean(x²) + eps) over the last dimension. Written out because autograd's own
    backward of it takes 3.5 times as long on a CPU (816 against 231 µs for [8, 128, 128], measured)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = x.shape[-1]
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()  # [B, T, 1]
        ctx.save_for_backward(x, weight, r)
        y: Tensor = (x * r).mul_(weight)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (g,) = gradients  # [B, T, D]
        x, weight, r = ctx.saved_tensors
        unit = x * r
        product = g * unit
        along = (product @ weight).unsqueeze(-1)  # [B, T, 1]
        dx = (g * weight).addcmul_(unit, along, value=-1.0 / x.shape[-1]).mul_(r)
        return dx, product.sum(tuple(range(x.dim() - 1))), None


class RMSNorm(nn.Module):
    """Root mean square norm [arXiv 1910.07467]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, ScaledNorm.apply(x, self.weight, self.eps))  # type: ignore[no-untyped-call]


def entering(x: Tensor) -> Tensor:
    """`x` as several matrices will multiply it: cast once, not by autocast for each, which also keeps each copy."""
    kind = x.device.type
    enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if enabled else x


def rope_table(model: ModelSpec) -> tuple[Tensor, Tensor]:
    """cos and signed sin, each [T, 1, h] float32, for `rotate`. Angles t · rope_theta^(-2i/h), as Hugging Face computes
    them (in float32, each for i and i + h/2)."""
    head_width = model.width // model.heads
    exponent = torch.arange(0, head_width, 2, dtype=torch.float32, device="cpu") / head_width
    angle = torch.outer(torch.arange(model.context, dtype=torch.float32, device="cpu"), model.rope_theta**-exponent)
    cos, sin = angle.cos(), angle.sin()  # (T, h/2)
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + h/2) of x [B, T, heads, h] by its angle (RoFormer, arXiv 2104.09864, in Hugging Face's
    pairing: `roll` with the sign in `sin` is its rotate_half)."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class Attention(nn.Module):
    """Causal attention in which H / K heads share one head of keys and values [arXiv 2305.13245]."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.head_width = model.width // model.heads
        self.grouped = model.kv_heads != model.heads
        key_width = model.kv_heads * self.head_width
        self.q_proj = nn.Linear(model.width, model.width, bias=False)
        self.k_proj = nn.Linear(model.width, key_width, bias=False)
        self.v_proj = nn.Linear(model.width, key_width, bias=False)
        self.o_proj = nn.Linear(model.width, model.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_width)  # (B, T, ?, h)
        q = rotate(self.q_proj(x).view(heads), cos, sin).transpose(1, 2)  # (B, H, T, h)
        k = rotate(self.k_proj(x).view(heads), cos, sin).transpose(1, 2)  # (B, K, T, h)
        v = self.v_proj(x).view(heads).transpose(1, 2)  # (B, K, T, h)
        with torch.autocast("cpu", enabled=False):  # float32 even so: on a CPU backward takes 2.8 ms, in bfloat16 8.6
            y = F.scaled_dot_product_attention(  # (B, H, T, h)
                q, k, v.to(q.dtype), is_causal=True, enable_gqa=self.grouped
            )
        return cast(Tensor, self.o_proj(y.transpose(1, 2).flatten(2)))  # (B, T, D)


class FeedForward(nn.Module):
    """SwiGLU [arXiv 2002.05202]."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.width, model.ffn, bias=False)
        self.up_proj = nn.Linear(model.width, model.ffn, bias=False)
        self.down_proj = nn.Linear(model.ffn, model.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))  # (B, T, F) -> (B, T, D)


class Layer(nn.Module):
    """One decoder layer: norm, attention, norm, feed-forward, each pair added to the stream."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.self_attn = Attention(model)
        self.mlp = FeedForward(model)
        self.input_layernorm = RMSNorm(model.width, model.norm_eps)
        self.post_attention_layernorm = RMSNorm(model.width, model.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(entering(self.input_layernorm(x)), cos, sin)  # (B, T, D)
        return x + cast(Tensor, self.mlp(entering(self.post_attention_layernorm(x))))  # (B, T, D)


class Decoder(nn.Module):
    """The body: what Hugging Face calls `model`. Layers keep their global numbers in the names of parameters."""

    def __init__(self, model: ModelSpec, part: Part) -> None:
        super().__init__()
        if part.has_embedding:
            # Its own initialisation, on the meta device, would import SymPy: 70 MiB a process (measured).
            weight = torch.empty(model.vocabulary, model.width)
            self.embed_tokens = nn.Embedding(model.vocabulary, model.width, _weight=weight)
        self.layers = nn.ModuleDict({str(layer): Layer(model) for layer in part.layers})
        if part.has_head:
            self.norm = RMSNorm(model.width, model.norm_eps)


class Llama(nn.Module):
    """A part of the model: token ids [B, T] or activations [B, T, D] in; activations or, with the head, logits out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelSpec, part: Part) -> None:
        super().__init__()
        self.part = part
        self.model = Decoder(model, part)
        if part.has_head:
            self.lm_head = nn.Linear(model.width, model.vocabulary, bias=False)
        cos, sin = rope_table(model)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.part.has_embedding:
            x = self.model.embed_tokens(x)  # (B, T) -> (B, T, D)
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for layer in self.model.layers.values():
            x = layer(x, cos, sin)  # (B, T, D)
        if self.part.has_head:
            x = self.lm_head(self.model.norm(x))  # (B, T, V)
        return x


def initial(model: ModelSpec, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """The float32 value parameter `name` starts from: ones for norms; else a bell of standard deviation sqrt(2 / 5D)
    [SmallInit, arXiv 1910.05895], less by sqrt(2 · layers) for the two projections that write into the stream [GPT-2].
    GPT-2's own 0.02 suits D = 1000: the demo's model (D = 128) after 130 steps has 1.945 nats with it, 1.727 with this
    [measured, whole model, bf16 autocast, the standard library's sources].

    It depends on (seed, name, shape) alone, so any node makes its stage alone. The bell is the sum of four uniform
    16-bit integers (within ±3.46 standard deviations), times one rounded constant: bit-identical on every machine,
    which torch's own normal_ is not (its vectorised form differs between processors).
    """
    if len(shape) == 1:
        return torch.ones(shape)
    std = math.sqrt(2 / (5 * model.width))
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std /= math.sqrt(2 * model.layers)
    scale = std / math.sqrt(4 * (2**32 - 1) / 12)
    value = torch.empty(math.prod(shape))
    chance = seeded("init", seed, name)
    for start in range(0, value.numel(), INIT_CHUNK_ELEMENTS):
        chunk = value[start : start + INIT_CHUNK_ELEMENTS]
        raw = torch.frombuffer(bytearray(chance.randbytes(8 * chunk.numel())), dtype=torch.int16).view(-1, 4)
        chunk.copy_(raw.sum(1, dtype=torch.int32)).add_(2.0).mul_(scale)  # exact up to the product: |sum| < 2^18
    return value.view(shape)

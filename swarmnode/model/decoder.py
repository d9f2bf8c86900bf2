"""The model: a decoder in one file, as a whole or the part that one stage holds.

One layer serves all families of huggingface.py. The fields of ModelSpec select what they differ in: biases, norms of
queries and keys, norms before or after, scaled or absent rotary positions, sliding windows, experts. Parameter names
are those of Hugging Face, with global layer numbers, so that a state dict of any part is a subset of the whole's.
Sizes: B samples, T tokens, N = B · T, D width, H heads, K heads of keys and values, h width of a head, F feed-forward
width, E experts, A experts of a token, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swarmnode.model.architecture import architecture_of
from swarmnode.model.documents import Attend, Documents, causal_attention
from swarmnode.model.split import StageLayers
from swarmnode.run.manifest import ModelSpec

# Norms


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
    """Root mean square norm [arXiv 1910.07467], in the precision of its weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        if x.is_cuda:  # one kernel: half the time (0.51 instead of 1.08 ms for [4, 2048, 4096], measured on an H200)
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return cast(Tensor, ScaledNorm.apply(x, self.weight, self.eps))  # type: ignore[no-untyped-call]


def entering(x: Tensor) -> Tensor:
    """Cast `x` once for several matrix products. Autocast would cast it for each and also keep each copy."""
    kind = x.device.type
    enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if enabled else x


# Rotary positions


def rope_frequencies(model: ModelSpec) -> tuple[Tensor, float]:
    """Radians per token of each pair of a head [h / 2] float32, and the factor of cos and sin.

    They begin as rope_theta^(-2i/h). `linear` divides all by rope_factor [arXiv 2306.15595]. `llama3` and `yarn` divide
    those that turn fewer than rope_low times within rope_original_context, keep those that turn more than rope_high
    times, and blend between: by the number of turns [Llama 3.1's published code], or by i [YaRN, arXiv 2309.00071,
    eq. 18-23, with whole i as published]. YaRN also sharpens attention.
    """
    half = model.head_dim // 2
    low = model.rope_low
    high = model.rope_high
    exponent = torch.arange(0, model.head_dim, 2, dtype=torch.float32, device="cpu") / model.head_dim
    frequency = model.rope_theta**-exponent
    match model.rope_scaling:
        case "linear":
            return frequency / model.rope_factor, 1.0
        case "llama3":
            turns = model.rope_original_context * frequency / (2 * math.pi)
            kept = ((turns - low) / (high - low)).clamp(0, 1)
        case "yarn":

            def pair(turns: float) -> float:  # the i that turns so many times
                full = model.rope_original_context / (turns * 2 * math.pi)
                return half * math.log(full) / math.log(model.rope_theta)

            first = max(math.floor(pair(high)), 0)
            last = min(math.ceil(pair(low)), model.head_dim - 1)
            index = torch.arange(half, dtype=torch.float32, device="cpu")
            kept = 1 - ((index - first) / max(last - first, 0.001)).clamp(0, 1)
        case _:
            return frequency, 1.0
    own = 0.1 * math.log(model.rope_factor) + 1.0 if model.rope_scaling == "yarn" else 1.0
    return frequency * (kept + (1 - kept) / model.rope_factor), model.rope_attention_factor or own


def rope_table(model: ModelSpec) -> tuple[Tensor, Tensor]:
    """cos and signed sin, each [T, 1, h] float32, for `rotate`, as Hugging Face computes them (in float32, each for i
    and i + h/2)."""
    frequency, factor = rope_frequencies(model)
    angle = torch.outer(torch.arange(model.context, dtype=torch.float32, device="cpu"), frequency)
    cos = angle.cos() * factor  # (T, h/2)
    sin = angle.sin() * factor  # (T, h/2)
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + h/2) of x [B, T, heads, h] by its angle (RoFormer, arXiv 2104.09864, in Hugging Face's
    pairing: `roll` with the sign in `sin` is its rotate_half)."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


# A layer


class Attention(nn.Module):
    """Causal attention in which H / K heads share one head of keys and values [arXiv 2305.13245]."""

    def __init__(self, model: ModelSpec, layer: int) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        self.window = model.window(layer)
        self.rotates = model.rotates(layer)
        width = model.heads * model.head_dim
        key_width = model.kv_heads * model.head_dim
        self.q_proj = nn.Linear(model.width, width, bias=model.qkv_bias)
        self.k_proj = nn.Linear(model.width, key_width, bias=model.qkv_bias)
        self.v_proj = nn.Linear(model.width, key_width, bias=model.qkv_bias)
        self.o_proj = nn.Linear(width, model.width, bias=model.output_bias)
        self.qk_norm = model.qk_norm
        if self.qk_norm != "none":  # of each head alone, or of all together
            whole = self.qk_norm == "whole"
            self.q_norm = RMSNorm(width if whole else model.head_dim, model.norm_eps)
            self.k_norm = RMSNorm(key_width if whole else model.head_dim, model.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, by: Attend | None) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)  # (B, T, ?, h)
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        if self.qk_norm == "whole":
            q = self.q_norm(q)
            k = self.k_norm(k)
        q = q.view(heads)  # (B, T, H, h)
        k = k.view(heads)  # (B, T, K, h)
        if self.qk_norm == "head":
            q = self.q_norm(q)
            k = self.k_norm(k)
        q, k = (rotate(q, cos, sin), rotate(k, cos, sin)) if self.rotates else (q.to(cos.dtype), k.to(cos.dtype))
        v = v.view(heads).to(q.dtype)  # (B, T, K, h)
        # float32 even with autocast: on a CPU backward takes 2.8 ms, in bfloat16 8.6
        with torch.autocast("cpu", enabled=False):
            if by is None:
                y = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), self.window)
                y = y.transpose(1, 2)  # (B, T, H, h)
            else:
                y = by.attend(q, k, v, window=self.window)
        return cast(Tensor, self.o_proj(y.flatten(2)))  # (B, T, D)


class FeedForward(nn.Module):
    """SwiGLU [arXiv 2002.05202]."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, ffn, bias=False)
        self.up_proj = nn.Linear(width, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))  # (..., F) -> (..., D)


def grouped(x: Tensor, counts: Tensor, weights: list[Tensor]) -> Tensor:
    """x [M, in], whose rows are sorted by expert, `counts` [E] of each, times each expert's matrix [out, in] -> [M,
    out], as one kernel in bfloat16 on a card."""
    weight = torch.stack([entering(each) for each in weights])
    return F.grouped_mm(x, weight.mT, offs=counts.cumsum(0).to(torch.int32))


def _as_one_kernel(matrix: Tensor | nn.Module, x: Tensor) -> bool:
    """Whether `grouped` takes `x` and the matrices of experts like `matrix`: in bfloat16 on a card, not frozen in a
    form of their own, and with rows of whole 16 bytes."""
    if not (isinstance(matrix, nn.Linear) and x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")):
        return False
    return matrix.in_features % 8 == 0 and matrix.out_features % 8 == 0


class Experts(nn.ModuleList):
    """SwiGLU of E experts."""

    def __init__(self, experts: int, width: int, ffn: int) -> None:
        super().__init__(FeedForward(width, ffn) for _ in range(experts))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [M, D], whose rows are sorted by expert, `counts` [E] of each -> [M, D]."""
        if _as_one_kernel(self[0].gate_proj, x):
            gates, ups, downs = (
                [getattr(expert, name).weight for expert in self] for name in ("gate_proj", "up_proj", "down_proj")
            )
            return grouped(F.silu(grouped(x, counts, gates)) * grouped(x, counts, ups), counts, downs)
        pieces = torch.split(x, counts.tolist())
        return torch.cat([expert(piece) for expert, piece in zip(self, pieces, strict=True)])


class AddedLoss(torch.autograd.Function):
    """Return `y` unchanged; in backward, `loss` gets a gradient of one. So a loss that arises inside a stage is added
    to the run's without a way of its own through the pipeline."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], torch.ones_like(ctx.saved_tensors[0])


class SparseFeedForward(nn.Module):
    """Each token goes to the A experts of E that its router scores highest [arXiv 1701.06538], and to a shared expert
    behind a gate of its own, if there is one [Qwen1.5-MoE's published code].

    A loss keeps experts evenly used [Switch Transformer, arXiv 2101.03961, eq. 4]: router_balance · E · sum_e f_e P_e,
    f_e: choices of expert e per token, P_e its mean score; over the tokens of a microbatch, the mean of the sparse
    layers. Like the run's loss it counts per sample. The router is float32 [there, section 2.4].
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.active = model.experts_active
        self.normalised = model.router_normalised
        self.balance = model.router_balance * model.experts / model.sparse_layers
        self.gate = nn.Linear(model.width, model.experts, bias=False)
        self.experts = Experts(model.experts, model.width, model.expert_ffn)
        self.shared = model.shared_expert_ffn > 0
        if self.shared:
            self.shared_expert = FeedForward(model.width, model.shared_expert_ffn)
            self.shared_expert_gate = nn.Linear(model.width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # (N, D)
        with torch.autocast(x.device.type, enabled=False):
            scores = self.gate(tokens.to(self.gate.weight.dtype)).softmax(-1)  # (N, E)
        share, chosen = scores.topk(self.active)  # (N, A)
        if self.normalised:
            share = share / share.sum(-1, keepdim=True)
        counts = torch.bincount(chosen.flatten(), minlength=scores.shape[1])
        order = chosen.flatten().argsort(stable=True)  # (N A): choices by expert
        outputs = self.experts(tokens.index_select(0, order // self.active), counts)  # (N A, D)
        outputs = outputs.index_select(0, order.argsort()).view(*chosen.shape, -1)  # (N, A, D)
        y: Tensor = (outputs * share.unsqueeze(-1)).sum(1).view_as(x)
        if self.shared:
            y = y + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        if self.balance and torch.is_grad_enabled():
            loss = x.shape[0] * self.balance * (counts / len(tokens) * scores.mean(0)).sum()
            y = cast(Tensor, AddedLoss.apply(y, loss))  # type: ignore[no-untyped-call]
        return y


class Layer(nn.Module):
    """A decoder layer: attention and feed-forward, each added to the stream, with a norm before it or, as in OLMo 2
    [arXiv 2501.00656, section 3.1], after it."""

    def __init__(self, model: ModelSpec, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(model, layer)
        self.mlp = SparseFeedForward(model) if model.is_sparse(layer) else FeedForward(model.width, model.ffn)
        self.norm_first = model.norm_placement == "pre"
        if self.norm_first:
            self.input_layernorm = RMSNorm(model.width, model.norm_eps)
        self.post_attention_layernorm = RMSNorm(model.width, model.norm_eps)  # norm_first: of the feed-forward's input
        if not self.norm_first:
            self.post_feedforward_layernorm = RMSNorm(model.width, model.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, by: Attend | None) -> Tensor:
        if self.norm_first:
            x = x + self.self_attn(entering(self.input_layernorm(x)), cos, sin, by)  # (B, T, D)
            return x + cast(Tensor, self.mlp(entering(self.post_attention_layernorm(x))))  # (B, T, D)
        x = x + self.post_attention_layernorm(self.self_attn(entering(x), cos, sin, by))
        return x + cast(Tensor, self.post_feedforward_layernorm(self.mlp(entering(x))))


# The model


def layer_of(model: ModelSpec, layer: int) -> nn.Module:
    """The module of `layer`: a `Layer`, or one of another architecture."""
    own = architecture_of(model)
    return Layer(model, layer) if own is None else own.layer(model, layer)


class Body(nn.Module):
    """Hugging Face's `model`: token table, layers, last norm. Layers keep their global numbers in parameter names."""

    def __init__(self, model: ModelSpec, part: StageLayers) -> None:
        super().__init__()
        if part.has_embedding or (part.has_head and model.tied):
            # Its own initialisation, on the meta device, would import SymPy: 70 MiB a process (measured).
            weight = torch.empty(model.vocabulary, model.width)
            self.embed_tokens = nn.Embedding(model.vocabulary, model.width, _weight=weight)
        self.layers = nn.ModuleDict({str(layer): layer_of(model, layer) for layer in part.layers})
        if part.has_head:
            self.norm = RMSNorm(model.width, model.norm_eps)


def recomputed(layer: nn.Module, *args: object) -> Tensor:
    """`layer` of `args`, of which a graph holds only these. Nothing in a layer is random."""
    return cast(Tensor, checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False))


class Decoder(nn.Module):
    """A part of the model: token ids [B, T] or activations [B, T, D] in; activations or, with the head, logits out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelSpec, part: StageLayers) -> None:
        super().__init__()
        self.part = part
        self.model = Body(model, part)
        if part.has_head and not model.tied:
            self.lm_head = nn.Linear(model.width, model.vocabulary, bias=False)
        cos, sin = rope_table(model)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """With `documents` attention stays within each document."""
        x = self.hidden(x, documents)
        return F.linear(x, self.head.to(x.dtype)) if self.part.has_head else x  # (B, T, V)

    def hidden(self, x: Tensor, documents: Documents | None = None, *, by_layer: bool = False) -> Tensor:
        """Activations [B, T, D] after the layers; with the head, normed as they enter it. `by_layer`: the graph holds
        only the inputs of layers, and a backward recomputes each layer."""
        if self.part.has_embedding:
            x = self.model.embed_tokens(x)  # (B, T) -> (B, T, D)
        at = slice(x.shape[1]) if documents is None else documents.positions
        cos = self.cos[at]  # (T, 1, h), or (B, T, 1, h)
        sin = self.sin[at]
        for layer in self.model.layers.values():
            x = recomputed(layer, x, cos, sin, documents) if by_layer else layer(x, cos, sin, documents)  # (B, T, D)
        return cast(Tensor, self.model.norm(x)) if self.part.has_head else x

    @property
    def head(self) -> Tensor:
        """The matrix [V, D] of the logits: a tied model's token table."""
        return self.lm_head.weight if hasattr(self, "lm_head") else self.model.embed_tokens.weight

"""Layers of one's own for swarmnode: each head mixes tokens by a decaying mean of all before, instead of by attention.

    y_i = sum_{j <= i} (1 - a) a^(i - j) v_j       a of each head learned, between 0 and 1

[Retention without queries and keys: RetNet, arXiv 2307.08621, eq. 5.] The feed-forward is swarmnode's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.run.manifest import ModelSpec
from swarmnode.model.decoder import FeedForward, RMSNorm, entering


class DecayingMean(nn.Module):
    """[B, T, D] -> [B, T, D]; H heads with a decay each."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.heads = model.heads
        self.v_proj = nn.Linear(model.width, model.width, bias=False)
        self.o_proj = nn.Linear(model.width, model.width, bias=False)
        self.decay = nn.Parameter(torch.ones(model.heads))  # sigmoid of it; ones at first, as all vectors

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        length = x.shape[1]
        index = torch.arange(length, device=x.device)
        age = index[:, None] - index  # (T, T)
        seen = (age >= 0) if positions is None else (age >= 0) & (age <= positions[..., None])  # (T, T) or (B, T, T)
        a = self.decay.sigmoid()[:, None, None]  # (H, 1, 1)
        weight = (1 - a) * a ** age.clamp(min=0)  # (H, T, T)
        mix = torch.where(seen.view(-1, 1, length, length), weight, 0.0)  # (1 or B, H, T, T)
        v = self.v_proj(x).unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, H, T, h)
        y: Tensor = self.o_proj((mix.to(v.dtype) @ v).transpose(1, 2).flatten(2))
        return y


class DecayingMeanLayer(nn.Module):
    """Norm, decaying mean, norm, feed-forward, each pair added to the stream."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.mix = DecayingMean(model)
        self.mlp = FeedForward(model.width, model.ffn)
        self.mix_norm = RMSNorm(model.width, model.norm_eps)
        self.mlp_norm = RMSNorm(model.width, model.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, by: Any) -> Tensor:
        """`by`: the documents of the batch, whose `positions` [B, T] begin at 0 in each; None: windows are whole."""
        x = x + self.mix(entering(self.mix_norm(x)), None if by is None else by.positions)
        found: Tensor = x + self.mlp(entering(self.mlp_norm(x)))
        return found


class DecayingMeanArchitecture:
    """What swarmnode asks of an architecture (swarmnode/model/architecture.py)."""

    def layer_shapes(self, model: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
        wide = (model.width, model.width)
        return {
            "mix.v_proj.weight": wide,
            "mix.o_proj.weight": wide,
            "mlp.gate_proj.weight": (model.ffn, model.width),
            "mlp.up_proj.weight": (model.ffn, model.width),
            "mlp.down_proj.weight": (model.width, model.ffn),
            "mix.decay": (model.heads,),
            "mix_norm.weight": (model.width,),
            "mlp_norm.weight": (model.width,),
        }

    def layer_flops(self, model: ModelSpec, layer: int) -> float:
        matrices = 2 * model.width**2 + 3 * model.width * model.ffn
        return 2.0 * matrices + 2.0 * model.context * model.width

    def layer_nbytes(self, model: ModelSpec, layer: int, itemsize: int) -> int:
        # Norms' inputs and outputs, v, the mean; weights of all pairs, which documents have of their own; feed-forward.
        return itemsize * (6 * model.width + model.heads * model.context + 4 * model.ffn)

    def layer(self, model: ModelSpec, layer: int) -> nn.Module:
        return DecayingMeanLayer(model)

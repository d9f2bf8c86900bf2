"""Text from a whole model: one token after the other, keys and values of those before kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.errors import UsageError
from swarmnode.manifest import ModelSpec
from swarmnode.model.llama import Layer, Llama, rope_table, rotate
from swarmnode.model.split import split

KEPT_SHARE = 0.5  # guess: of the context, what stays when it is full


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. `temperature` 0: the likeliest. `top_k` 0 and `top_p` 1: among all."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int = 0


def whole_model(model: ModelSpec, tensors: Mapping[str, Tensor]) -> Llama:
    """The model in one piece with `tensors` by name as its parameters, shared."""
    with torch.device("meta"):
        made = Llama(model, split(model, 1)[0])
    made.load_state_dict(tensors, assign=True)
    made.cos, made.sin = rope_table(model)
    return made.eval()


@torch.no_grad()
def generate(
    llama: Llama, model: ModelSpec, prompt: Sequence[int], count: int, sampling: Sampling, stop: int | None = None
) -> Iterator[int]:
    """At most `count` token ids that follow `prompt`; ends before `stop`. When the context is full the oldest half is
    forgotten. Raises UsageError for a prompt that is empty or names ids the model does not have."""
    if not prompt:
        raise UsageError("the prompt is empty: the model needs something to go on from")
    if not 0 <= min(prompt) <= max(prompt) < model.vocabulary:
        raise UsageError(f"the prompt has token ids up to {max(prompt)}; the model knows {model.vocabulary}")
    chance = torch.Generator().manual_seed(sampling.seed)
    ids = list(prompt)
    cache = _Cache(llama, model)
    logits = cache.read(ids[-model.context :])
    for _ in range(count):
        token = choose(logits, sampling, chance)
        if token == stop:
            return
        yield token
        ids.append(token)
        if cache.length == model.context:
            cache = _Cache(llama, model)
            logits = cache.read(ids[-max(1, int(KEPT_SHARE * model.context)) :])
        else:
            logits = cache.read([token])


def choose(logits: Tensor, sampling: Sampling, chance: torch.Generator) -> int:
    """One id by its logit [V]: the likeliest `top_k`, of these the fewest that together have probability `top_p`
    [nucleus sampling, arXiv 1904.09751]; drawn at `temperature`."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    values, order = (logits.double() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        values, order = values[: sampling.top_k], order[: sampling.top_k]
    shares = values.softmax(0)
    kept = (shares.cumsum(0) - shares < sampling.top_p).nonzero().numel()  # the one that reaches top_p included
    shares = shares[: max(1, kept)]
    return int(order[torch.multinomial(shares / shares.sum(), 1, generator=chance)])


class _Cache:
    """Keys and values of the tokens read so far, [1, K, t, h] for each layer."""

    def __init__(self, llama: Llama, model: ModelSpec) -> None:
        self._llama = llama
        self._scale = 1.0 / math.sqrt(model.width // model.heads)
        self._past: list[tuple[Tensor, Tensor] | None] = [None] * model.layers
        self.length = 0

    def read(self, ids: Sequence[int]) -> Tensor:
        """Logits [V] of the token after `ids`."""
        llama = self._llama
        x = llama.model.embed_tokens(torch.tensor([ids]))  # (1, t, D)
        cos, sin = (table[self.length : self.length + len(ids)] for table in (llama.cos, llama.sin))
        for index, layer in enumerate(llama.model.layers.values()):
            assert isinstance(layer, Layer)
            x = x + self._attend(index, layer, layer.input_layernorm(x), cos, sin)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.length += len(ids)
        logits: Tensor = llama.lm_head(llama.model.norm(x[:, -1]))[0]
        return logits

    def _attend(self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attention = layer.self_attn
        heads = (*x.shape[:2], -1, attention.head_width)
        q = rotate(attention.q_proj(x).view(heads), cos, sin).transpose(1, 2)  # (1, H, t, h)
        k = rotate(attention.k_proj(x).view(heads), cos, sin).transpose(1, 2)  # (1, K, t, h)
        v = attention.v_proj(x).view(heads).transpose(1, 2)
        past = self._past[index]
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        self._past[index] = (k, v)
        first = past is None  # several tokens at once are only ever the first
        y = F.scaled_dot_product_attention(q, k, v, is_causal=first, scale=self._scale, enable_gqa=attention.grouped)
        out: Tensor = attention.o_proj(y.transpose(1, 2).flatten(2))
        return out


@torch.no_grad()
def loss_of(llama: Llama, batch: npt.ArrayLike) -> tuple[float, int]:
    """Summed cross entropy in nats of the next tokens of the token ids `batch` [B, T + 1], and how many they are."""
    tokens = torch.from_numpy(np.asarray(batch).astype(np.int64))
    targets = tokens[:, 1:]
    logits = llama(tokens[:, :-1])
    return float(F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")), targets.numel()

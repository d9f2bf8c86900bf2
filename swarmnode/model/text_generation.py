"""Generate text with a whole model, token by token, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.base.errors import UsageError
from swarmnode.data.sample import IGNORED, SampleBatch
from swarmnode.model.architecture import DECODER
from swarmnode.model.decoder import Decoder, rope_table
from swarmnode.model.documents import Documents, causal_attention
from swarmnode.model.split import split
from swarmnode.run.manifest import ModelSpec

KEPT_SHARE = 0.5  # of the context that is kept when it is full; derived: no more is read again than comes anew


@dataclass(frozen=True, slots=True)
class Sampling:
    """The choice of the next token. `temperature` 0: the most likely. `top_k` 0 and `top_p` 1: among all."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int = 0


def whole_model(model: ModelSpec, tensors: Mapping[str, Tensor]) -> Decoder:
    """The model in one piece with `tensors` by name as its parameters, shared."""
    with torch.device("meta"):
        decoder = Decoder(model, split(model, 1)[0])
    decoder.load_state_dict(tensors, assign=True)
    decoder.cos, decoder.sin = rope_table(model)
    return decoder.eval()


@torch.no_grad()
def generate(
    net: Decoder, model: ModelSpec, prompt: Sequence[int], count: int, sampling: Sampling, stops: Collection[int] = ()
) -> Iterator[int]:
    """At most `count` token ids that follow `prompt`; ends before one of `stops`. When the context is full the oldest
    half is dropped. Raises UsageError for a prompt that is empty or has ids outside the vocabulary."""
    if not prompt:
        raise UsageError("the prompt is empty: give at least one token")
    if not 0 <= min(prompt) <= max(prompt) < model.vocabulary:
        raise UsageError(f"the prompt has token ids up to {max(prompt)}; the model knows {model.vocabulary}")
    chance = torch.Generator().manual_seed(sampling.seed)
    ids = list(prompt)
    cache = _Cache(net, model)
    logits = cache.read(ids[-model.context :])
    for _ in range(count):
        token = choose(logits, sampling, chance)
        if token in stops:
            return
        yield token
        ids.append(token)
        if cache.length == model.context:
            cache = _Cache(net, model)
            logits = cache.read(ids[-max(1, int(KEPT_SHARE * model.context)) :])
        else:
            logits = cache.read([token])


def choose(logits: Tensor, sampling: Sampling, chance: torch.Generator) -> int:
    """Draw one id by its logit [V] at `temperature`: among the `top_k` most likely, the fewest that together have
    probability `top_p` [nucleus sampling, arXiv 1904.09751]."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    values, order = (logits.double() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        values = values[: sampling.top_k]
        order = order[: sampling.top_k]
    shares = values.softmax(0)
    kept = (shares.cumsum(0) - shares < sampling.top_p).nonzero().numel()  # including the one that reaches top_p
    shares = shares[: max(1, kept)]
    return int(order[torch.multinomial(shares / shares.sum(), 1, generator=chance)])


class _LayerCache:
    """Keys and values of the tokens that a layer has read, [1, K, t, h]."""

    def __init__(self) -> None:
        self._past: tuple[Tensor, Tensor] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
        """`Attend.attend` of the newest tokens over all."""
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if self._past is None:  # several tokens are read at once only at first
            y = causal_attention(q, k, v, window)
        else:
            k = torch.cat((self._past[0], k), 2)
            v = torch.cat((self._past[1], v), 2)
            k, v = (k[:, :, -window:], v[:, :, -window:]) if window else (k, v)
            y = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        self._past = (k, v)
        return y.transpose(1, 2)


class _Cache:
    """Keys and values of the tokens read so far."""

    def __init__(self, net: Decoder, model: ModelSpec) -> None:
        self._net = net
        self._layers = [_LayerCache() for _ in range(model.layers)]
        self._again: list[int] | None = None if model.architecture == DECODER else []
        self.length = 0

    def read(self, ids: Sequence[int]) -> Tensor:
        """Logits [V] of the token after `ids`."""
        net = self._net
        if self._again is not None:  # another architecture's layers keep what they like; all is read anew
            self._again += ids
            self.length = len(self._again)
            logits: Tensor = net(torch.tensor([self._again]))[0, -1]
            return logits
        x = net.model.embed_tokens(torch.tensor([ids]))  # (1, t, D)
        cos, sin = (table[self.length : self.length + len(ids)] for table in (net.cos, net.sin))
        for layer, cache in zip(net.model.layers.values(), self._layers, strict=True):
            x = layer(x, cos, sin, cache)
        self.length += len(ids)
        return F.linear(net.model.norm(x[0, -1]), net.head)


@torch.no_grad()
def loss_of(net: Decoder, batch: SampleBatch, end_token: int | None = None) -> tuple[float, int]:
    """Summed cross entropy in nats of the counted targets of `batch`, and their number. With the `end_token` of
    documents attention stays within each."""
    ids = torch.from_numpy(batch.tokens[:, :-1].astype(np.int64))
    targets = torch.from_numpy(batch.targets(end_token))
    logits = net(ids, None if end_token is None else Documents.of(ids, end_token))
    flat = logits.flatten(0, 1).float()
    loss = F.cross_entropy(flat, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return float(loss), int((targets != IGNORED).sum())

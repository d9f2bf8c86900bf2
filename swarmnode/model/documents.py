"""Separate attention for each document in a window: attention stays within it, and its positions begin at 0.

No T x T mask is made. The documents of a batch, cut out of its windows, are grouped by length. Each group is one batch
of causal attention, with shorter documents padded at the end, which causal attention never reads. So the arithmetic is
that of the documents alone, less than that of whole windows; the extra cost is copying. [Packing without contamination:
arXiv 2107.02027, section 3.2.2; there by masks.]
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_RATIO = 2
"""Ratio of the longest to the shortest document of a group [measured: 4 takes longer, T from 128 to 4096]."""

MERGED = 16
"""A group is merged with another if it would save less padding than a 16th of the batch's tokens [guess: a group costs
a tenth of a millisecond]. All groups together have less than three rows per token."""


BLOCK = 256
"""Queries of one call with a sliding window [measured on a thread of a CPU, 8 heads of 64, 2,048 tokens, window 512:
blocks of 64, 128, 256, 512 take 31, 33, 35, 46 ms; 4,096 tokens, window 1,024: 115, 115, 114, 136 ms]."""


class Attend(Protocol):
    """Attention that needs more than the projections of one batch: separate documents, or a cache of keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int) -> Tensor:
        """q [B, T, H, h], k and v [B, T, K, h] -> [B, T, H, h]; `window` as `causal_attention`."""
        ...


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int = 0) -> Tensor:
    """Causal attention of q [B, H, T, h] over k and v [B, K, T, h], scaled by 1 / sqrt(h); H / K heads share one of
    keys and values [arXiv 2305.13245]. With a `window` above 0 a token sees the last `window` tokens, itself among them
    [arXiv 2310.06825, section 2].

    A window is computed in blocks of queries, each against the keys that it can see. All share one mask. So memory
    grows with T, not with T².
    """
    grouped = q.shape[1] != k.shape[1]
    length = q.shape[2]
    if not 0 < window < length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    mask = _window_mask(window, q.dtype, q.device)
    outputs = []
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        oldest = start - window + 1
        queries = slice(start, stop)
        keys = slice(max(0, oldest), stop)
        seen = mask[: stop - start, keys.start - oldest : stop - oldest]
        here = (q[:, :, queries], k[:, :, keys], v[:, :, keys])
        outputs.append(F.scaled_dot_product_attention(*here, attn_mask=seen, enable_gqa=grouped))
    return torch.cat(outputs, 2)


@functools.lru_cache(maxsize=8)
def _window_mask(window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 where a query [BLOCK] sees a key, else -inf; the keys [window + BLOCK - 1] begin with the oldest that the first
    query sees."""
    age = torch.arange(BLOCK)[:, None] + window - 1 - torch.arange(window + BLOCK - 1)
    mask = torch.zeros(age.shape, dtype=dtype)
    return mask.masked_fill_((age < 0) | (age >= window), -torch.inf).to(device)


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The documents of a batch [B, T]. `positions` [B, T]: each token's position in its document. `groups`: documents
    and tokens of each, (n, L). `rows` [sum of n · L]: the tokens, of B · T, in the groups, one group after the other.
    `back` [B · T]: the index in `rows` of each token."""

    positions: Tensor
    groups: tuple[tuple[int, int], ...]
    rows: Tensor
    back: Tensor

    @classmethod
    def of(cls, ids: Tensor, end_token: int) -> Documents | None:
        """The documents of token ids [B, T] on the CPU, in which `end_token` ends a document; None if each window is
        one document."""
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, :-1] == end_token
        return cls._between(starts)

    def part(self, first: int, last: int) -> Documents | None:
        """The documents of samples [first, last) alone."""
        return self._between(self.positions[first:last] == 0)

    @classmethod
    def _between(cls, starts: Tensor) -> Documents | None:
        """Documents that begin at `starts`, bool [B, T] on the CPU."""
        samples, length = starts.shape
        first = starts.flatten().nonzero().flatten()  # [N]
        if first.numel() == samples:
            return None
        lengths = torch.diff(first, append=first.new_tensor([samples * length]))
        positions = torch.arange(samples * length) - first.repeat_interleave(lengths)
        order = lengths.argsort(descending=True, stable=True)
        groups = _grouped(lengths[order].tolist(), samples * length // MERGED)
        parts: list[Tensor] = []
        back = torch.empty(samples * length, dtype=torch.int64)
        offset = 0
        for here, (_, most) in zip(torch.split(order, [documents for documents, _ in groups]), groups, strict=True):
            begin = first[here, None]
            size = lengths[here, None]
            within = torch.arange(most)
            rows = begin + torch.minimum(within, size - 1)  # (n, L)
            real = within < size
            back[rows[real]] = offset + real.flatten().nonzero().flatten()
            parts.append(rows.flatten())
            offset += rows.numel()
        return cls(positions.view(samples, length), tuple(groups), torch.cat(parts), back)

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.rows.nbytes + self.back.nbytes

    def to(self, device: torch.device) -> Documents:
        """The same for tensors on `device`."""
        return Documents(self.positions.to(device), self.groups, self.rows.to(device), self.back.to(device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, window: int = 0) -> Tensor:
        """Causal attention within each document: q [B, T, H, h], k and v [B, T, K, h] -> [B, T, H, h]; `window` as
        `causal_attention`."""
        heads = [q.shape[2], k.shape[2], v.shape[2]]
        gathered = torch.cat((q, k, v), 2).flatten(0, 1).index_select(0, self.rows)
        pieces = torch.split(gathered, [documents * most for documents, most in self.groups])
        outputs = []
        for group, piece in zip(self.groups, pieces, strict=True):
            here = piece.view(*group, *piece.shape[1:]).transpose(1, 2)  # (n, H + 2K, L, h)
            each_q, each_k, each_v = torch.split(here, heads, 1)
            outputs.append(causal_attention(each_q, each_k, each_v, window).transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.back).view(q.shape)


def _grouped(lengths: list[int], spare: int) -> tuple[tuple[int, int], ...]:
    """(documents, tokens of the longest) of each group of documents with `lengths`, longest first. A group that adds at
    most `spare` rows of padding to the previous one is merged with it."""
    groups: list[tuple[int, int]] = []
    at = 0
    while at < len(lengths):
        most = lengths[at]
        begin = at
        while at < len(lengths) and lengths[at] * GROUP_RATIO > most:
            at += 1
        if groups and (at - begin) * (groups[-1][1] - most) <= spare:
            groups[-1] = (groups[-1][0] + at - begin, groups[-1][1])
        else:
            groups.append((at - begin, most))
    return tuple(groups)

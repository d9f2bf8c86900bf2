"""Cost of separate documents in a window: forward and backward of one stage, compared with whole windows and with T x T
masks.

`swarmnode bench documents` measures a stage of one layer on random documents of several mean lengths, with one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.ids import seeded
from swarmnode.manifest import PRESETS, Manifest
from swarmnode.model.boundary import encode_boundary
from swarmnode.model.documents import Documents
from swarmnode.model.stage import StageReplica
from swarmnode.model.tensor import encode
from swarmnode.ports import WireTensor

END = 0  # of the tokenizer `bytes`
STAGE = 1  # of three: an inner stage


def run(width: int = 128, context: int = 128, samples: int = 8, repeats: int = 9) -> dict[str, Any]:
    """{"rows": [mean length of documents, milliseconds of a microbatch, ...]} for a layer of `width` (heads of 64 at
    most, half of them for keys, feed-forward 2.75 times as wide) and microbatches of `samples` x `context` tokens."""
    heads = max(2, width // 64)
    demo = PRESETS["demo"]
    model = replace(
        demo.model, layers=3, width=width, heads=heads, kv_heads=heads // 2, ffn=11 * width // 4, context=context
    )
    manifest = replace(demo, model=model)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        lengths = [length for length in (context // 16, context // 4, context, 8 * context) if length > 1]
        rows = [_row(manifest, samples, length, repeats) for length in lengths]
    finally:
        torch.set_num_threads(threads)
    return {"width": width, "context": context, "samples": samples, "rows": rows}


def _row(manifest: Manifest, samples: int, mean: int, repeats: int) -> dict[str, Any]:
    """Random document ends, one per `mean` tokens."""
    model = manifest.model
    generator = torch.Generator().manual_seed(seeded("bench documents", mean).getrandbits(63))
    ids = (torch.rand(samples, model.context + 1, generator=generator) > 1 / mean).long()
    drawn = torch.randn(samples, model.context, model.width, generator=generator)
    x, gradient = (encode_boundary(drawn * scale, manifest.pipeline.boundary) for scale in (1.0, 1e-3))
    joined = StageReplica(manifest, STAGE)
    apart = StageReplica(replace(manifest, data=replace(manifest.data, documents="masked")), STAGE)
    documents = Documents.of(ids[:, :-1], END)
    heads = (samples, model.context, model.heads, model.width // model.heads)
    qkv = [torch.randn(heads, generator=generator, requires_grad=True) for _ in range(3)]
    mask = _mask(ids[:, :-1])
    work = {
        "stage, joined, ms": lambda: _train(joined, x, gradient, ids),
        "stage, masked, ms": lambda: _train(apart, x, gradient, ids),
        "attention, joined, ms": lambda: _attend(qkv, None),
        "attention, masked, ms": lambda: _attend(qkv, None) if documents is None else _apart(documents, qkv),
        "attention, T x T mask, ms": lambda: _attend(qkv, mask),
    }
    times = {what: _milliseconds(do, repeats) for what, do in work.items()}
    more = times["stage, masked, ms"] / times["stage, joined, ms"] - 1.0
    return {"mean document": mean, **times, "stage, more": f"{more:+.1%}"}


def _mask(ids: Tensor) -> Tensor:
    """[B, 1, T, T]: attention mask of each token."""
    document = (ids == END).cumsum(1) - (ids == END).long()
    return (document[:, :, None] == document[:, None, :]).tril()[:, None]


def _train(replica: StageReplica, x: WireTensor, gradient: WireTensor, ids: Tensor) -> None:
    _, tape = replica.forward(x, keep=True, tokens=encode(ids.to(torch.uint16)))
    assert tape is not None
    replica.backward(tape, gradient, ids.shape[0])


def _attend(qkv: list[Tensor], mask: Tensor | None) -> None:
    q, k, v = (part.transpose(1, 2) for part in qkv)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    torch.autograd.backward(y.sum())


def _apart(documents: Documents, qkv: list[Tensor]) -> None:
    q, k, v = qkv
    torch.autograd.backward(documents.attend(q, k, v).sum())


def _milliseconds(work: Callable[[], None], repeats: int) -> float:
    """Median processor time of `work`, in milliseconds."""
    found = []
    for _ in range(1 + repeats):  # the first is slower
        begun = time.process_time()
        work()
        found.append(1000.0 * (time.process_time() - begun))
    return statistics.median(found[1:])

"""Cost of Muon: processor time of an inner step of one stage, relative to forward and backward of its inner batch.

    share = step / (step + forward and backward)        about 2.2 m / t of t tokens, m the shorter side of the matrices

`swarmnode bench muon` prints the shares by inner batch, and the part of a step spent on orthogonalisation. One thread:
both sides are matrix products, so that more threads speed up both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from swarmnode.ids import seeded
from swarmnode.manifest import PRESETS, Manifest
from swarmnode.model.boundary import encode_boundary
from swarmnode.model.muon import FlatMuon
from swarmnode.model.stage import StageReplica
from swarmnode.ports import WireTensor

TARGET = 0.05  # at real sizes
STAGE = 1  # of three: an inner one, which has no embedding and no head
GRADIENT = 1e-3  # guess: an incoming element; times do not depend on it


def run(width: int = 0, context: int = 0, samples: int = 0, repeats: int = 3) -> dict[str, Any]:
    """{"rows": [inner batch in samples and tokens, share], ...} of a stage of one layer of `width` (heads of 128, a
    quarter of them for keys, feed-forward 2.75 times as wide), or of the demo's two layers with 0. `samples` of
    `context` tokens make a microbatch."""
    manifest = _wide(width) if width else PRESETS["demo"]
    if context:
        manifest = replace(manifest, model=replace(manifest.model, context=context))
    samples = samples or manifest.inner.microbatch
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(manifest, samples, repeats)
    finally:
        torch.set_num_threads(threads)


def _wide(width: int) -> Manifest:
    demo, heads = PRESETS["demo"], max(1, width // 128)
    model = replace(
        demo.model, layers=3, width=width, heads=heads, kv_heads=max(1, heads // 4), ffn=11 * width // 4, context=512
    )
    return replace(demo, model=model)


def _measure(manifest: Manifest, samples: int, repeats: int) -> dict[str, Any]:
    replica, context = StageReplica(manifest, STAGE), manifest.model.context
    muon = replica._optimizer
    assert isinstance(muon, FlatMuon), "the preset trains with Muon"
    x, gradient = (_made(manifest, samples, scale) for scale in (1.0, GRADIENT))

    def train() -> None:
        _, tape = replica.forward(x, keep=True)
        assert tape is not None
        replica.backward(tape, gradient, samples)

    both, steps, alone = [], [], []
    for _ in range(1 + repeats):  # the first of each is slower
        both.append(_seconds(train))
        steps.append(_seconds(lambda: replica.step(0)))
        alone.append(_seconds(lambda: list(muon.orthogonalized())))
    sample_s, step_s = statistics.median(both[1:]) / samples, statistics.median(steps[1:])
    batches = sorted({manifest.inner.inner_batch, 16, 64, 256, 1024})
    return {
        "width": manifest.model.width,
        "parameters": replica.parameters,
        "forward and backward, ms a sample": 1000 * sample_s,
        "step, ms": 1000 * step_s,
        "of it orthogonalisation": statistics.median(alone[1:]) / step_s,
        "rows": _rows(batches, context, sample_s, step_s),
        "target, at most": TARGET,
    }


def _rows(batches: Sequence[int], context: int, sample_s: float, step_s: float) -> list[dict[str, Any]]:
    return [
        {"inner batch": batch, "tokens": batch * context, "share": step_s / (step_s + batch * sample_s)}
        for batch in batches
    ]


def _made(manifest: Manifest, samples: int, scale: float) -> WireTensor:
    generator = torch.Generator().manual_seed(seeded("bench muon", scale).getrandbits(63))
    drawn = torch.randn(samples, manifest.model.context, manifest.model.width, generator=generator)
    return encode_boundary(drawn * scale, manifest.pipeline.boundary)


def _seconds(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun

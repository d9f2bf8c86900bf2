"""A live swarm on one device beside plain PyTorch on the same: tokens a second, and their ratio.

Node processes of one host share the device, one stage each, so that together they do what the plain process does alone.
The plain side trains the same model with the same optimizer and batches (plain_model.py). It shares no code with the
swarm. One runs after the other.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.swarm.harness import fleet_in
from benchmarks.swarm.plain_model import PlainLlama, PlainMuon
from swarmnode.app.local.summary import count
from swarmnode.base.errors import LocalFault
from swarmnode.base.metrics import name
from swarmnode.model.device import autocasts, half_dtype
from swarmnode.run.manifest import GossipSpec, InnerSpec, Manifest, ModelSpec, PipelineSpec
from swarmnode.run.manifest.folder import init, read_manifest

STAGES = 3
WARM_SAMPLES = 64
FIRST_S = 300.0
MEASURE_S = 30.0
PLAIN_S = 8.0
MODEL = ModelSpec(layers=12, width=2048, heads=16, kv_heads=8, ffn=5632, context=2048)  # 0.57 G parameters
SMALL = ModelSpec(layers=3, width=64, heads=4, kv_heads=2, ffn=128, context=64)
BOUNDARIES = ("subspace", "bf16")


def run(
    device: str,
    *,
    small: bool = False,
    boundaries: Sequence[str] = BOUNDARIES,
    nodes: int = STAGES,
    measure_s: float = MEASURE_S,
    plain_s: float = PLAIN_S,
) -> list[dict[str, Any]]:
    """A row for each of `boundaries`: swarm of `nodes` processes, plain PyTorch, ratio. `small`: for a CPU."""
    plain = _plain(_manifest(small, "bf16"), device, plain_s)
    rows = []
    for boundary in boundaries:
        found = asyncio.run(_swarm(_manifest(small, boundary), device, nodes, measure_s))
        rows.append(
            {
                "boundary": boundary,
                "nodes": nodes,
                "swarm tokens/s": found,
                "plain tokens/s": plain,
                "swarm / plain": found / plain,
            }
        )
    return rows


def _manifest(small: bool, boundary: str) -> Manifest:
    model = SMALL if small else MODEL
    return Manifest(
        model=model,
        pipeline=PipelineSpec(
            stages=STAGES,
            boundary=boundary,
            boundary_rank=model.width // 32 if boundary == "subspace" else 0,
            validation_every_samples=1 << 20,
        ),
        inner=InnerSpec(microbatch=8, inner_batch=32, learning_rate=3e-4, muon_learning_rate=1e-3),
        gossip=GossipSpec(round_samples=1024),
    )


def _plain(manifest: Manifest, device: str, seconds: float) -> float:
    """Tokens per second of plain PyTorch, in a process of its own: its memory is free afterwards."""
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder:
        init(Path(folder), manifest)
        command = [sys.executable, "-m", "benchmarks.swarm.one_device", folder, device, str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LocalFault(f"plain PyTorch ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return float(done.stdout)


def train_plainly(manifest: Manifest, device: str, seconds: float) -> float:
    """Tokens per second of the whole model on random tokens, after one inner step."""
    model = manifest.model
    inner = manifest.inner
    net = PlainLlama(model).to(device)
    matrices = [one for key, one in net.named_parameters() if one.dim() > 1 and key.startswith("layers")]
    others = [one for key, one in net.named_parameters() if one.dim() < 2 or not key.startswith("layers")]
    half = half_dtype(torch.device(device))
    muon = PlainMuon(matrices, inner.muon_learning_rate, inner.muon_momentum, inner.weight_decay, half)
    adamw = torch.optim.AdamW(others, lr=inner.learning_rate, fused=True)
    samples = -inner.inner_batch
    begun = 0.0
    while samples <= 0 or time.perf_counter() - begun < seconds:
        for _ in range(0, inner.inner_batch, inner.microbatch):
            tokens = torch.randint(model.vocabulary, (inner.microbatch, model.context + 1)).to(device)
            with torch.autocast(torch.device(device).type, half, enabled=autocasts(device)):
                logits = net(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            torch.autograd.backward(loss * (inner.microbatch / inner.inner_batch))
        torch.nn.utils.clip_grad_norm_(net.parameters(), inner.clip_norm)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        samples += inner.inner_batch
        float(loss.detach())  # waits for the device
        if samples == 0:
            begun = time.perf_counter()
    return samples * model.context / (time.perf_counter() - begun)


async def _swarm(manifest: Manifest, device: str, nodes: int, measure_s: float) -> float:
    with tempfile.TemporaryDirectory(prefix="swarmnode-bench-") as folder:
        fleet = fleet_in(Path(folder), manifest, nodes, devices=(device,), start_timeout_s=FIRST_S)
        loop = asyncio.get_running_loop()
        try:
            await fleet.start(asyncio.Event())
            begun = loop.time()
            while count(fleet.facts(), name.SAMPLES) < WARM_SAMPLES:
                await fleet.poll()
                await asyncio.sleep(0.2)
                if loop.time() - begun > FIRST_S:
                    raise LocalFault(f"{WARM_SAMPLES} samples were not trained within {FIRST_S:.0f} s")
            first = count(fleet.facts(), name.TOKENS)
            begun = loop.time()
            await asyncio.sleep(measure_s)
            await fleet.poll()
            return (count(fleet.facts(), name.TOKENS) - first) / (loop.time() - begun)
        finally:
            await fleet.stop("measured")
            await fleet.reap()


if __name__ == "__main__":
    given, where, span = sys.argv[1:]
    run_of = read_manifest(Path(given) / "manifest.toml")
    sys.stdout.write(f"{train_plainly(run_of, where, float(span))}\n")

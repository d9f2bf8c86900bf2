"""Baseline of `bench data-parallel`: plain PyTorch on the run's model, text and batch, in one process or in several
with DistributedDataParallel over gloo.

`python -m benchmarks.swarm.pytorch_ddp TASK` takes a `DdpTask` as JSON and prints a line of JSON after each step: the
samples of all processes and this one's processor seconds so far. It trains until it is ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.swarm.plain_model import PlainLlama, initialise
from benchmarks.swarm.pytorch_learning import GridPoint, one_step, optimizers, tensors
from swarmnode.data.indexed import open_text
from swarmnode.run.manifest import read_signed
from swarmnode.run.manifest.spec import InnerSpec


@dataclass(frozen=True, slots=True)
class DdpTask:
    """Task of process `rank` of `world`: batches of `batch` samples of the signed manifest's run, shared evenly."""

    manifest: str
    cache: str
    rank: int
    world: int
    port: int
    batch: int
    bf16: bool

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


def _setting(inner: InnerSpec, batch: int) -> GridPoint:
    rate = inner.muon_learning_rate if inner.optimizer == "muon" else inner.learning_rate
    return GridPoint(inner.optimizer, batch, rate, inner.learning_rate, inner.muon_momentum)


def main(arguments: list[str]) -> int:
    """Train by the task in `arguments`, for ever."""
    task = DdpTask(**json.loads(arguments[0]))
    torch.set_num_threads(1)
    if task.world > 1:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["MASTER_PORT"] = str(task.port)
        dist.init_process_group("gloo", rank=task.rank, world_size=task.world)
    _, manifest = read_signed(Path(task.manifest))
    corpus = open_text(manifest, None, Path(task.cache))
    net = PlainLlama(manifest.model)
    initialise(net, manifest.model, manifest.seed)
    dtype = torch.bfloat16 if task.bf16 else torch.float32
    chosen = optimizers(net, _setting(manifest.inner, task.batch), manifest.inner.weight_decay, dtype)
    model = DistributedDataParallel(net) if task.world > 1 else net
    own = task.batch // task.world
    samples = 0
    while True:
        first = samples + task.rank * own
        inputs, targets = tensors(corpus.batch(range(first, first + own)), "cpu")
        samples += task.batch
        autocast = torch.autocast("cpu", dtype) if task.bf16 else contextlib.nullcontext()
        loss = one_step(model, chosen, inputs, targets, samples, autocast)
        said = {"samples": samples, "core_s": time.process_time(), "loss": float(loss)}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What plain PyTorch learns: one process trains the run's whole model and looks at the held-out loss now and then.

`python -m swarmnode.bench.plain_learning TASK` takes a Task as JSON and prints its Trained as one JSON object. The data
reader is the only part that it shares with the swarm, so that both see the same numbered and held-out samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.bench.plain_model import PlainLlama, PlainMuon, initialise
from swarmnode.data.corpus import Corpus, open_corpus
from swarmnode.manifest import Manifest, read_signed

VERSION = 2
"""Of what is measured here. A change that changes curves raises it, and journals are measured anew."""

WARMUP_SAMPLES = 512  # the demo's manifest: linear from zero, constant from there on
BETAS, EPS, CLIP_NORM = (0.9, 0.95), 1e-8, 1.0  # the demo's manifest, and LLaMA (arXiv 2302.13971)
LOOK_SAMPLES = 256
"""Looks are at multiples of it, so that every batch size of the grid meets them exactly. They come in steps of a
32nd of the samples so far, rounded down to a power of two: eight lie in the neighbourhood that is smoothed over."""

MEAN_SHARE = 0.07  # the age of the mean, of the samples so far: the manifest's inner.average_share
MEAN_UPDATES = 16  # times the mean is renewed while its age goes by, as in the swarm

HELD_OUT_BATCH = 32  # guess: samples of a held-out forward pass


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the grid. `rate` is the peak of AdamW, or of Muon on the matrices of layers; then embedding, head
    and norms learn by AdamW with `rate_elsewhere`."""

    optimizer: str
    batch: int
    rate: float
    rate_elsewhere: float = 3e-3  # of Muon; the demo's manifest
    momentum: float = 0.95  # of Muon: Jordan, 2024

    def __str__(self) -> str:
        text = f"{self.optimizer}, batch {self.batch}, rate {self.rate:g}"
        if self.optimizer != "muon":
            return text
        return f"{text} ({self.rate_elsewhere:g} elsewhere), momentum {self.momentum:g}"


@dataclass(frozen=True, slots=True)
class Task:
    """One run of one process: until `samples` are trained, or `seconds` of training are over where that is sooner."""

    manifest: str
    cache: str
    setting: Setting
    samples: int
    seconds: float | None = None
    threads: int = 1
    seed: int = 0
    bf16: bool = False
    data: str = ""  # the folder that the manifest's paths lie below

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        raw: dict[str, Any] = json.loads(text)
        return cls(**raw | {"setting": Setting(**raw["setting"])})


@dataclass(frozen=True, slots=True)
class Look:
    """Held-out nats a token after `samples`, of the weights and of their running mean; seconds of training so far,
    without the looks."""

    samples: int
    nats: float
    core_s: float
    wall_s: float
    mean_nats: float


def looks_from(samples: int) -> Iterator[int]:
    """The sample counts of looks after `samples`, without end."""
    while True:
        share = max(1, samples // (32 * LOOK_SAMPLES))
        step = LOOK_SAMPLES * (1 << (share.bit_length() - 1))
        samples = (samples // step + 1) * step
        yield samples


def train(task: Task, manifest: Manifest, corpus: Corpus) -> list[Look]:
    """Train by `task` and return its looks; the last one is at its end."""
    model, setting = manifest.model, task.setting
    net = PlainLlama(model)
    initialise(net, model, manifest.seed)
    optimizers = _optimizers(net, setting, manifest.inner.weight_decay, torch.bfloat16 if task.bf16 else torch.float32)
    mean = Mean(list(net.parameters()))
    clock = _Clock()
    found: list[Look] = []
    looks = looks_from(0)
    due, samples = next(looks), 0
    while True:
        over = samples >= task.samples or (task.seconds is not None and clock.read()[1] >= task.seconds)
        if samples >= due or over:
            core_s, wall_s = clock.read()
            nats = held_out(net, manifest, corpus, task.bf16)
            with mean.in_place():
                mean_nats = held_out(net, manifest, corpus, task.bf16)
            found.append(Look(samples, nats, core_s, wall_s, mean_nats))
            clock.set(core_s, wall_s)
            due = next(looks)
        if over:
            return found
        tokens = torch.from_numpy(corpus.batch(range(samples, samples + setting.batch)).astype("int64"))
        with torch.autocast("cpu", torch.bfloat16, enabled=task.bf16):
            logits = net(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
        samples += setting.batch
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * min(1.0, samples / WARMUP_SAMPLES)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        mean.see(samples)


class Mean:
    """A running mean of `parameters` whose age is MEAN_SHARE of the samples (power function EMA, arXiv 2312.02696)."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [parameter.data for parameter in parameters]
        self._means = [parameter.clone() for parameter in self._parameters]
        self._last = 0

    @torch.no_grad()
    def see(self, samples: int) -> None:
        """The parameters are those after so many samples."""
        if (samples - self._last) * MEAN_UPDATES < MEAN_SHARE * samples:
            return
        kept = (self._last / samples) ** (1.0 / MEAN_SHARE - 1.0)
        torch._foreach_lerp_(self._means, self._parameters, 1.0 - kept)
        self._last = samples

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Meanwhile the parameters are their mean."""
        kept = [parameter.clone() for parameter in self._parameters]
        torch._foreach_copy_(self._parameters, self._means)
        try:
            yield
        finally:
            torch._foreach_copy_(self._parameters, kept)


def _optimizers(
    net: PlainLlama, setting: Setting, weight_decay: float, dtype: torch.dtype
) -> list[torch.optim.Optimizer]:
    """Norms do not decay, everything else does."""
    inside: list[Tensor] = [value for value in net.layers.parameters() if value.dim() == 2]
    outside: list[Tensor] = [net.embedding.weight, net.head.weight]
    norms = [value for value in net.parameters() if value.dim() == 1]
    muon = setting.optimizer == "muon"
    elsewhere = setting.rate_elsewhere if muon else setting.rate
    decayed = {"params": outside if muon else outside + inside, "weight_decay": weight_decay, "peak": elsewhere}
    steady = {"params": norms, "weight_decay": 0.0, "peak": elsewhere}
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([decayed, steady], lr=elsewhere, betas=BETAS, eps=EPS, fused=True)
    ]
    if muon:
        found.append(PlainMuon(inside, setting.rate, setting.momentum, weight_decay, dtype))
        found[-1].param_groups[0]["peak"] = setting.rate
    return found


@torch.no_grad()
def held_out(net: PlainLlama, manifest: Manifest, corpus: Corpus, bf16: bool) -> float:
    """Nats a token on the held-out samples that validations of the swarm look at."""
    wanted = manifest.pipeline.validation_samples
    total, count = 0.0, 0
    for first in range(0, wanted, HELD_OUT_BATCH):
        batch = corpus.validation_batch(first, min(HELD_OUT_BATCH, wanted - first), wanted)
        if not len(batch):
            break
        tokens = torch.from_numpy(batch.astype("int64"))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = net(tokens[:, :-1])
        targets = tokens[:, 1:].flatten()
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum"))
        count += targets.numel()
    return total / max(1, count)


class _Clock:
    """Processor and wall seconds of this process since it was made; it can be set back."""

    def __init__(self) -> None:
        self._core, self._wall = time.process_time(), time.perf_counter()

    def read(self) -> tuple[float, float]:
        return time.process_time() - self._core, time.perf_counter() - self._wall

    def set(self, core_s: float, wall_s: float) -> None:
        self._core, self._wall = time.process_time() - core_s, time.perf_counter() - wall_s


def main(arguments: list[str]) -> int:
    """Train by the task in `arguments` and print its looks."""
    task = Task.from_json(arguments[0])
    torch.set_num_threads(task.threads)
    _, manifest = read_signed(Path(task.manifest))
    manifest = dataclasses.replace(manifest, seed=manifest.seed + task.seed)
    corpus = open_corpus(manifest, Path(task.data) if task.data else None, Path(task.cache))
    looks = train(task, manifest, corpus)
    sys.stdout.write(json.dumps({"looks": [dataclasses.asdict(look) for look in looks]}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

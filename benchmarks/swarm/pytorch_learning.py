"""Plain PyTorch baseline: one process trains the run's whole model and evaluates the held-out loss now and then.

`python -m benchmarks.swarm.pytorch_learning TASK` takes a Task as JSON and prints its Trained as one JSON object.
It shares only the data reader with the swarm, so that both see the same numbered and held-out samples.
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

from benchmarks.swarm.plain_model import PlainLlama, PlainMuon, initialise
from swarmnode.data.corpus import Corpus
from swarmnode.data.indexed import IndexedCorpus, open_text
from swarmnode.data.sample import IGNORED, SampleBatch
from swarmnode.run.manifest import Manifest, read_signed

VERSION = 2
"""Version of these measurements. A change that alters curves increments it, and journals are measured anew."""

WARMUP_SAMPLES = 512  # the demo's manifest: linear from zero, constant from there on
# The demo's manifest, and LLaMA (arXiv 2302.13971).
BETAS = (0.9, 0.95)
EPS = 1e-8
CLIP_NORM = 1.0
LOOK_SAMPLES = 256
"""Looks are at multiples of it, so that every batch size of the grid meets them exactly. They come in steps of a
32nd of the samples so far, rounded down to a power of two: eight lie in the neighbourhood that is smoothed over."""

MEAN_SHARE = 0.07  # age of the mean, as a share of the samples so far: the manifest's inner.average_share
MEAN_UPDATES = 16  # updates of the mean within its age, as in the swarm

HELD_OUT_BATCH = 32  # guess: samples of a held-out forward pass


@dataclass(frozen=True, slots=True)
class GridPoint:
    """A point of the grid. `rate` is the peak rate of AdamW, or of Muon on the layers' matrices; then AdamW with
    `rate_elsewhere` trains embedding, head and norms."""

    optimizer: str
    batch: int
    rate: float
    rate_elsewhere: float = 3e-3  # of Muon; the demo's manifest
    momentum: float = 0.95  # of Muon: Jordan, 2024
    delay: str = ""  # of each gradient, by a step: "late", or "corrected"; "": none

    def __str__(self) -> str:
        text = f"{self.optimizer}, batch {self.batch}, rate {self.rate:g}{self.delay and ', ' + self.delay}"
        if self.optimizer != "muon":
            return text
        return f"{text} ({self.rate_elsewhere:g} elsewhere), momentum {self.momentum:g}"


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """Task of one process: train `samples`, or for `seconds` of training if that ends sooner."""

    manifest: str
    cache: str
    setting: GridPoint
    samples: int
    seconds: float | None = None
    threads: int = 1
    seed: int = 0
    bf16: bool = False
    device: str = "cpu"
    data: str = ""  # folder of the run's data set or tokenizer

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainingTask:
        raw: dict[str, Any] = json.loads(text)
        return cls(**raw | {"setting": GridPoint(**raw["setting"])})


@dataclass(frozen=True, slots=True)
class LossPoint:
    """Held-out nats a token after `samples`, of the weights and of their running mean; seconds of training so far,
    without the looks."""

    samples: int
    nats: float
    core_s: float
    wall_s: float
    mean_nats: float


def looks_from(samples: int) -> Iterator[int]:
    """Sample counts of the evaluations after `samples`, endless."""
    while True:
        share = max(1, samples // (32 * LOOK_SAMPLES))
        step = LOOK_SAMPLES * (1 << (share.bit_length() - 1))
        samples = (samples // step + 1) * step
        yield samples


def train(task: TrainingTask, manifest: Manifest, corpus: Corpus | IndexedCorpus) -> list[LossPoint]:
    """Train by `task` and return its evaluations; the last one is at its end."""
    model = manifest.model
    setting = task.setting
    net = PlainLlama(model)
    initialise(net, model, manifest.seed)
    net.to(task.device)
    chosen = optimizers(net, setting, manifest.inner.weight_decay, torch.bfloat16 if task.bf16 else torch.float32)
    mean = Mean(list(net.parameters()))
    delay = Delay(list(net.parameters()), setting.delay)
    clock = _Clock()
    found: list[LossPoint] = []
    looks = looks_from(0)
    due = next(looks)
    samples = 0
    while True:
        over = samples >= task.samples or (task.seconds is not None and clock.read()[1] >= task.seconds)
        if samples >= due or over:
            core_s, wall_s = clock.read()
            nats = held_out(net, manifest, corpus, task)
            with mean.in_place():
                mean_nats = held_out(net, manifest, corpus, task)
            found.append(LossPoint(samples, nats, core_s, wall_s, mean_nats))
            clock.set(core_s, wall_s)
            due = next(looks)
        if over:
            return found
        inputs, targets = tensors(corpus.batch(range(samples, samples + setting.batch)), task.device)
        samples += setting.batch
        one_step(net, chosen, inputs, targets, samples, _autocast(task), delay.before_the_last_step())
        delay.correct()
        mean.see(samples)


def one_step(
    net: torch.nn.Module,
    chosen: Sequence[torch.optim.Optimizer],
    inputs: Tensor,
    targets: Tensor,
    samples: int,
    autocast: contextlib.AbstractContextManager[object],
    weights: contextlib.AbstractContextManager[object] | None = None,
) -> Tensor:
    """One step with `inputs` and `targets` [B, T], the last of `samples` samples. Returns the loss before it.

    `weights`: context in which the parameters are those that the gradient is taken at."""
    with weights or contextlib.nullcontext():
        with autocast:
            logits = net(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
    for optimizer in chosen:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * min(1.0, samples / WARMUP_SAMPLES)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.detach()


class Mean:
    """A running mean of `parameters` whose age is MEAN_SHARE of the samples (power function EMA, arXiv 2312.02696)."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [parameter.data for parameter in parameters]
        self._means = [parameter.clone() for parameter in self._parameters]
        self._last = 0

    @torch.no_grad()
    def see(self, samples: int) -> None:
        """Update the mean with the parameters after `samples` samples."""
        if (samples - self._last) * MEAN_UPDATES < MEAN_SHARE * samples:
            return
        kept = (self._last / samples) ** (1.0 / MEAN_SHARE - 1.0)
        torch._foreach_lerp_(self._means, self._parameters, 1.0 - kept)
        self._last = samples

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the parameters are their mean."""
        kept = [parameter.clone() for parameter in self._parameters]
        torch._foreach_copy_(self._parameters, self._means)
        try:
            yield
        finally:
            torch._foreach_copy_(self._parameters, kept)


class Delay:
    """Gradients of the weights of a step ago, as a pipeline without bubbles takes them: U[t], the step that the
    optimizer takes at W[t], follows the gradient at W[t-1]. `kind` "corrected": W[t+1] = W[t] + 2 U[t] - U[t-1] (arXiv
    2606.30634); "late": W[t+1] = W[t] + U[t]; "": no delay."""

    def __init__(self, parameters: Sequence[Tensor], kind: str) -> None:
        assert kind in ("", "late", "corrected"), kind
        self._parameters = [parameter.data for parameter in parameters] if kind else []
        self._before = [parameter.clone() for parameter in self._parameters]
        self._now = [parameter.clone() for parameter in self._parameters]
        self._last = [torch.zeros_like(parameter) for parameter in self._parameters] if kind == "corrected" else []

    @contextlib.contextmanager
    def before_the_last_step(self) -> Iterator[None]:
        """Context in which the parameters are as they were before the last step."""
        if not self._parameters:
            yield
            return
        torch._foreach_copy_(self._now, self._parameters)
        torch._foreach_copy_(self._parameters, self._before)
        try:
            yield
        finally:
            torch._foreach_copy_(self._parameters, self._now)
            torch._foreach_copy_(self._before, self._now)

    @torch.no_grad()
    def correct(self) -> None:
        """Correct the step that the optimizer just took."""
        if not self._last:
            return
        steps = torch._foreach_sub(self._parameters, self._now)
        torch._foreach_add_(self._parameters, steps)
        torch._foreach_sub_(self._parameters, self._last)
        self._last = list(steps)


def optimizers(
    net: PlainLlama, setting: GridPoint, weight_decay: float, dtype: torch.dtype
) -> list[torch.optim.Optimizer]:
    """Parameter groups: weight decay for all but norms."""
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
def held_out(net: PlainLlama, manifest: Manifest, corpus: Corpus | IndexedCorpus, task: TrainingTask) -> float:
    """Nats per token on the held-out samples of the swarm's validations."""
    wanted = manifest.pipeline.validation_samples
    total = 0.0
    count = 0
    for first in range(0, wanted, HELD_OUT_BATCH):
        batch = corpus.validation_batch(first, min(HELD_OUT_BATCH, wanted - first), wanted)
        if not len(batch):
            break
        inputs, targets = tensors(batch, task.device)
        with _autocast(task):
            logits = net(inputs)
        flat = logits.flatten(0, 1).float()
        total += float(F.cross_entropy(flat, targets, reduction="sum", ignore_index=IGNORED))
        count += int((targets != IGNORED).sum())
    return total / max(1, count)


def _autocast(task: TrainingTask) -> torch.autocast:
    return torch.autocast(torch.device(task.device).type, torch.bfloat16, enabled=task.bf16)


def tensors(batch: SampleBatch, device: str) -> tuple[Tensor, Tensor]:
    """(token ids [B, T], targets [B · T]) on `device`, int64"""
    inputs = torch.from_numpy(batch.tokens[:, :-1].astype("int64"))
    return inputs.to(device), torch.from_numpy(batch.targets()).flatten().to(device)


class _Clock:
    """Processor and wall seconds of this process since creation or reset."""

    def __init__(self) -> None:
        self._core = time.process_time()
        self._wall = time.perf_counter()

    def read(self) -> tuple[float, float]:
        return time.process_time() - self._core, time.perf_counter() - self._wall

    def set(self, core_s: float, wall_s: float) -> None:
        self._core = time.process_time() - core_s
        self._wall = time.perf_counter() - wall_s


def main(arguments: list[str]) -> int:
    """Train by the task in `arguments` and print its evaluations."""
    task = TrainingTask.from_json(arguments[0])
    torch.set_num_threads(task.threads)
    _, manifest = read_signed(Path(task.manifest))
    manifest = dataclasses.replace(manifest, seed=manifest.seed + task.seed)
    corpus = open_text(manifest, Path(task.data) if task.data else None, Path(task.cache))
    looks = train(task, manifest, corpus)
    sys.stdout.write(json.dumps({"looks": [dataclasses.asdict(look) for look in looks]}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Train a run's base model in one plain PyTorch process, to compare with a swarm: `python plain.py RUN --samples N`.

It reads the swarm's numbered samples in their order, with the optimizer, batch and learning rates of the manifest, and
measures the held-out samples of the swarm's validations. Model and passes are those of transformers.
`--also EXPORT` measures a model that `swarmnode export` wrote. Prints one JSON line for each measurement.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from swarmnode.data.corpus import Corpus
from swarmnode.data.indexed import IndexedCorpus, open_text
from swarmnode.data.sample import IGNORED, SampleBatch
from swarmnode.run.manifest import Manifest, read_signed
from swarmnode.model.device import autocasts
from swarmnode.model.optimizer import learning_rate
from swarmnode.base.user_folders import default_cache

MICROBATCH = 4  # guess: samples of a pass; a batch is the mean of several


class Adapted(nn.Module):
    """A frozen Linear and the product of two small matrices beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.linear = linear
        self.scale = alpha / rank
        self.a = nn.Parameter(torch.empty(rank, linear.in_features).uniform_(-1, 1) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) + F.linear(F.linear(x, self.a), self.b) * self.scale
        return found


def adapt(model: nn.Module, manifest: Manifest) -> None:
    """Freeze `model` and put adapters beside the matrices that the manifest names."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in manifest.training.targets:
                setattr(module, name, Adapted(child, manifest.training.rank, manifest.training.alpha))


def optimizers(model: nn.Module, manifest: Manifest) -> list[torch.optim.Optimizer]:
    """AdamW for all parameters, or Muon for the matrices of the layers and AdamW for the others."""
    inner = manifest.inner
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    muon = inner.optimizer == "muon"
    matrices = [value for name, value in trained.items() if muon and value.dim() == 2 and ".layers." in name]
    others = [value for value in trained.values() if not any(value is one for one in matrices)]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [
                {"params": [one for one in others if one.dim() > 1], "weight_decay": inner.weight_decay},
                {"params": [one for one in others if one.dim() == 1], "weight_decay": 0.0},
            ],
            betas=(inner.beta1, inner.beta2),
            eps=inner.eps,
        )
    ]
    if matrices:
        found.append(
            torch.optim.Muon(matrices, 0.0, inner.weight_decay, inner.muon_momentum, adjust_lr_fn="match_rms_adamw")
        )
    return found


def tensors(batch: SampleBatch) -> tuple[Tensor, Tensor]:
    """(token ids [B, T], targets [B * T])"""
    return torch.from_numpy(batch.tokens[:, :-1].astype("int64")), torch.from_numpy(batch.targets()).flatten()


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts("cpu")):
        logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=IGNORED, reduction=reduction)


@torch.no_grad()
def held_out(model: nn.Module, manifest: Manifest, corpus: Corpus | IndexedCorpus) -> float:
    """Nats a token on the held-out samples of the swarm's validations."""
    wanted = manifest.pipeline.validation_samples
    total = 0.0
    count = 0
    for first in range(0, wanted, MICROBATCH):
        inputs, targets = tensors(corpus.validation_batch(first, min(MICROBATCH, wanted - first), wanted))
        total += float(loss_of(model, inputs, targets, "sum"))
        count += int((targets != IGNORED).sum())
    return total / count


def train(model: nn.Module, manifest: Manifest, corpus: Corpus | IndexedCorpus, samples: int) -> None:
    """Train `samples` samples in the order of their numbers."""
    batch = manifest.inner.inner_batch
    trained = optimizers(model, manifest)
    for first in range(0, samples, batch):
        for at in range(first, first + batch, MICROBATCH):
            size = min(MICROBATCH, first + batch - at)
            inputs, targets = tensors(corpus.batch(range(at, at + size)))
            (loss_of(model, inputs, targets) * size / batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), manifest.inner.clip_norm)
        for optimizer in trained:
            peak = (
                manifest.inner.muon_learning_rate
                if isinstance(optimizer, torch.optim.Muon)
                else manifest.inner.learning_rate
            )
            for group in optimizer.param_groups:
                group["lr"] = peak * learning_rate(manifest.inner, first) / manifest.inner.learning_rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--samples", type=int, default=0, help="train so many; 0: only measure")
    parser.add_argument("--also", type=Path, help="a model to measure: of `swarmnode export`")
    parser.add_argument("--threads", type=int, default=2)
    told = parser.parse_args()
    torch.set_num_threads(told.threads)
    torch.manual_seed(0)
    _, manifest = read_signed(told.run / "manifest.signed")
    corpus = open_text(manifest, told.run, default_cache())

    def say(what: str, model: nn.Module, seconds: float = 0.0) -> None:
        nats = held_out(model, manifest, corpus)
        sys.stdout.write(json.dumps({"model": what, "nats": round(nats, 4), "seconds": round(seconds, 1)}) + "\n")
        sys.stdout.flush()

    model = AutoModelForCausalLM.from_pretrained(told.run / "base", dtype=torch.float32)
    say("published", model)
    if told.also is not None:
        say(str(told.also), AutoModelForCausalLM.from_pretrained(told.also, dtype=torch.float32))
    if told.samples:
        if manifest.training.kind == "adapters":
            adapt(model, manifest)
        begun = time.perf_counter()
        train(model, manifest, corpus, told.samples)
        say(f"plain PyTorch, {told.samples} samples", model, time.perf_counter() - begun)


if __name__ == "__main__":
    main()

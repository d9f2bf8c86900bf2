"""What a mean of the last weights is worth against a decay of the learning rate, in one plain PyTorch process: torch's
AdamW or Muon, the demo's model and text.

`python -m swarmnode.bench.average [--optimizer muon] [--rate R] [--decay constant,linear] [--seeds 0,1]` prints a line
of JSON a run: held-out nats of the last weights, of their mean over the last 5 to 40 % of the samples, and of running
means (model/average.py) of several ages.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from swarmnode.data.corpus import Corpus, open_corpus
from swarmnode.manifest import PRESETS, InnerSpec, Manifest
from swarmnode.model.average import RunningMean
from swarmnode.model.device import autocasts
from swarmnode.model.llama import Llama, initial
from swarmnode.model.muon import orthogonalize
from swarmnode.model.schedule import learning_rate
from swarmnode.model.split import parameter_shapes, split
from swarmnode.place import default_cache

RATES = {"adamw": 1.5e-3, "muon": 0.012}  # measured: best at batches of 8 and 7,500 samples
OTHERS_RATE = 3e-3  # of what Muon leaves to AdamW: embedding, head, norms
MOMENTUM = 0.9  # of Muon, Nesterov
MATCH = 0.2  # Muon's update has the root mean square of AdamW's: arXiv 2502.16982, section 2.2
COOLDOWN = 0.2  # of the samples, with decay "wsd"
EVERY = 128  # samples between two weights that are kept
SHARES = (0.05, 0.1, 0.2, 0.4)
AGES = (0.03, 0.05, 0.07, 0.1, 0.15)
HELD_OUT, STEP = 512, 32

Update = Callable[[float], None]
"""One step on the gradients, at a share of the peak rate."""


def _model(manifest: Manifest) -> Llama:
    part = split(manifest.model, 1)[0]
    net, shapes = Llama(manifest.model, part), parameter_shapes(manifest.model, part)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(initial(manifest.model, manifest.seed, name, shapes[name]))
    return net


def _adamw(parameters: Sequence[Tensor], inner: InnerSpec, rate: float) -> Update:
    optimizer = torch.optim.AdamW(
        parameters, betas=(inner.beta1, inner.beta2), eps=inner.eps, weight_decay=inner.weight_decay
    )

    def step(share: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        optimizer.step()

    return step


def _muon(net: Llama, inner: InnerSpec, rate: float) -> Update:
    """Muon on the layers' matrices, AdamW on the rest."""
    named = list(net.named_parameters())
    matrices = [p for name, p in named if p.dim() == 2 and "layers" in name]
    moments = [torch.zeros_like(p) for p in matrices]
    others = _adamw([p for name, p in named if p.dim() != 2 or "layers" not in name], inner, OTHERS_RATE)

    @torch.no_grad()
    def step(share: float) -> None:
        others(share)
        for matrix, moment in zip(matrices, moments, strict=True):
            assert matrix.grad is not None
            moment.lerp_(matrix.grad, 1.0 - MOMENTUM)
            update = orthogonalize(torch.lerp(matrix.grad, moment, MOMENTUM))
            matrix.mul_(1.0 - rate * share * inner.weight_decay)
            matrix.add_(update, alpha=-rate * share * MATCH * math.sqrt(max(matrix.shape)))

    return step


def _loss(net: Llama, tokens: Tensor, reduction: str = "mean") -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts("cpu")):
        logits = net(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction=reduction)


def trained(
    net: Llama, manifest: Manifest, corpus: Corpus, update: Update, samples: int
) -> Iterator[tuple[int, Tensor]]:
    """(samples, all weights [P]) after every EVERY samples and after the last."""
    inner, done = manifest.inner, 0
    while done < samples:
        net.zero_grad(set_to_none=True)
        tokens = torch.from_numpy(corpus.batch(range(done, done + inner.inner_batch)).astype("int64"))
        torch.autograd.backward(_loss(net, tokens))
        torch.nn.utils.clip_grad_norm_(net.parameters(), inner.clip_norm)
        update(learning_rate(inner, done) / inner.learning_rate)
        done += inner.inner_batch
        if done % EVERY < inner.inner_batch or done >= samples:
            yield done, torch.nn.utils.parameters_to_vector(net.parameters()).detach().clone()


@torch.no_grad()
def held_out(net: Llama, weights: Tensor, corpus: Corpus) -> float:
    """Nats a token of `weights` [P] on HELD_OUT samples; `net` has them afterwards."""
    torch.nn.utils.vector_to_parameters(weights, net.parameters())
    total, count = 0.0, 0
    for first in range(0, HELD_OUT, STEP):
        tokens = torch.from_numpy(corpus.validation_batch(first, STEP, HELD_OUT).astype("int64"))
        total += float(_loss(net, tokens, "sum"))
        count += tokens[:, 1:].numel()
    return total / count


def measured(optimizer: str, manifest: Manifest, corpus: Corpus, samples: int) -> dict[str, float]:
    """Held-out nats by how the last weights were averaged."""
    net, rate = _model(manifest), manifest.inner.learning_rate
    muon = optimizer == "muon"
    update = _muon(net, manifest.inner, rate) if muon else _adamw(list(net.parameters()), manifest.inner, rate)
    kept = list(trained(net, manifest, corpus, update, samples))
    found = {"last": held_out(net, kept[-1][1], corpus)}
    for share in SHARES:
        late = [weights for done, weights in kept if done > samples * (1.0 - share)]
        found[f"mean of the last {share:.0%}"] = held_out(net, torch.stack(late).mean(0), corpus)
    for age in AGES:
        mean = RunningMean(age)
        for done, weights in kept:
            mean.see(weights, done)
        assert mean.value is not None
        found[f"running mean, age {age:.0%}"] = held_out(net, mean.value, corpus)
    return found


def main(arguments: Sequence[str]) -> int:
    """Print a line of JSON for each run asked for."""
    parser = argparse.ArgumentParser(prog="python -m swarmnode.bench.average")
    parser.add_argument("--optimizer", choices=sorted(RATES), default="adamw")
    parser.add_argument("--rate", type=float)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--samples", type=int, default=7500)
    parser.add_argument("--decay", default="constant,linear", help="of constant, linear, cosine, wsd")
    parser.add_argument("--seeds", default="0,1")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for seed in map(int, given.seeds.split(",")):
        for decay in given.decay.split(","):
            inner = replace(
                PRESETS["demo"].inner,
                learning_rate=given.rate or RATES[given.optimizer],
                warmup_samples=512,
                decay=decay,
                decay_samples=given.samples,
                cooldown_samples=round(COOLDOWN * given.samples),
                learning_rate_min_ratio=0.0,
                inner_batch=given.batch,
            )
            manifest = replace(PRESETS["demo"], seed=seed, inner=inner)
            corpus = open_corpus(manifest, Path.cwd(), default_cache())
            found = measured(given.optimizer, manifest, corpus, given.samples)
            said = {"optimizer": given.optimizer, "rate": inner.learning_rate, "decay": decay, "seed": seed}
            sys.stdout.write(json.dumps({**said, **{key: round(nats, 4) for key, nats in found.items()}}) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

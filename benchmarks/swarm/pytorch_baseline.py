"""Baseline of `bench swarm`: the run's whole model in one plain PyTorch process with torch's own AdamW, and matrix
products in bfloat16 if nodes would use it.

`python -m benchmarks.swarm.pytorch_baseline MANIFEST_SIGNED CACHE GLOBAL_BATCH MICROBATCH SECONDS THREADS` prints
one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from swarmnode.data.indexed import open_text
from swarmnode.manifest import read_signed
from swarmnode.model.decoder import Decoder
from swarmnode.model.device import autocasts
from swarmnode.model.optimizer import learning_rate
from swarmnode.model.split import initial, parameter_shapes, split

WARM_STEPS = 2


def main(arguments: list[str]) -> int:
    """Train for the given seconds and print the tokens per second."""
    path = Path(arguments[0])
    cache = Path(arguments[1])
    batch = int(arguments[2])
    micro = int(arguments[3])
    seconds = float(arguments[4])
    threads = int(arguments[5])
    torch.set_num_threads(threads)
    fast = autocasts("cpu")
    _, manifest = read_signed(path)
    corpus = open_text(manifest, None, cache)
    part = split(manifest.model, 1)[0]
    net = Decoder(manifest.model, part)
    with torch.no_grad():
        shapes = parameter_shapes(manifest.model, part)
        for name, parameter in net.named_parameters():
            parameter.copy_(initial(manifest.model, manifest.seed, name, shapes[name]))
    inner = manifest.inner
    optimizer = torch.optim.AdamW(
        net.parameters(), betas=(inner.beta1, inner.beta2), eps=inner.eps, weight_decay=inner.weight_decay, fused=True
    )
    steps = 0
    samples = 0
    begun = 0.0
    cpu = 0.0
    loss_sum = 0.0
    while True:
        if steps == WARM_STEPS:
            begun = time.perf_counter()
            cpu = time.process_time()
            samples_before = samples
        if steps > WARM_STEPS and time.perf_counter() - begun >= seconds:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(inner, samples)
        for first in range(samples, samples + batch, micro):
            tokens = torch.from_numpy(corpus.batch(range(first, first + micro)).tokens.astype("int64"))
            with torch.autocast("cpu", torch.bfloat16, enabled=fast):
                logits = net(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) * (micro / batch)
            torch.autograd.backward(loss)
            loss_sum = float(loss.detach()) * batch / micro
        torch.nn.utils.clip_grad_norm_(net.parameters(), inner.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        samples += batch
        steps += 1
    wall = time.perf_counter() - begun
    used = time.process_time() - cpu
    tokens_done = (samples - samples_before) * manifest.model.context
    found = {"tokens_per_s": tokens_done / wall, "tokens_per_core_s": tokens_done / used, "loss": loss_sum}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

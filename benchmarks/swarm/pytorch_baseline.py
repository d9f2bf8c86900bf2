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

from swarmnode.data.corpus import Corpus
from swarmnode.data.indexed import IndexedCorpus, open_text
from swarmnode.model.decoder import Decoder
from swarmnode.model.device import autocasts
from swarmnode.model.optimizer import learning_rate
from swarmnode.model.split import initial, parameter_shapes, split
from swarmnode.run.manifest import Manifest, read_signed

WARM_STEPS = 2


def main(arguments: list[str]) -> int:
    """Train for the given seconds and print the tokens per second."""
    batch = int(arguments[2])
    piece = int(arguments[3])
    seconds = float(arguments[4])
    torch.set_num_threads(int(arguments[5]))
    _, manifest = read_signed(Path(arguments[0]))
    trainer = Trainer(manifest, open_text(manifest, None, Path(arguments[1])), batch, piece)
    for _ in range(WARM_STEPS):
        trainer.step()
    samples = trainer.samples
    wall_s = time.perf_counter()
    cpu_s = time.process_time()
    while time.perf_counter() - wall_s < seconds or trainer.samples == samples:
        trainer.step()
    wall_s = time.perf_counter() - wall_s
    cpu_s = time.process_time() - cpu_s
    tokens = (trainer.samples - samples) * manifest.model.context
    found = {"tokens_per_s": tokens / wall_s, "tokens_per_core_s": tokens / cpu_s, "loss": trainer.loss}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


class Trainer:
    """The manifest's model trained in one process by PyTorch alone, in steps of `batch` samples, `piece` at once."""

    def __init__(self, manifest: Manifest, corpus: Corpus | IndexedCorpus, batch: int, piece: int) -> None:
        self._inner = manifest.inner
        self._corpus = corpus
        self._batch = batch
        self._piece = piece
        self._fast = autocasts("cpu")
        part = split(manifest.model, 1)[0]
        self._net = Decoder(manifest.model, part)
        shapes = parameter_shapes(manifest.model, part)
        with torch.no_grad():
            for name, parameter in self._net.named_parameters():
                parameter.copy_(initial(manifest.model, manifest.seed, name, shapes[name]))
        betas = (self._inner.beta1, self._inner.beta2)
        self._optimizer = torch.optim.AdamW(
            self._net.parameters(),
            betas=betas,
            eps=self._inner.eps,
            weight_decay=self._inner.weight_decay,
            fused=True,
        )
        self.samples = 0
        self.loss = 0.0  # nats per token, of the last piece

    def step(self) -> None:
        """One optimizer step."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._inner, self.samples)
        for first in range(self.samples, self.samples + self._batch, self._piece):
            samples = self._corpus.batch(range(first, first + self._piece))
            tokens = torch.from_numpy(samples.tokens.astype("int64"))
            with torch.autocast("cpu", torch.bfloat16, enabled=self._fast):
                logits = self._net(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            torch.autograd.backward(loss * (self._piece / self._batch))
            self.loss = float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self._net.parameters(), self._inner.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.samples += self._batch


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

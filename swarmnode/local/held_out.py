"""Held-out loss of models made of what is kept of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.data.corpus import Corpus, open_corpus
from swarmnode.manifest import Manifest

if TYPE_CHECKING:
    from swarmnode.model.gather import Gathered
    from swarmnode.model.llama import Llama

BATCH_TOKENS = 4096  # guess: logits of so many tokens at once fit everywhere


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Nats per token on `tokens` held-out tokens; `replicas` names each chain of single replicas with its loss."""

    kind: str
    run_id: str
    round: int
    samples: int
    tokens: int
    merged: float
    replicas: tuple[tuple[str, float], ...]
    spread: float

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "run": self.run_id,
            "round": self.round,
            "samples": self.samples,
            "tokens": self.tokens,
            "merged": {"loss": self.merged, "perplexity": math.exp(min(self.merged, 700.0))},
            "replicas": [{"replicas": names, "loss": loss} for names, loss in self.replicas],
            "spread": self.spread,
        }


def evaluate(found: Gathered, folder: Path | None, cache: Path, samples: int | None) -> Evaluation:
    """The loss of the merged model, and where there are several replicas of each chain of them, on the first `samples`
    (None: the manifest's) held-out samples. Raises DataError when the run's text cannot be read here."""
    from swarmnode.model.gather import chains, merged, spread
    from swarmnode.model.sample import whole_model

    manifest = found.manifest
    corpus = open_corpus(manifest, folder, cache)
    wanted = samples or manifest.pipeline.validation_samples
    whole, tokens = _loss(whole_model(manifest.model, merged(found)), manifest, corpus, wanted)
    replicas = []
    if found.replicas > 1:
        for names, tensors in chains(found):
            loss, _ = _loss(whole_model(manifest.model, tensors), manifest, corpus, wanted)
            replicas.append((names, loss))
    return Evaluation(
        kind=found.kind,
        run_id=found.run_id,
        round=found.round,
        samples=found.samples,
        tokens=tokens,
        merged=whole,
        replicas=tuple(replicas),
        spread=spread(found) if replicas else 0.0,
    )


def _loss(llama: Llama, manifest: Manifest, corpus: Corpus, wanted: int) -> tuple[float, int]:
    """(nats per token, tokens)"""
    from swarmnode.model.sample import loss_of

    step = max(1, BATCH_TOKENS // manifest.model.context)
    total, count = 0.0, 0
    for first in range(0, wanted, step):
        batch = corpus.validation_batch(first, min(step, wanted - first), wanted)
        if len(batch) == 0:
            break
        loss, tokens = loss_of(llama, batch)
        total += loss
        count += tokens
    return total / max(1, count), count

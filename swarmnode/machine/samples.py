"""The corpus for a feeder: numbered samples as token tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarmnode.data.corpus import Corpus
from swarmnode.manifest import Manifest
from swarmnode.pipeline.feeder import Samples
from swarmnode.ports import WireTensor


class CorpusSamples(Samples):
    """pipeline.feeder.Samples over a corpus on this machine's disk."""

    def __init__(self, corpus: Corpus, manifest: Manifest) -> None:
        self._corpus = corpus
        self.digest = corpus.digest
        wanted, step = manifest.pipeline.validation_samples, manifest.inner.microbatch
        batches = (corpus.validation_batch(first, step, wanted) for first in range(0, wanted, step))
        self._held_out = [batch.to_wire() for batch in batches if len(batch)]

    def train(self, indices: Sequence[int]) -> WireTensor:
        """Samples `indices` in wire form (data/sample.py)."""
        return self._corpus.batch(np.asarray(indices, dtype=np.int64)).to_wire()

    async def again(self, indices: Sequence[int]) -> WireTensor | None:
        return self.train(indices)

    def held_out(self) -> Sequence[WireTensor]:
        """The run's held-out microbatches, the same on every call."""
        return self._held_out

"""The corpus as a feeder reads it: numbered samples as token tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swarmnode.data.corpus import Corpus
from swarmnode.manifest import Manifest
from swarmnode.ports import WireTensor

DTYPES = {np.dtype("<u2"): "u16", np.dtype("<u4"): "u32"}


class CorpusSamples:
    """pipeline.feeder.Samples over a corpus on this machine's disk."""

    def __init__(self, corpus: Corpus, manifest: Manifest) -> None:
        self._corpus = corpus
        wanted, step = manifest.pipeline.validation_samples, manifest.inner.microbatch
        batches = (corpus.validation_batch(first, step, wanted) for first in range(0, wanted, step))
        self._held_out = [_tensor(batch) for batch in batches if len(batch)]

    def train(self, indices: Sequence[int]) -> WireTensor:
        """Samples `indices` as u16 or u32 [B, T+1]."""
        return _tensor(self._corpus.batch(np.asarray(indices, dtype=np.int64)))

    def again(self, indices: Sequence[int]) -> WireTensor | None:
        return self.train(indices)

    def held_out(self) -> Sequence[WireTensor]:
        """The run's held-out microbatches, always the same."""
        return self._held_out


def _tensor(batch: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]) -> WireTensor:
    whole = np.ascontiguousarray(batch)
    return WireTensor(DTYPES[whole.dtype], whole.shape, whole.data.cast("B"))

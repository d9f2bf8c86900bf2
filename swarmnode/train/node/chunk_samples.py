"""Numbered samples, as a feeder asks for them: of the run's data set, fetched before they are read, or of a corpus on
this machine's disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from swarmnode.base.ports import WireTensor
from swarmnode.base.token_bucket import TokenBucket
from swarmnode.data.corpus import Corpus
from swarmnode.data.index import Index
from swarmnode.data.indexed import IndexedCorpus
from swarmnode.keep.transfer.chunk_set import ChunkSet
from swarmnode.net.membership.judge import ASKED_S
from swarmnode.run.manifest import Manifest
from swarmnode.train.pipeline.feeder import Samples

AGAIN_EVERY_S = 60.0  # guess: a chunk fetched only to check another feeder costs 0.6 Mbit/s at this pace
AGAIN_S = ASKED_S  # an auditor waits no longer for it


class ChunkSamples(Samples):
    """pipeline.feeder.Samples over a data set that is open."""

    def __init__(self, data: ChunkSet[Index], manifest: Manifest) -> None:
        """Raises DataError when the data set does not fit the manifest."""
        self._data = data
        assert data.store is not None
        self._corpus = IndexedCorpus(manifest, data.index, data.store.read)
        self._wanted = manifest.pipeline.validation_samples
        self._step = manifest.inner.microbatch
        self._block = manifest.data.block_samples
        self._again = TokenBucket.full(1.0 / AGAIN_EVERY_S, 2.0)
        self.digest = data.digest
        self.span = self._corpus.span

    def chunks_of(self, indices: Sequence[int]) -> list[int]:
        """The chunks that hold the text of `indices`."""
        return self._corpus.chunks_of(indices)

    def here(self, indices: Sequence[int]) -> bool:
        assert self._data.store is not None
        return all(map(self._data.store.in_memory, self._corpus.chunks_of(indices)))

    async def fetch(self, indices: Sequence[int]) -> None:
        for number in self._corpus.chunks_of(indices):
            await self._data.ensure(number)

    async def in_vain(self, indices: Sequence[int]) -> None:
        await self._data.in_vain(self._corpus.chunks_of(indices))

    async def fetch_held_out(self) -> None:
        for number in self._corpus.held_out_chunks(self._wanted):
            await self._data.ensure(number)

    async def prefetch(self, coming: Callable[[], Iterable[int]], changed: asyncio.Event) -> None:
        def chunks() -> Iterable[int]:
            for block in coming():
                yield from self._corpus.chunks_of(range(block * self._block, (block + 1) * self._block))

        await self._data.prefetch(chunks, changed)

    def train(self, indices: Sequence[int]) -> WireTensor:
        return self._corpus.batch(indices).to_wire()

    async def again(self, indices: Sequence[int]) -> WireTensor | None:
        """The tokens of `indices` again; None when they are not here and cannot be fetched.

        Fetches for such requests are rate-limited, so that an auditor cannot make this node fetch the whole data set.
        """
        if not self.here(indices):
            if not self._again.take(asyncio.get_running_loop().time()):
                return None
            try:
                async with asyncio.timeout(AGAIN_S):
                    await self.fetch(indices)
            except TimeoutError:
                return None
        return self.train(indices)

    def held_out(self) -> Sequence[WireTensor]:
        batches = (
            self._corpus.validation_batch(first, self._step, self._wanted)
            for first in range(0, self._wanted, self._step)
        )
        return [batch.to_wire() for batch in batches if len(batch)]


class CorpusSamples(Samples):
    """pipeline.feeder.Samples over a corpus on this machine's disk."""

    def __init__(self, corpus: Corpus | IndexedCorpus, manifest: Manifest) -> None:
        self._corpus = corpus
        self.digest = corpus.digest
        wanted = manifest.pipeline.validation_samples
        step = manifest.inner.microbatch
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

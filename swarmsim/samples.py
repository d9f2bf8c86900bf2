"""Synthetic text for the virtual world."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarmnode.base.ports import WireTensor
from swarmnode.run.manifest import Manifest
from swarmnode.train.pipeline.feeder import Samples
from swarmsim.replica import MARK, fake


class FakeSamples(Samples):
    """pipeline.feeder.Samples: each microbatch carries a unique number, recognised at every stage."""

    def __init__(self, manifest: Manifest, feeder: int) -> None:
        self._shape = (manifest.model.context + 1,)
        self._batch = manifest.inner.microbatch
        self._held_out = math.ceil(manifest.pipeline.validation_samples / self._batch)
        self._feeder = feeder
        self._serial = 0

    def train(self, indices: Sequence[int]) -> WireTensor:
        self._serial += 1
        return self._tensor(len(indices))

    async def again(self, indices: Sequence[int]) -> WireTensor | None:
        return None

    def held_out(self) -> Sequence[WireTensor]:
        return [self._tensor(self._batch) for _ in range(self._held_out)]

    def _tensor(self, samples: int) -> WireTensor:
        row = MARK.pack(self._feeder << 40 | self._serial)
        return fake("u16", (samples, *self._shape), 2, row)

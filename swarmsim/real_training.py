"""Real tensors in the virtual world: the live node's own replica, and its own text or a learnable pattern."""

from __future__ import annotations

import functools
import pathlib
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from swarmnode.app.machine.replica import TorchReplica
from swarmnode.base.ports import Replica, WireTensor
from swarmnode.base.user_folders import default_cache
from swarmnode.data.indexed import open_text
from swarmnode.model.device import use_one_thread
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.chunk_samples import CorpusSamples
from swarmnode.train.pipeline.feeder import Samples

CHAIN_WIDTH = 4  # tokens that may follow a token: the reachable loss is at most log(CHAIN_WIDTH) nats


def torch_replica(manifest: Manifest, stage: int) -> Replica:
    """The daemon's replica, with one thread: with two a life took fourteen times as much CPU (real-churn)."""
    use_one_thread()
    return TorchReplica(manifest, stage)


@functools.lru_cache(maxsize=1)
def text(manifest: Manifest) -> CorpusSamples:
    """The text that a live node of `manifest` would read. Call it before the virtual world begins. Files are below
    the working directory."""
    return CorpusSamples(open_text(manifest, pathlib.Path.cwd(), default_cache()), manifest)


class PatternSamples(Samples):
    """pipeline.feeder.Samples: sample i is a walk on a random graph of tokens, drawn from the run's seed."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        rng = random.Random(f"chain {manifest.seed}")
        vocabulary = manifest.model.vocabulary
        self._next = np.array(
            [[int(rng.random() * vocabulary) for _ in range(CHAIN_WIDTH)] for _ in range(vocabulary)], dtype="<u2"
        )

    def _walk(self, index: int) -> npt.NDArray[np.uint16]:
        rng = random.Random(f"walk {self._manifest.seed} {index}")
        at = int(rng.random() * self._manifest.model.vocabulary)
        walk = np.empty(self._manifest.model.context + 1, dtype="<u2")
        for position in range(len(walk)):
            walk[position] = at
            at = int(self._next[at, int(rng.random() * CHAIN_WIDTH)])
        return walk

    def train(self, indices: Sequence[int]) -> WireTensor:
        walks = np.stack([self._walk(index) for index in indices])
        return WireTensor("u16", walks.shape, walks.tobytes())

    async def again(self, indices: Sequence[int]) -> WireTensor | None:
        return self.train(indices)

    def held_out(self) -> Sequence[WireTensor]:
        step = self._manifest.inner.microbatch
        wanted = self._manifest.pipeline.validation_samples
        return [
            self.train([-1 - i for i in range(first, min(first + step, wanted))]) for first in range(0, wanted, step)
        ]

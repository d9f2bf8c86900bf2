"""The run's data set on a node, and the ports of a node that may feed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnode.data.chunk_store import ChunkCache
from swarmnode.data.index import INDEX_FILE, Index, parse_index
from swarmnode.ids import PeerId
from swarmnode.manifest import Manifest
from swarmnode.node.chunk_set import ChunkSet, SetKind
from swarmnode.node.chunk_sources import WebReader
from swarmnode.ports import Telemetry

DATA_SET = SetKind("data.index", INDEX_FILE, parse_index, published=True)


@dataclass(frozen=True, slots=True)
class DataPorts:
    """A run's data set as a node is given it. `web` None: chunks come from members alone. `meeting_points` are members
    without work of their own, which may hold chunks."""

    set: DataSet
    web: WebReader | None = None
    meeting_points: Callable[[], Sequence[PeerId]] = tuple


class DataSet(ChunkSet[Index]):
    """The run's text."""

    def __init__(self, manifest: Manifest, cache: ChunkCache, folder: Path | None, telemetry: Telemetry) -> None:
        """`folder` is one that this machine's user named, with a data set of `data make` in it; None: there is none."""
        super().__init__(DATA_SET, bytes.fromhex(manifest.data.index), cache, folder, telemetry)

    def opened(self, index: Index, where: str) -> None:
        self._telemetry.event(
            "data.opened",
            digest=self.digest.hex(),
            tokens_train=index.train.tokens,
            tokens_validation=index.validation.tokens,
            note=f"{index.count} chunks{where}",
        )

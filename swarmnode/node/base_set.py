"""The pretrained model that a run starts from, on a node: its index, and the chunks of it that are on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnode.data.base_index import BASE_INDEX_FILE, BaseIndex, parse_base
from swarmnode.data.chunk_store import ChunkCache
from swarmnode.ids import PeerId
from swarmnode.manifest import Manifest
from swarmnode.node.chunk_set import ChunkSet, SetKind
from swarmnode.node.chunk_sources import WebReader
from swarmnode.ports import Telemetry

BASE_SET = SetKind("base.index", BASE_INDEX_FILE, parse_base, published=False)


class BaseSet(ChunkSet[BaseIndex]):
    """The base model's index, and the chunks of it that are on this machine."""

    def __init__(self, manifest: Manifest, cache: ChunkCache, folder: Path | None, telemetry: Telemetry) -> None:
        """`folder` is one that this machine's user named, with the model's files in it; None: there is none."""
        super().__init__(BASE_SET, bytes.fromhex(manifest.base.index), cache, folder, telemetry)

    @property
    def folder_without_index(self) -> Path | None:
        return self._folder  # as it was published: every chunk of it is verified

    def opened(self, index: BaseIndex, where: str) -> None:
        note = f"{len(index.tensors)} parameters in {index.count} chunks{where}"
        self._telemetry.event("base.opened", digest=self.digest.hex(), note=note)


@dataclass(frozen=True, slots=True)
class BasePorts:
    """A run's base model as a node is given it. `web` None: chunks come from members alone. `meeting_points` are
    members without work of their own, which may hold chunks."""

    set: BaseSet
    web: WebReader | None = None
    meeting_points: Callable[[], Sequence[PeerId]] = tuple

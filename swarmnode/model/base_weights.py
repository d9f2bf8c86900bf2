"""The base model's weights on this machine, for whoever makes a whole model of a run's adapters."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.base.errors import DataError
from swarmnode.data.base_index import BASE_INDEX_FILE, FOLDER, BaseIndex, local_base
from swarmnode.data.chunk_store import find_index

if TYPE_CHECKING:
    from torch import Tensor

    from swarmnode.model.frozen import BaseWeights
    from swarmnode.model.gather import Gathered


def base_weights(found: Gathered) -> BaseWeights | None:
    """The weights that the adapters in `found` change; None if it holds whole models, or the run's seed gives them.
    Raises DataError when the run's folder does not hold its base model."""
    from swarmnode.model.adapter import has_adapters

    manifest = found.manifest
    if found.whole or not has_adapters(manifest) or not manifest.base.index:
        return None
    folder = None if found.run_folder is None else found.run_folder / FOLDER
    index = local_base(folder, bytes.fromhex(manifest.base.index))
    if folder is None or index is None:
        place = "a bucket" if folder is None else str(folder)
        raise DataError(
            f"these are adapters of base model {manifest.base.index[:16]}..., which is not in {place}: copy them into"
            " the run's folder, beside the base that `swarmnode init --from` made there"
        )
    held = find_index(folder, index.digest, BASE_INDEX_FILE)
    assert held is not None
    return _FolderWeights(held[0], index)


class _FolderWeights:
    """BaseWeights of a folder with the files of `index`, each chunk verified."""

    def __init__(self, folder: Path, index: BaseIndex) -> None:
        self._folder = folder
        self._index = index

    def __call__(self, name: str, shape: tuple[int, ...]) -> Tensor:
        import torch

        from swarmnode.model.tensor import decode

        if (tensor := self._index.tensors.get(name)) is None or tensor.shape != shape:
            raise DataError(f"{self._folder}: the base model has no {name} of shape {list(shape)}")
        weight = torch.empty(shape)
        for number, spans in self._index.spans([name]).items():
            chunk = self._index.chunk(number)
            with (self._folder / chunk.shard).open("rb") as file:
                file.seek(chunk.offset)
                raw = file.read(chunk.nbytes)
            if hashlib.sha256(raw).digest() != chunk.sha256:
                raise DataError(f"{self._folder / chunk.shard}: not the run's base model from byte {chunk.offset} on")
            for span in spans:
                weight.view(-1)[span.first : span.first + span.elements] = decode(span.values(raw)).float()
        return weight

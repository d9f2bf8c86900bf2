"""Whether the head of a published model is its token table: settled from config.json and files as transformers does it.

Transformers 5 (`PreTrainedModel.tie_weights`): where config.json ties the two and the files hold both with different
values, the files count. Where they hold one, it is both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.data.base_index import ITEMSIZES
from swarmnode.data.base_maker import ModelFiles, StoredTensor
from swarmnode.data.index import CHUNK_NBYTES
from swarmnode.model.split import HEAD, TABLE


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """`shared`: the published tensor that is table and head, "" where each is one of its own. `told`: what the files
    say and config.json does not, one line, else ""."""

    shared: str = ""
    told: str = ""


def published_head(tied: bool, stored: Mapping[str, StoredTensor], files: ModelFiles) -> PublishedHead:
    """The head of a model that is `tied` by its config.json. Raises DataError for a file that cannot be read."""
    if not tied:
        return PublishedHead()
    table = stored.get(TABLE)
    head = stored.get(HEAD)
    if head is None:
        return PublishedHead(TABLE)
    if table is None:
        return PublishedHead(HEAD, f"the files hold {HEAD} alone, which is the token table, too")
    if _equal(table, head, files):
        return PublishedHead(TABLE)
    why = f"config.json ties the head to the token table, but the files hold another {HEAD}"
    return PublishedHead("", f"{why}: it stays a matrix of its own, as in transformers")


def _equal(one: StoredTensor, other: StoredTensor, files: ModelFiles) -> bool:
    """Whether two tensors have the same numbers. Unknown formats are equal to none."""
    if one.shape != other.shape or not {one.dtype, other.dtype} <= ITEMSIZES.keys():
        return False
    size = ITEMSIZES[one.dtype]
    step = CHUNK_NBYTES // max(ITEMSIZES.values())
    count = one.nbytes // size
    for first in range(0, count, step):
        elements = min(step, count - first)
        mine, theirs = (_numbers(tensor, first, elements, files) for tensor in (one, other))
        if not np.array_equal(mine, theirs):
            return False
    return True


def _numbers(tensor: StoredTensor, first: int, elements: int, files: ModelFiles) -> npt.NDArray[np.float32]:
    """`elements` numbers of `tensor` from `first` on; fewer where its file ends."""
    size = ITEMSIZES[tensor.dtype]
    raw = files.read(tensor.file, tensor.offset + first * size, elements * size)
    raw = raw[: len(raw) // size * size]
    if tensor.dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(raw, "<f2" if tensor.dtype == "F16" else "<f4").astype(np.float32)

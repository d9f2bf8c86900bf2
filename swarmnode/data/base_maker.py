"""Makes the base index of a pretrained model: reads the headers of its safetensors files, then hashes every chunk once.

Files come from strangers: each name, offset and size is checked before a byte of it is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from swarmnode.base.errors import DataError
from swarmnode.data.base_index import (
    FILE_NBYTES_MAX,
    ITEMSIZES,
    SMALL_NBYTES_MAX,
    TENSORS_MAX,
    WEIGHT_FILE,
    BaseFile,
    BaseIndex,
    BaseTensor,
    object_of,
    parse_base,
)
from swarmnode.data.index import CHUNK_NBYTES
from swarmnode.data.lfs_pointer import LFS_POINTER, refuse_pointer

SINGLE_FILE = "model.safetensors"
SHARD_INDEX_FILE = "model.safetensors.index.json"
PREFIX = "model."
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
HEADER_NBYTES_MAX = 100_000_000  # the limit of the safetensors library itself
_LAYER = re.compile(r".*?layers\.([0-9]+)\.")


class ModelFiles(Protocol):
    """The files of a model, in a folder or on the web."""

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Bytes [offset, offset + nbytes) of the file; fewer where it ends before. Raises DataError."""
        ...

    def read_whole(self, name: str, nbytes_max: int) -> bytes | None:
        """The whole file; None when there is none. Raises DataError, also for a file that is longer."""
        ...


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """A parameter of the run: its shape, and the published tensor that it is."""

    shape: tuple[int, ...]
    source: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file: bytes [offset, offset + nbytes) of it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


Report = Callable[[int, int], None]
"""Called with (bytes hashed, bytes in all)."""


def json_file(files: ModelFiles, name: str) -> dict[str, Any] | None:
    """The JSON object in a file of the model; None without the file. Raises DataError."""
    raw = files.read_whole(name, SMALL_NBYTES_MAX)
    return None if raw is None else object_of(raw, name)


def stored_tensors(files: ModelFiles) -> dict[str, StoredTensor]:
    """Every tensor of the model by its published name, from the headers of its files. Raises DataError.

    A model that was saved without its head has names without `model.`; they are given with it, as transformers does.
    """
    tensors = _named_tensors(files)
    if any(name.startswith(PREFIX) for name in tensors):
        return tensors
    return {name if name.startswith("lm_head.") else PREFIX + name: tensor for name, tensor in tensors.items()}


def _named_tensors(files: ModelFiles) -> dict[str, StoredTensor]:
    # transformers looks in this order: a model saved anew leaves the index of its former shards behind.
    index = None if _first_byte(files, SINGLE_FILE) else json_file(files, SHARD_INDEX_FILE)
    tensors = dict[str, StoredTensor]()
    if index is None:
        _refuse_pickles(files)
        return _header(files, SINGLE_FILE)
    where = index.get("weight_map")
    if not isinstance(where, dict) or len(where) > TENSORS_MAX:
        raise DataError(f"{SHARD_INDEX_FILE}: no weight_map")
    for name in sorted({str(name) for name in where.values()}):
        if len(tensors := tensors | _header(files, name)) > TENSORS_MAX:
            raise DataError(f"{SHARD_INDEX_FILE}: its files hold more than {TENSORS_MAX} tensors")
    for tensor, name in where.items():
        if tensor not in tensors or tensors[tensor].file != name:
            raise DataError(f"{SHARD_INDEX_FILE} places {str(tensor)[:80]} in {str(name)[:80]}, which does not hold it")
    return tensors


def _refuse_pickles(files: ModelFiles) -> None:
    """Raises DataError where the weights lie in pickles alone, which are programs."""
    found = next((name for name in PICKLES if _first_byte(files, name)), "")
    if found and not _first_byte(files, SINGLE_FILE):
        raise DataError(
            f"{found}: weights in a pickle, which is a program and is not read; transformers makes safetensors of them:"
            " AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(OUT)"
        )


def _first_byte(files: ModelFiles, name: str) -> bytes:
    """The first byte of a file; none where it is empty, missing or cannot be read."""
    with contextlib.suppress(DataError):
        return files.read(name, 0, 1)
    return b""


def _header(files: ModelFiles, name: str) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file."""
    if not WEIGHT_FILE.fullmatch(name):
        raise DataError(f"{SHARD_INDEX_FILE}: {name[:80]!r} is no name of a file in the model's folder")
    begin = files.read(name, 0, 8)
    if len(begin) < 8:
        raise DataError(f"{name}: {len(begin)} bytes long; this is no safetensors file")
    nbytes = int.from_bytes(begin, "little")
    if not 2 <= nbytes <= HEADER_NBYTES_MAX:
        refuse_pointer(files.read(name, 0, len(LFS_POINTER)), name)
        raise DataError(f"{name}: a header of {nbytes} bytes; this is no safetensors file")
    raw = files.read(name, 8, nbytes)
    if len(raw) < nbytes:
        raise DataError(f"{name}: it ends in its header: the file is cut off")
    if len(tree := object_of(raw, f"{name}: the header of a safetensors file")) > TENSORS_MAX:
        raise DataError(f"{name}: a header of {len(tree)} tensors; at most {TENSORS_MAX}")
    tree.pop("__metadata__", None)
    return {str(tensor): _stored(name, str(tensor), entry, 8 + nbytes) for tensor, entry in tree.items()}


def _stored(file: str, name: str, entry: Any, data: int) -> StoredTensor:
    """One entry of a header; `data` is where its file's numbers begin."""
    wrong = DataError(f"{file}: the header's entry of {name[:80]} is damaged")
    if not isinstance(entry, dict):
        raise wrong
    dtype = entry.get("dtype")
    shape = entry.get("shape")
    offsets = entry.get("data_offsets")
    if type(dtype) is not str or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise wrong
    if not all(type(one) is int and 0 <= one <= FILE_NBYTES_MAX for one in (*shape, *offsets)) or len(shape) > 8:
        raise wrong
    begin, end = offsets
    if begin > end or (dtype in ITEMSIZES and end - begin != math.prod(shape) * ITEMSIZES[dtype]):
        raise wrong
    return StoredTensor(file, dtype, tuple(shape), data + begin, end - begin)


def make_base(
    files: ModelFiles, stored: Mapping[str, StoredTensor], wanted: Mapping[str, WantedTensor], report: Report
) -> BaseIndex:
    """The base index of the parameters `wanted`. Reads every chunk once, to hash it.

    Raises DataError when a tensor is missing, has another shape or an unknown format, or a file ends too early: all of
    this is found out before the first chunk is read, except the last.
    """
    tensors = {}
    order = sorted({tensor.file for tensor in stored.values()})
    for name, want in wanted.items():
        one = _source(want, stored)
        tensors[name] = BaseTensor(want.shape, one.dtype, order.index(one.file), one.offset)
    cuts = _chunks_of(tensors, len(order))
    total = sum(size for cut in cuts for _, size in cut)
    done = 0
    made = list[BaseFile]()
    for name, cut in zip(order, cuts, strict=True):
        hashes = []
        for start, size in cut:
            data = files.read(name, start, size)
            if len(data) < size:
                raise DataError(f"{name}: it ends at byte {start + len(data)}, its header says otherwise: cut off?")
            hashes.append(hashlib.sha256(data).digest())
            done += size
            report(done, total)
        nbytes = max((tensor.offset + tensor.nbytes for tensor in stored.values() if tensor.file == name), default=0)
        starts = tuple(start for start, _ in cut)
        sizes = tuple(size for _, size in cut)
        made.append(BaseFile(name, nbytes, starts, sizes, b"".join(hashes)))
    return parse_base(BaseIndex(tuple(made), tensors).canonical())


def _source(want: WantedTensor, stored: Mapping[str, StoredTensor]) -> StoredTensor:
    tensor = stored.get(want.source)
    if tensor is None:
        raise DataError(f"the model's files hold no tensor {want.source}, which config.json asks for")
    if tensor.dtype not in ITEMSIZES:
        known = ", ".join(ITEMSIZES)
        raise DataError(f"{tensor.file}: {want.source} has numbers of {tensor.dtype[:20]}; known are {known}")
    if tensor.shape != want.shape:
        raise DataError(
            f"{tensor.file}: {want.source} is {list(tensor.shape)}, by config.json it is {list(want.shape)}: the two"
            " are not of one model"
        )
    return tensor


def _chunks_of(tensors: Mapping[str, BaseTensor], files: int) -> list[list[tuple[int, int]]]:
    """(start, size) of the chunks of each file: at most CHUNK_NBYTES, of one layer each, cut between two numbers."""
    placed = {
        (tensor.file, tensor.offset): (tensor.elements * ITEMSIZES[tensor.dtype], ITEMSIZES[tensor.dtype], _group(name))
        for name, tensor in tensors.items()
    }
    cuts: list[list[tuple[int, int]]] = [[] for _ in range(files)]
    last: tuple[int, str] = (-1, "")
    for (file, offset), (nbytes, itemsize, group) in sorted(placed.items()):
        cut = cuts[file]
        end = offset + nbytes
        if cut and sum(cut[-1]) > offset:
            raise DataError(f"two tensors overlap at byte {offset} of a file: its header is damaged")
        if last == (file, group) and sum(cut[-1]) == offset:  # goes on in the chunk before
            start, size = cut[-1]
            more = min(nbytes, (CHUNK_NBYTES - size) // itemsize * itemsize)
            cut[-1] = start, size + more
            offset += more
        cut += [(at, min(CHUNK_NBYTES, end - at)) for at in range(offset, end, CHUNK_NBYTES)]
        last = file, group
    return cuts


def _group(name: str) -> str:
    """The part of the model that a stage holds as a whole with the parameter `name`: its layer, or `name` alone."""
    match = _LAYER.match(name)
    return name if match is None else match[1]

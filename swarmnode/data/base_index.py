"""The content-addressed form of a pretrained model: an index of hashed chunks, and where each parameter lies in them.

A base model is a folder of safetensors files, left as it was published. `base.json`, the base index, lists the files,
the SHA-256 of each chunk of them, and for every parameter of the run the places of its numbers. The manifest holds the
index's SHA-256. A chunk holds parameters of one layer only (or of the embedding, or of the head), so a stage's chunks
are its own parameters and nothing else. Two parameters may share a place: a tied head lies where the embedding does.

The index is canonical JSON (keys sorted, no spaces, ASCII), so one content has one hash.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import math
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from swarmnode.base.errors import DataError, os_errors
from swarmnode.base.ports import Telemetry
from swarmnode.base.wire_tensor import WireTensor
from swarmnode.data.chunk_store import find_index, read_regular
from swarmnode.data.index import CHUNK_NBYTES_MAX, HASH_NBYTES, INDEX_NBYTES_MAX, Chunk, hashes_of, hex_of, parsed
from swarmnode.data.root import model_root

BASE_INDEX_FILE = "base.json"
BASE_FORMAT = "swarmnode-base-1"
ITEMSIZES = {"BF16": 2, "F16": 2, "F32": 4}
"""Bytes of a number by safetensors' names. Wire names: WIRE_DTYPES."""
WIRE_DTYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
FILES_MAX = 4096
FILE_NBYTES_MAX = 1 << 44
CHUNKS_MAX = 1 << 20  # four terabytes
TENSORS_MAX = 1 << 18
SHARERS_MAX = 4  # parameters that a whole chunk belongs to: a tied head shares the embedding's
DIMENSIONS_MAX = 4

WEIGHT_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,120}\.safetensors")
_PARAMETER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]{0,199}")


@dataclass(frozen=True, slots=True)
class BaseFile:
    """One safetensors file. Chunk i is bytes [starts[i], starts[i] + sizes[i]), with hash i of `hashes`, 32 bytes each
    in a row. What lies between chunks belongs to no parameter."""

    name: str
    nbytes: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    hashes: bytes


@dataclass(frozen=True, slots=True)
class BaseTensor:
    """A parameter: its shape, the format of its numbers, and where they lie: from byte `offset` of file number `file`
    on, in row-major order."""

    shape: tuple[int, ...]
    dtype: str
    file: int
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """`elements` numbers of the parameter `name`, from its element `first` on, at byte `offset` of a chunk."""

    name: str
    first: int
    elements: int
    offset: int
    dtype: str

    def values(self, chunk: bytes) -> WireTensor:
        """The numbers [elements] in the bytes of its chunk, which they share."""
        part = memoryview(chunk)[self.offset : self.offset + self.elements * ITEMSIZES[self.dtype]]
        return WireTensor(WIRE_DTYPES[self.dtype], (self.elements,), part)


@dataclass(frozen=True)
class BaseIndex:
    """The content of `base.json`. `digest` is the SHA-256 of its bytes."""

    files: tuple[BaseFile, ...]
    tensors: Mapping[str, BaseTensor]
    digest: bytes = b""

    FIELD: ClassVar = "base.index"
    FILE: ClassVar = BASE_INDEX_FILE
    PUBLISHED: ClassVar = False
    BARE_FOLDER: ClassVar = True

    @classmethod
    def parse(cls, raw: bytes, expected: bytes, origin: str) -> BaseIndex:
        return parse_base(raw, expected, origin)

    def tell_opened(self, telemetry: Telemetry, note: str) -> None:
        telemetry.event("base.opened", digest=self.digest.hex(), note=f"{len(self.tensors)} parameters in {note}")

    @functools.cached_property
    def _ends(self) -> list[int]:
        """For each file, the number of the first chunk after it."""
        return list(itertools.accumulate(len(file.starts) for file in self.files))

    @property
    def count(self) -> int:
        """The number of chunks."""
        return self._ends[-1] if self._ends else 0

    def chunk(self, number: int) -> Chunk:
        """Chunk `number` of [0, count)."""
        if not 0 <= number < self.count:
            raise IndexError(number)
        at = bisect.bisect_right(self._ends, number)
        file = self.files[at]
        local = number - (self._ends[at - 1] if at else 0)
        sha256 = file.hashes[local * HASH_NBYTES : (local + 1) * HASH_NBYTES]
        return Chunk(number, file.name, file.starts[local], file.sizes[local], 0, sha256)

    def spans(self, names: Iterable[str]) -> dict[int, list[WeightSpan]]:
        """The spans of the parameters `names` in each chunk, by chunk number in ascending order. Raises DataError for a
        parameter that the index does not have."""
        spans: dict[int, list[WeightSpan]] = {}
        for name in names:
            if (tensor := self.tensors.get(name)) is None:
                raise DataError(f"the base model has no {name}")
            for number, span in self._spans(name, tensor):
                spans.setdefault(number, []).append(span)
        return dict(sorted(spans.items()))

    def _spans(self, name: str, tensor: BaseTensor) -> Iterator[tuple[int, WeightSpan]]:
        first = 0
        itemsize = ITEMSIZES[tensor.dtype]
        file = self.files[tensor.file]
        before = self._ends[tensor.file - 1] if tensor.file else 0
        offset = tensor.offset
        end = tensor.offset + tensor.elements * itemsize
        local = bisect.bisect_right(file.starts, offset) - 1
        while offset < end:
            until = min(end, file.starts[local] + file.sizes[local])
            elements = (until - offset) // itemsize
            yield before + local, WeightSpan(name, first, elements, offset - file.starts[local], tensor.dtype)
            first += elements
            offset = until
            local += 1

    def canonical(self) -> bytes:
        """The bytes of base.json."""
        files = [
            {
                "name": file.name,
                "nbytes": file.nbytes,
                "starts": list(file.starts),
                "sizes": list(file.sizes),
                "sha256": hex_of(file.hashes),
            }
            for file in self.files
        ]
        tensors = {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "pieces": [[tensor.file, tensor.offset, tensor.elements]],
            }
            for name, tensor in self.tensors.items()
        }
        tree = {"format": BASE_FORMAT, "files": files, "tensors": tensors}
        return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode("ascii")


def parse_base(raw: bytes, expected: bytes | None = None, origin: str = BASE_INDEX_FILE) -> BaseIndex:
    """Parses the base index `raw` and checks its size, hash, form and every number. Raises DataError as `parsed`."""
    return parsed(raw, expected, origin, "a base index", _index_of, "swarmnode init --from")


def _index_of(tree: Any, digest: bytes) -> BaseIndex:
    if not isinstance(tree, dict) or tree.get("format") != BASE_FORMAT or tree.keys() != {"format", "files", "tensors"}:
        raise ValueError(f"no index of format {BASE_FORMAT}")
    files = tree["files"]
    tensors = tree["tensors"]
    if not isinstance(files, list) or len(files) > FILES_MAX or not isinstance(tensors, dict):
        raise ValueError(f"files is not a list of at most {FILES_MAX}, or tensors no table")
    if len(tensors) > TENSORS_MAX:
        raise ValueError(f"{len(tensors)} parameters, at most {TENSORS_MAX}")
    made = tuple(map(_file_of, files))
    if len({file.name for file in made}) < len(made):
        raise ValueError("two files of one name")
    if sum(len(file.starts) for file in made) > CHUNKS_MAX:
        raise ValueError(f"more than {CHUNKS_MAX} chunks")
    budget = iter(range(SHARERS_MAX * sum(len(file.starts) for file in made) + 2 * len(tensors)))
    return BaseIndex(made, {name: _tensor_of(name, given, made, budget) for name, given in tensors.items()}, digest)


def _file_of(tree: Any) -> BaseFile:
    if not isinstance(tree, dict) or tree.keys() != {"name", "nbytes", "starts", "sizes", "sha256"}:
        raise ValueError("a file is none")
    name = tree["name"]
    nbytes = _whole(tree["nbytes"], 1, FILE_NBYTES_MAX)
    if type(name) is not str or not WEIGHT_FILE.fullmatch(name):
        raise ValueError("a file has no name like model.safetensors")
    starts = tree["starts"]
    sizes = tree["sizes"]
    hashes = tree["sha256"]
    lists = (starts, sizes, hashes)
    if not all(isinstance(each, list) and len(each) == len(starts) <= CHUNKS_MAX for each in lists):
        raise ValueError(f"{name}: starts, sizes and sha256 are not lists of one length")
    end = 0
    for start, size in zip(starts, sizes, strict=True):
        end = _whole(start, end, nbytes) + _whole(size, 1, CHUNK_NBYTES_MAX)
    if end > nbytes:
        raise ValueError(f"{name}: a chunk ends behind the file")
    return BaseFile(name, nbytes, tuple(starts), tuple(sizes), hashes_of(hashes))


def _tensor_of(name: str, tree: Any, files: tuple[BaseFile, ...], budget: Iterator[int]) -> BaseTensor:
    """A parameter, checked to lie in chunks without gaps, each of which holds whole numbers of it. `budget` yields once
    for each chunk that all parameters may touch."""
    if not _PARAMETER.fullmatch(name):
        raise ValueError(f"a parameter is called {name[:40]!r}")
    if not isinstance(tree, dict) or tree.keys() != {"dtype", "shape", "pieces"} or tree["dtype"] not in ITEMSIZES:
        raise ValueError(f"{name}: no tensor of {', '.join(ITEMSIZES)}")
    shape = tree["shape"]
    given = tree["pieces"]
    if not isinstance(shape, list) or not 1 <= len(shape) <= DIMENSIONS_MAX:
        raise ValueError(f"{name}: no shape of 1 to {DIMENSIONS_MAX} dimensions")
    elements = math.prod(_whole(size, 1, 1 << 32) for size in shape)
    if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], list) or len(given[0]) != 3:
        raise ValueError(f"{name}: its place is not one [file, offset, elements]")
    number = _whole(given[0][0], 0, len(files) - 1)
    itemsize = ITEMSIZES[tree["dtype"]]
    file = files[number]
    offset = _whole(given[0][1], 0, file.nbytes)
    if _whole(given[0][2], 1, file.nbytes) != elements:
        raise ValueError(f"{name}: its place does not hold the {elements} numbers of its shape")
    local = bisect.bisect_right(file.starts, offset) - 1
    end = offset + elements * itemsize
    at = offset
    while at < end:
        if next(budget, None) is None:
            raise ValueError(f"{name}: chunks belong to more than {SHARERS_MAX} parameters each")
        if not 0 <= local < len(file.starts) or not file.starts[local] <= at < file.starts[local] + file.sizes[local]:
            raise ValueError(f"{name}: byte {at} of {file.name} lies in no chunk")
        at = min(end, file.starts[local] + file.sizes[local])
        local += 1
        if (at - offset) % itemsize:
            raise ValueError(f"{name}: a chunk of {file.name} ends inside a number")
    return BaseTensor(tuple(shape), tree["dtype"], number, offset)


def _whole(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{str(value)[:20]} is not a whole number from {low} to {high}")
    return value


FOLDER = "base"  # in the organiser's folder of the run
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
SMALL_FILES = (
    CONFIG,
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a model besides its weights that exports of the run carry on."""
SMALL_NBYTES_MAX = 64 << 20


def object_of(raw: bytes, path: str) -> dict[str, Any]:
    """The JSON object in the file `path` that a stranger made. Raises DataError."""
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError):
        raise DataError(f"{path}: not JSON") from None
    if not isinstance(tree, dict):
        raise DataError(f"{path}: not a JSON object")
    return tree


def written_anew(raw: bytes, path: str) -> bytes:
    """A small file of a model that a stranger made: JSON parsed and written again, a template as the text it is. Raises
    DataError for anything else under these names."""
    try:
        if path.endswith(".json"):  # on one line: indented, deep lists would grow a thousandfold
            return json.dumps(object_of(raw, path), ensure_ascii=False).encode() + b"\n"
        return raw.decode().encode()
    except (ValueError, RecursionError):
        raise DataError(f"{path}: not UTF-8") from None


def small_files(folder: Path | None, index: str) -> dict[str, bytes]:
    """The small files of the base model whose index has the SHA-256 `index` (hex) in `folder`, by name; none when it is
    not there. Raises NotPermitted where a link leads out of the folder, DataError for what is no JSON."""
    if folder is None or not index or find_index(folder, bytes.fromhex(index), BASE_INDEX_FILE) is None:
        return {}
    return files_in(folder, SMALL_FILES)


def files_in(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The files `names` of a model in `folder` that are there, written anew."""
    root = model_root(folder)
    read = {name: read_regular(root.inside(folder / name), SMALL_NBYTES_MAX) for name in names}
    return {name: written_anew(raw, str(folder / name)) for name, raw in read.items() if raw is not None}


def local_base(folder: Path | None, expected: bytes) -> BaseIndex | None:
    """The index with hash `expected` in `folder`, whose files are as long as it says; None when there is no such index
    there. Raises DataError when a file is missing or too short. Contents are compared when they are read."""
    if folder is None or (raw := find_index(folder, expected, BASE_INDEX_FILE)) is None:
        return None
    index = parse_base(raw[1], expected, str(folder / BASE_INDEX_FILE))
    check_lengths(raw[0], index)
    return index


def check_lengths(folder: Path, index: BaseIndex) -> None:
    """Raises DataError when a file of the model is missing in `folder` or too short."""
    for file in index.files:
        if not file.starts:
            continue
        path = folder / file.name
        least = file.starts[-1] + file.sizes[-1]
        with os_errors(DataError, f"{path}", ": a file of the base model is missing"):
            status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size < least:
            raise DataError(f"{path}: {status.st_size} bytes where the base model has {least}: it is cut off")


def other_base(folder: Path, expected: bytes) -> str | None:
    """The reason why `folder` does not hold the base model with index `expected`; None when it does, or holds weights
    without an index, which are compared when they are read. Raises DataError for a missing or too short file."""
    if local_base(folder, expected) is not None:
        return None
    if (raw := read_regular(folder / BASE_INDEX_FILE, INDEX_NBYTES_MAX)) is not None:
        digest = parse_base(raw, None, str(folder / BASE_INDEX_FILE)).digest.hex()
        return f"{folder} holds base model {digest[:16]}..., the run starts from {expected.hex()[:16]}..."
    if not any(folder.glob("*.safetensors")):
        return f"{folder} holds no base model: neither {BASE_INDEX_FILE} nor *.safetensors"
    return None

"""The base index: exact chunks of each layer, and no number in it that a reader would have to believe."""

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from swarmnode.base.errors import DataError
from swarmnode.data.base_index import ITEMSIZES, BaseIndex, parse_base
from swarmnode.data.base_maker import StoredTensor, WantedTensor, make_base
from swarmnode.data.index import CHUNK_NBYTES

SHAPES = {
    "model.embed_tokens.weight": (3000, 1000),  # three chunks
    "model.layers.0.a.weight": (1000, 700),
    "model.layers.0.b.weight": (2001, 999),  # with a, across the end of a chunk
    "model.layers.1.a.weight": (7, 9),
}


class Blob:
    """One file: eight bytes that belong to nothing, then the tensors, in bfloat16 or float32."""

    def __init__(self, dtype: str) -> None:
        self.stored = {}
        self.numbers = {}
        parts = [b"12345678"]
        offset = 8
        for number, (name, shape) in enumerate(SHAPES.items()):
            nbytes = int(np.prod(shape)) * ITEMSIZES[dtype]
            raw = np.random.default_rng(number).bytes(nbytes)
            self.stored[name] = StoredTensor("model.safetensors", dtype, shape, offset, nbytes)
            self.numbers[name] = raw
            parts.append(raw)
            offset += nbytes
        self.data = b"".join(parts)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        return self.data[offset : offset + nbytes]

    def read_whole(self, name: str, nbytes_max: int) -> bytes | None:
        return None


def made(blob: Blob) -> BaseIndex:
    wanted = {name: WantedTensor(shape, name) for name, shape in SHAPES.items()}
    wanted["lm_head.weight"] = WantedTensor(SHAPES["model.embed_tokens.weight"], "model.embed_tokens.weight")
    return make_base(blob, blob.stored, wanted, lambda done, of: None)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_the_chunks_of_a_layer_are_its_numbers_and_nothing_else(dtype: str) -> None:
    blob = Blob(dtype)
    index = made(blob)
    assert parse_base(index.canonical(), index.digest) == index
    assert index.count > 4 and all(index.chunk(number).nbytes <= CHUNK_NBYTES for number in range(index.count))
    parts: tuple[tuple[str, ...], ...] = (
        ("model.embed_tokens.weight",),
        ("lm_head.weight",),
        ("model.layers.0.a.weight", "model.layers.0.b.weight"),
        ("model.layers.1.a.weight",),
    )
    for names in parts:
        spans = index.spans(names)
        came = {name: bytearray() for name in names}
        for number, inside in spans.items():
            chunk = index.chunk(number)
            data = blob.read(chunk.shard, chunk.offset, chunk.nbytes)
            for span in inside:
                assert span.first * ITEMSIZES[dtype] == len(came[span.name]), "in order"
                came[span.name] += data[span.offset : span.offset + span.elements * ITEMSIZES[dtype]]
        source = {"lm_head.weight": "model.embed_tokens.weight"}
        assert all(bytes(came[name]) == blob.numbers[source.get(name, name)] for name in names)
        assert sum(index.chunk(number).nbytes for number in spans) == sum(map(len, came.values())), "not a byte more"
    with pytest.raises(DataError, match=r"has no model\.layers\.2"):
        index.spans(["model.layers.2.a.weight"])


EMBEDDING = "model.embed_tokens.weight"
LIES: list[Callable[[dict[str, Any]], object]] = [
    lambda t: t.update(format="swarmnode-data-1"),
    lambda t: t.update(more=1),
    lambda t: t["files"][0].update(name="../../etc/passwd"),
    lambda t: t["files"][0].update(name="/etc/x.safetensors"),
    lambda t: t["files"][0].update(name=".x.safetensors"),
    lambda t: t["files"].append(copy.deepcopy(t["files"][0])),
    lambda t: t["files"][0].update(nbytes=1 << 60),
    lambda t: t["files"][0].update(nbytes=100),
    lambda t: t["files"][0]["sizes"].__setitem__(0, 1 << 30),
    lambda t: t["files"][0]["sizes"].__setitem__(0, 0),
    lambda t: t["files"][0]["sizes"].__setitem__(0, t["files"][0]["sizes"][0] - 2),
    lambda t: t["files"][0]["sizes"].__setitem__(0, t["files"][0]["sizes"][0] - 1),
    lambda t: t["files"][0]["starts"].__setitem__(1, 0),
    lambda t: t["files"][0]["starts"].__setitem__(1, -1),
    lambda t: t["files"][0]["starts"].__setitem__(1, 1.5),
    lambda t: t["files"][0]["starts"].__setitem__(1, True),
    lambda t: t["files"][0]["starts"].pop(),
    lambda t: t["files"][0]["sha256"].__setitem__(0, "00"),
    lambda t: t["files"][0]["sha256"].__setitem__(0, None),
    lambda t: t["tensors"][EMBEDDING].update(dtype="I64"),
    lambda t: t["tensors"][EMBEDDING].update(dtype="F32"),
    lambda t: t["tensors"][EMBEDDING].update(dtype=["BF16"]),
    lambda t: t["tensors"][EMBEDDING].update(shape=[]),
    lambda t: t["tensors"][EMBEDDING].update(shape=[1 << 40]),
    lambda t: t["tensors"][EMBEDDING].update(shape=[3000, 1001]),
    lambda t: t["tensors"][EMBEDDING].update(pieces=[]),
    lambda t: t["tensors"][EMBEDDING].update(pieces=[[1, 8, 3000000]]),
    lambda t: t["tensors"][EMBEDDING].update(pieces=[[-1, 8, 3000000]]),
    lambda t: t["tensors"][EMBEDDING].update(pieces=[[0, 0, 3000000]]),
    lambda t: t["tensors"][EMBEDDING].update(pieces=[[0, 9, 3000000]]),
    lambda t: t["tensors"][EMBEDDING].update(pieces=[[0, 1 << 50, 3000000]]),
    lambda t: t["tensors"][EMBEDDING].update(pieces=[[0, 8, 3000001], [0, 8, -1]]),
    lambda t: t["tensors"].update({"a b": t["tensors"][EMBEDDING]}),
    lambda t: t["tensors"].update({"../x": t["tensors"][EMBEDDING]}),
    lambda t: t["tensors"].update({"x" * 300: t["tensors"][EMBEDDING]}),
    lambda t: t.update(tensors=[]),
    lambda t: t.update(files={}),
]


@pytest.fixture(scope="module")
def index() -> BaseIndex:
    return made(Blob("BF16"))


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_is_refused(index: BaseIndex, lie: Callable[[dict[str, Any]], object]) -> None:
    tree = json.loads(index.canonical())
    lie(tree)
    raw = json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(DataError) as found:
        parse_base(raw)
    assert "\n" not in str(found.value) and len(str(found.value)) < 300


def test_bytes_that_are_no_index_are_refused(index: BaseIndex) -> None:
    raw = index.canonical()
    for wrong in (b"", b"{}", b"[]", b"\xff", b"[" * 100_000, raw[:-1], raw + b" ", b" " * (33 << 20)):
        with pytest.raises(DataError):
            parse_base(wrong)
    with pytest.raises(DataError, match="the run's is"):
        parse_base(raw, b"\0" * 32)


def test_an_index_that_takes_hours_to_check_is_refused_at_once() -> None:
    """Each of a hundred parameters says that it lies in all chunks."""
    chunks = 5000
    file = {
        "name": "a.safetensors",
        "nbytes": 2 * chunks,
        "starts": list(range(0, 2 * chunks, 2)),
        "sizes": [2] * chunks,
        "sha256": ["0" * 64] * chunks,
    }
    for sharers, fits in ((2, True), (100, False)):
        tensors = {f"p{n}": {"dtype": "BF16", "shape": [chunks], "pieces": [[0, 0, chunks]]} for n in range(sharers)}
        tree = {"format": "swarmnode-base-1", "files": [file], "tensors": tensors}
        raw = json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
        if fits:
            assert len(parse_base(raw).tensors) == sharers
        else:
            with pytest.raises(DataError, match="more than 4 parameters each"):
                parse_base(raw)

"""Safetensors files of float32, written from and read into flat buffers without a copy and without torch.

The format (huggingface.co/docs/safetensors): eight bytes of header length, a JSON header, then the tensors' bytes.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Mapping, Sequence

from swarmnode.base.errors import DataError

ITEMSIZE = 4
HEADER_BYTES_MAX = 100_000_000  # the reference reader's own bound
ALIGNMENT = 8
_LENGTH = struct.Struct("<Q")

Shape = tuple[int, ...]


def nbytes_of(shape: Shape) -> int:
    return ITEMSIZE * math.prod(shape)


def header(tensors: Mapping[str, Shape], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data of `tensors`, which follow in this order. Padded to a multiple of ALIGNMENT bytes."""
    text = json.dumps({"__metadata__": dict(metadata), **_rows(tensors)}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def _rows(tensors: Mapping[str, Shape]) -> dict[str, object]:
    """The header's row of each of `tensors`, which follow in this order."""
    ends = list(itertools.accumulate(map(nbytes_of, tensors.values()), initial=0))
    return {
        name: {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        for (name, shape), start, end in zip(tensors.items(), ends[:-1], ends[1:], strict=True)
    }


def read(data: bytes, origin: str) -> tuple[dict[str, tuple[Shape, memoryview]], dict[str, str]]:
    """Shape and bytes of each tensor in the file `data`, sharing its memory, and the metadata.

    Everything the header says is checked against the file first. Raises DataError that begins with `origin`.
    """
    if len(data) < _LENGTH.size:
        raise DataError(f"{origin}: {len(data)} bytes are no safetensors file: it was cut off; use another checkpoint")
    (length,) = _LENGTH.unpack_from(data)
    if length > min(HEADER_BYTES_MAX, len(data) - _LENGTH.size):
        raise DataError(
            f"{origin}: a header of {length} bytes in a file of {len(data)}: it was cut off or is no such file"
        )
    begin = _LENGTH.size + length
    try:
        table = json.loads(data[_LENGTH.size : begin])
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise DataError(f"{origin}: its header is not a JSON object: is this a safetensors file?")
    metadata = table.pop("__metadata__", {})
    body = memoryview(data)[begin:]
    tensors = {name: _tensor(name, row, body, origin) for name, row in table.items()}
    return tensors, {str(key): str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}


def check_head(head: bytes | bytearray, tensors: Mapping[str, Shape], origin: str) -> None:
    """Raise DataError unless `head`, the bytes before the data, announces exactly `tensors`, in this order."""
    try:
        table = json.loads(head[_LENGTH.size :]) if _LENGTH.unpack_from(head)[0] == len(head) - _LENGTH.size else None
    except (ValueError, RecursionError, struct.error):
        table = None
    if not isinstance(table, dict) or {k: row for k, row in table.items() if k != "__metadata__"} != _rows(tensors):
        raise DataError(f"{origin}: its header does not say what the checkpoint says of it; use another checkpoint")


def scatter(data: bytes | None, parts: Sequence[memoryview], origin: str) -> bool:
    """Copy `data` into the buffers `parts` in order; False for None. Raises DataError for another length."""
    if data is None:
        return False
    expected = sum(part.nbytes for part in parts)
    if len(data) != expected:
        raise DataError(f"{origin}: {len(data)} bytes where {expected} belong: cut off? Use another checkpoint")
    start = 0
    for part in parts:
        part[:] = data[start : start + part.nbytes]
        start += part.nbytes
    return True


def _tensor(name: str, row: object, body: memoryview, origin: str) -> tuple[Shape, memoryview]:
    match row:
        case {"dtype": "F32", "shape": [*shape], "data_offsets": [int(start), int(end)]} if all(
            type(size) is int and size >= 0 for size in shape
        ):
            if 0 <= start <= end <= body.nbytes and end - start == nbytes_of(tuple(shape)):
                return tuple(shape), body[start:end]
            raise DataError(f"{origin}: tensor {name[:80]} lies at bytes {start} to {end} of {body.nbytes}: cut off?")
    raise DataError(f"{origin}: tensor {name[:80]} is not float32 with a shape and a place; use another checkpoint")

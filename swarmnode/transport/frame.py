"""Our framing on a raw stream: what one call looks like in bytes (design section 11).

    pass       (kind 3) once, first, on a stream to a run that is not open: who the caller is allowed to be
    preamble   "SWRM"  version u8  kind u8  flags u16  header_nbytes u32        12 bytes, big endian
    header     protobuf Request or Reply, at most 1 MiB; its TensorSpecs say what follows
    tensors    the raw bytes of each, in order, nothing between them

Everything announced is checked before memory is taken for it, and every fault is a RemoteFault that says what it is.
The end of a libp2p stream proves nothing, so lengths decide; the handshake at the end is the stream staying open: the
answering side leaves only after the caller's next request, or its end (hivemind.md).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from swarmnode.errors import RemoteFault
from swarmnode.header import (
    HEADER_BYTES_MAX,
    TENSORS_MAX,
    VERSION,
    check_tensors,
    open_reply,
    open_request,
    raise_for,
    reply_of,
    seal_reply,
    seal_request,
)
from swarmnode.membership.access import PASS_BYTES_MAX
from swarmnode.membership.door import parse_pass
from swarmnode.ports import WireTensor
from swarmnode.transport.stream import Stream
from swarmnode.wire import access_pb2 as access
from swarmnode.wire import call_pb2 as wire

MAGIC = b"SWRM"
PIECE_BYTES = 4 << 20  # guess: of a message, so much memory is taken at a time, as it comes in
_SMALL_BYTES = 64 << 10  # tensors up to here are joined with the header into one write

PREAMBLE = struct.Struct(">4sBBHI")


class Kind(enum.IntEnum):
    REQUEST = 1
    REPLY = 2
    PASS = 3


class Flag(enum.IntFlag):
    NONE = 0
    LAST = 1  # the sender reads no further request from this stream


def preamble(kind: Kind, header_nbytes: int, flags: Flag = Flag.NONE) -> bytes:
    assert header_nbytes <= HEADER_BYTES_MAX, f"own header of {header_nbytes} bytes; at most {HEADER_BYTES_MAX}"
    return PREAMBLE.pack(MAGIC, VERSION, kind, flags, header_nbytes)


def open_preamble(raw: bytes, kind: Kind) -> tuple[int, Flag]:
    """(bytes of the header, flags). Raises RemoteFault for anything but a frame of ours, of `kind`."""
    magic, version, found, flags, header_nbytes = PREAMBLE.unpack(raw)
    if magic != MAGIC:
        raise RemoteFault(f"garbage instead of a frame: starts with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise RemoteFault(f"protocol version {version}; this node speaks {VERSION}: update the older of the two")
    if found != kind:
        raise RemoteFault(f"frame of kind {found} where a {kind.name.lower()} ({kind.value}) belongs")
    if flags > Flag.LAST:
        raise RemoteFault(f"frame with unknown flags {flags:#x}")
    if header_nbytes > HEADER_BYTES_MAX:
        raise RemoteFault(f"header of {header_nbytes} bytes announced; at most {HEADER_BYTES_MAX}")
    return header_nbytes, Flag(flags)


def kind_of(raw: bytes) -> int:
    """The kind a preamble claims, nothing checked."""
    return raw[5]


def seal_pass(shown: access.Pass) -> bytes:
    """`shown` as the first frame of a stream."""
    raw = shown.SerializeToString()
    return preamble(Kind.PASS, len(raw)) + raw


async def receive_pass(stream: Stream, first: bytes) -> access.Pass:
    """The pass whose preamble is `first`. Raises RemoteFault before anything longer than a pass is read."""
    nbytes, _ = open_preamble(first, Kind.PASS)
    if nbytes > PASS_BYTES_MAX:
        raise RemoteFault(f"pass of {nbytes} bytes announced; at most {PASS_BYTES_MAX}")
    return parse_pass(await stream.read(nbytes))


def allocate(specs: Iterable[wire.TensorSpec]) -> list[WireTensor]:
    """Empty tensors for `specs`, which `check_tensors` has passed. Writable, aligned, and not zeroed first: numpy asks
    for huge pages above 4 MiB, a bytearray would touch every page twice."""
    return [
        WireTensor(spec.dtype, tuple(spec.shape), np.empty(spec.nbytes, np.uint8).data, spec.codec or "raw")
        for spec in specs
    ]


async def send(
    stream: Stream, kind: Kind, header: bytes, tensors: Sequence[WireTensor] = (), flags: Flag = Flag.NONE
) -> bool:
    """Write one frame; bytes of tensors that are still being written go as they become final. False when the peer
    answered before all of it was written: the stream is out of step. Raises LocalFault when a tensor never comes."""
    joined: list[bytes | memoryview] = [preamble(kind, len(header), flags), header]
    ahead = 0  # tensors that go in one write with the header
    while ahead < len(tensors) and tensors[ahead].nbytes <= _SMALL_BYTES and tensors[ahead].complete:
        joined.append(_flat(tensors[ahead]))
        ahead += 1
    if not await stream.write(b"".join(joined)):
        return False
    for tensor in tensors[ahead:]:
        if not await stream.write(_flat(tensor), tensor.filling):
            return False
    return True


def _flat(tensor: WireTensor) -> memoryview:
    view = memoryview(tensor.data)
    return view.cast("B") if view.nbytes else memoryview(b"")


async def receive_header(stream: Stream, kind: Kind, first: bytes | None = None) -> tuple[bytes, Flag]:
    """(serialised header, flags) of the next frame; `first` is its preamble when it was read already."""
    raw = await stream.read(PREAMBLE.size) if first is None else first
    header_nbytes, flags = open_preamble(raw, kind)
    return await stream.read(header_nbytes), flags


async def receive_tensors(
    stream: Stream, specs: Sequence[wire.TensorSpec], arrive: Callable[[int], None] = lambda nbytes: None
) -> list[WireTensor]:
    """The tensors of `specs`, which `check_tensors` has passed, each in memory of its own. `arrive` is told of each
    piece before its memory is touched; what it raises ends this."""
    tensors = []
    for spec in specs:
        tensors += allocate([spec])
        tensor, view = tensors[-1], memoryview(tensors[-1].data)
        for start in range(0, tensor.nbytes, PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            arrive(len(piece))
            await stream.read_into(piece)
    return tensors


__all__ = [
    "HEADER_BYTES_MAX",
    "PREAMBLE",
    "TENSORS_MAX",
    "VERSION",
    "Flag",
    "Kind",
    "allocate",
    "check_tensors",
    "kind_of",
    "open_preamble",
    "open_reply",
    "open_request",
    "preamble",
    "raise_for",
    "receive_header",
    "receive_pass",
    "receive_tensors",
    "reply_of",
    "seal_pass",
    "seal_reply",
    "seal_request",
    "send",
]

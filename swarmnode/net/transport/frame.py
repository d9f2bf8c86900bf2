"""The byte format of one call on a raw stream.

    pass       (kind 3) once, first, on a stream to a run that is not open: the caller's permission
    preamble   "SWRM"  version u8  kind u8  flags u16  header_nbytes u32        12 bytes, big endian
    header     protobuf Request or Reply, at most 1 MiB; its TensorSpecs announce the tensors
    tensors    the raw bytes of each, in order, nothing between them

Every announced size is checked before memory is allocated, and every fault is a RemoteFault that names it. The end of a
libp2p stream proves nothing, so lengths decide. As a handshake at the end the stream stays open: libp2p drops data in
transit when a side closes, so the answering side leaves only after the caller's next request, or its end.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence

import numpy as np

from swarmnode.base.errors import RemoteFault
from swarmnode.base.header import HEADER_BYTES_MAX as HEADER_BYTES_MAX
from swarmnode.base.header import LEAST as LEAST
from swarmnode.base.header import TENSORS_MAX as TENSORS_MAX
from swarmnode.base.header import VERSION as VERSION
from swarmnode.base.header import check_tensors as check_tensors
from swarmnode.base.header import check_version
from swarmnode.base.header import open_reply as open_reply
from swarmnode.base.header import open_request as open_request
from swarmnode.base.header import raise_for as raise_for
from swarmnode.base.header import reply_of as reply_of
from swarmnode.base.header import seal_reply as seal_reply
from swarmnode.base.header import seal_request as seal_request
from swarmnode.base.ports import WireTensor
from swarmnode.base.wire import access_pb2 as access
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.transport.stream import P2pdStream
from swarmnode.run.admission.access import PASS_BYTES_MAX
from swarmnode.run.admission.admission import parse_pass

MAGIC = b"SWRM"
PIECE_BYTES = 4 << 20  # guess: memory of a message is allocated in such pieces, as it arrives
BESIDE_BYTES = 128 << 10  # guess: at 8 KiB/s, the least that a stream may carry, one in half of the time of a stall
_SMALL_BYTES = 64 << 10  # tensors up to this size are joined with the header into one write

PREAMBLE = struct.Struct(">4sBBHI")


class FrameKind(enum.IntEnum):
    REQUEST = 1
    REPLY = 2
    PASS = 3


class FrameFlag(enum.IntFlag):
    NONE = 0
    LAST = 1  # the sender reads no further request from this stream


def preamble(kind: FrameKind, header_nbytes: int, flags: FrameFlag = FrameFlag.NONE, version: int = VERSION) -> bytes:
    assert header_nbytes <= HEADER_BYTES_MAX, f"own header of {header_nbytes} bytes; at most {HEADER_BYTES_MAX}"
    return PREAMBLE.pack(MAGIC, version, kind, flags, header_nbytes)


def open_preamble(raw: bytes, kind: FrameKind, version: int = VERSION) -> tuple[int, FrameFlag]:
    """(bytes of the header, flags). Raises RemoteFault unless it is our frame of this `kind` and `version`."""
    magic, their_version, their_kind, flags, header_nbytes = PREAMBLE.unpack(raw)
    if magic != MAGIC:
        raise RemoteFault(f"garbage instead of a frame: starts with {magic!r}, not {MAGIC!r}")
    check_version(their_version, version)
    if their_kind != kind:
        raise RemoteFault(f"frame of kind {their_kind} where a {kind.name.lower()} ({kind.value}) belongs")
    if flags > FrameFlag.LAST:
        raise RemoteFault(f"frame with unknown flags {flags:#x}")
    if header_nbytes > HEADER_BYTES_MAX:
        raise RemoteFault(f"header of {header_nbytes} bytes announced; at most {HEADER_BYTES_MAX}")
    return header_nbytes, FrameFlag(flags)


def kind_of(raw: bytes) -> int:
    """The kind that a preamble claims, unchecked."""
    return raw[5]


def seal_pass(shown: access.Pass, version: int = VERSION) -> bytes:
    """The pass `shown` as the first frame of a stream."""
    raw = shown.SerializeToString()
    return preamble(FrameKind.PASS, len(raw), version=version) + raw


async def receive_pass(stream: P2pdStream, first: bytes) -> access.Pass:
    """The pass whose preamble is `first`. Raises RemoteFault before reading anything longer than a pass."""
    nbytes, _ = open_preamble(first, FrameKind.PASS, stream.version)
    if nbytes > PASS_BYTES_MAX:
        raise RemoteFault(f"pass of {nbytes} bytes announced; at most {PASS_BYTES_MAX}")
    return parse_pass(await stream.read(nbytes))


def allocate(specs: Iterable[wire.TensorSpec]) -> list[WireTensor]:
    """Empty tensors for `specs`, which passed `check_tensors`. Writable, aligned, and not zeroed: numpy requests huge
    pages above 4 MiB, a bytearray would touch every page twice."""
    return [
        WireTensor(spec.dtype, tuple(spec.shape), np.empty(spec.nbytes, np.uint8).data, spec.codec or "raw")
        for spec in specs
    ]


async def send(
    stream: P2pdStream,
    kind: FrameKind,
    header: bytes,
    tensors: Sequence[WireTensor] = (),
    flags: FrameFlag = FrameFlag.NONE,
    *,
    beside: bool = False,
) -> bool:
    """Write one frame; tensors still being written are sent as their bytes become final. Returns False if the peer
    answered before all was written, which leaves the stream out of step, unless its answer is read `beside` it. Raises
    LocalFault if a tensor's writer failed."""
    joined: list[bytes | memoryview] = [preamble(kind, len(header), flags, stream.version), header]
    ahead = 0  # tensors sent in one write with the header
    while ahead < len(tensors) and tensors[ahead].nbytes <= _SMALL_BYTES and tensors[ahead].complete:
        joined.append(_flat(tensors[ahead]))
        ahead += 1
    if not await stream.write(b"".join(joined), beside=beside):
        return False
    for tensor in tensors[ahead:]:
        if not await stream.write(_flat(tensor), tensor.watermark, beside=beside):
            return False
    return True


async def send_beside(
    stream: P2pdStream,
    header: bytes,
    tensors: Sequence[WireTensor],
    allowed: Callable[[float], Awaitable[None]],
) -> None:
    """Write a reply while the request's tensors still come in: its tensors up to any share of their bytes once
    `allowed(share)` returns. Raises as `send`, and the errors of `allowed`."""
    total = sum(tensor.nbytes for tensor in tensors)
    if not total:
        await allowed(1.0)
    await stream.write(preamble(FrameKind.REPLY, len(header), version=stream.version) + header, beside=True)
    sent = 0
    for tensor in tensors:
        view = _flat(tensor)
        for start in range(0, len(view), BESIDE_BYTES):
            piece = view[start : start + BESIDE_BYTES]
            sent += len(piece)
            if tensor.watermark is not None:
                await tensor.watermark.until(start + len(piece))
            await allowed(sent / total)
            await stream.write(piece, beside=True)


def _flat(tensor: WireTensor) -> memoryview:
    view = memoryview(tensor.data)
    return view.cast("B") if view.nbytes else memoryview(b"")


async def receive_header(stream: P2pdStream, kind: FrameKind, first: bytes | None = None) -> tuple[bytes, FrameFlag]:
    """(serialised header, flags) of the next frame; `first` is its preamble if already read."""
    raw = await stream.read(PREAMBLE.size) if first is None else first
    header_nbytes, flags = open_preamble(raw, kind, stream.version)
    return await stream.read(header_nbytes), flags


async def receive_tensors(
    stream: P2pdStream, specs: Sequence[wire.TensorSpec], arrive: Callable[[int], None] = lambda nbytes: None
) -> list[WireTensor]:
    """The tensors of `specs`, which passed `check_tensors`, each in its own memory. `arrive` is called before each
    piece's memory is touched; its errors propagate."""
    tensors = []
    for spec in specs:
        tensors += allocate([spec])
        tensor = tensors[-1]
        view = memoryview(tensors[-1].data)
        for start in range(0, tensor.nbytes, PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            arrive(len(piece))
            await stream.read_into(piece)
    return tensors

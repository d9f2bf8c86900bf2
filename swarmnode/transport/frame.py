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
import math
import struct
from collections.abc import Iterable, Sequence

import numpy as np
from google.protobuf.message import DecodeError

from swarmnode.errors import Busy, Forbidden, Refused, RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId, short
from swarmnode.membership.access import PASS_BYTES_MAX
from swarmnode.membership.door import parse_pass
from swarmnode.ports import WireTensor, check_spec
from swarmnode.transport.stream import Stream
from swarmnode.wire import access_pb2 as access
from swarmnode.wire import call_pb2 as wire

MAGIC = b"SWRM"
VERSION = 1
HEADER_BYTES_MAX = 1 << 20  # guess: 1000 records fit
TENSORS_MAX = 64  # guess: an exchange of every outer method here needs fewer than 8
CODEC_CHARACTERS_MAX = 32
REASON_CHARACTERS_MAX = 512
TIMEOUT_MAX_S = 3600.0  # guess: nothing here waits an hour for one call
RETRY_AFTER_MAX_S = 60.0
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


def seal_request(header: wire.Request, tensors: Sequence[WireTensor], run_id: RunId, timeout_s: float) -> bytes:
    """Fill in version, run, timeout and tensor specs of `header`; the serialised header. Asserts our own bounds."""
    assert len(tensors) <= TENSORS_MAX, f"{len(tensors)} tensors in one call; at most {TENSORS_MAX}"
    header.version = VERSION
    header.run_id = run_id
    header.timeout_ms = max(1, math.ceil(min(timeout_s, TIMEOUT_MAX_S) * 1000))
    del header.tensors[:]
    header.tensors.extend(tensor.spec() for tensor in tensors)
    return header.SerializeToString()


def seal_reply(header: wire.Reply, tensors: Sequence[WireTensor]) -> bytes:
    assert len(tensors) <= TENSORS_MAX, f"{len(tensors)} tensors in one reply; at most {TENSORS_MAX}"
    del header.tensors[:]
    header.tensors.extend(tensor.spec() for tensor in tensors)
    return header.SerializeToString()


def open_request(raw: bytes, run_id: RunId) -> tuple[str, wire.Request]:
    """(method, header). Raises RemoteFault for one that does not parse, is of another run or asks for nothing."""
    header = wire.Request()
    try:
        header.ParseFromString(raw)
    except DecodeError:
        raise RemoteFault("request header that does not parse") from None
    if header.version != VERSION:
        raise RemoteFault(f"protocol version {header.version}; this node speaks {VERSION}: update the older of the two")
    if header.run_id != run_id:
        raise RemoteFault(f"wrong run {header.run_id[:16]!r}: this node trains run {run_id[:16]!r}")
    method = header.WhichOneof("body")
    if method is None:
        raise RemoteFault("request without a method this version knows")
    if not 0 < header.timeout_ms <= TIMEOUT_MAX_S * 1000:
        raise RemoteFault(f"timeout of {header.timeout_ms} ms; from 1 ms to {TIMEOUT_MAX_S:.0f} s are allowed")
    return str(method), header


def open_reply(raw: bytes) -> wire.Reply:
    """The header. Raises RemoteFault for one that does not parse, or refuses with tensors behind it."""
    header = wire.Reply()
    try:
        header.ParseFromString(raw)
    except DecodeError:
        raise RemoteFault("reply header that does not parse") from None
    if header.status != wire.STATUS_OK and header.tensors:
        raise RemoteFault("a reply that is not OK cannot carry tensors")
    return header


def check_tensors(specs: Iterable[wire.TensorSpec], nbytes_max: int) -> int:
    """The bytes all `specs` announce together. Raises RemoteFault when they are too many or too large."""
    total = 0
    for count, spec in enumerate(specs, start=1):
        if count > TENSORS_MAX:
            raise RemoteFault(f"more than {TENSORS_MAX} tensors in one message")
        if len(spec.codec) > CODEC_CHARACTERS_MAX:
            raise RemoteFault(f"codec name of {len(spec.codec)} characters; at most {CODEC_CHARACTERS_MAX}")
        total += check_spec(spec, nbytes_max - total)
    return total


def allocate(specs: Iterable[wire.TensorSpec]) -> list[WireTensor]:
    """Empty tensors for `specs`, which `check_tensors` has passed. Writable, aligned, and not zeroed first: numpy asks
    for huge pages above 4 MiB, a bytearray would touch every page twice."""
    return [
        WireTensor(spec.dtype, tuple(spec.shape), np.empty(spec.nbytes, np.uint8).data, spec.codec or "raw")
        for spec in specs
    ]


def reply_of(error: Busy | Unavailable | RemoteFault) -> wire.Reply:
    """How a handler's refusal travels. The text goes to the peer."""
    match error:
        case Forbidden():
            status = wire.STATUS_FORBIDDEN
        case Busy():
            status = wire.STATUS_BUSY
        case Unavailable():
            status = wire.STATUS_UNAVAILABLE
        case RemoteFault():
            status = wire.STATUS_REFUSED
    retry_after_s = error.retry_after_s if isinstance(error, Unavailable) else 0.0
    retry_after_ms = math.ceil(min(max(retry_after_s, 0.0), RETRY_AFTER_MAX_S) * 1000)
    reply = wire.Reply(status=status, reason=str(error)[:REASON_CHARACTERS_MAX], retry_after_ms=retry_after_ms)
    if isinstance(error, Forbidden) and error.evidence:
        reply.guests.ParseFromString(error.evidence)
    return reply


def raise_for(peer: PeerId, reply: wire.Reply) -> None:
    """Raise what `peer` says in `reply`, unless it is OK: Busy, Unavailable, Refused, Forbidden, RemoteFault."""
    said = "".join(c if c.isprintable() else "?" for c in reply.reason[:REASON_CHARACTERS_MAX])
    retry_after_s = min(reply.retry_after_ms / 1000.0, RETRY_AFTER_MAX_S)
    match reply.status:
        case wire.STATUS_OK:
            return
        case wire.STATUS_BUSY:
            raise Busy(f"{short(peer)} is busy: {said}", retry_after_s)
        case wire.STATUS_UNAVAILABLE:
            raise Unavailable(f"{short(peer)} is not available: {said}", retry_after_s)
        case wire.STATUS_REFUSED:
            raise Refused(f"{short(peer)} refused: {said}")
        case wire.STATUS_FORBIDDEN:
            evidence = reply.guests.SerializeToString() if reply.HasField("guests") else b""
            raise Forbidden(f"{short(peer)} does not let us in: {said}", evidence)
        case wire.STATUS_FAULT:
            raise RemoteFault(f"{short(peer)} failed: {said}")
        case _:
            raise RemoteFault(f"{short(peer)} answered with unknown status {reply.status}")


async def send(
    stream: Stream, kind: Kind, header: bytes, tensors: Sequence[WireTensor] = (), flags: Flag = Flag.NONE
) -> bool:
    """Write one frame. False when the peer answered before all of it was written: the stream is out of step."""
    joined: list[bytes | memoryview] = [preamble(kind, len(header), flags), header]
    for index, tensor in enumerate(tensors):
        view = _flat(tensor)
        if len(view) > _SMALL_BYTES:
            rest = [_flat(t) for t in tensors[index:]]
            return await stream.write(b"".join(joined), *rest)
        joined.append(view)
    return await stream.write(b"".join(joined))


def _flat(tensor: WireTensor) -> memoryview:
    view = memoryview(tensor.data)
    return view.cast("B") if view.nbytes else memoryview(b"")


async def receive_header(stream: Stream, kind: Kind, first: bytes | None = None) -> tuple[bytes, Flag]:
    """(serialised header, flags) of the next frame; `first` is its preamble when it was read already."""
    raw = await stream.read(PREAMBLE.size) if first is None else first
    header_nbytes, flags = open_preamble(raw, kind)
    return await stream.read(header_nbytes), flags


async def receive_tensors(stream: Stream, specs: Sequence[wire.TensorSpec]) -> list[WireTensor]:
    """The tensors of `specs`, which `check_tensors` has passed, each in memory of its own."""
    tensors = allocate(specs)
    for tensor in tensors:
        if tensor.nbytes:
            await stream.read_into(memoryview(tensor.data))
    return tensors

"""What a call says of itself on the wire, checked as the real transport checks it (which the simulation may not
import)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from swarmnode.errors import Busy, Refused, RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId, short
from swarmnode.ports import WireTensor, check_spec
from swarmnode.wire import call_pb2 as wire

VERSION = 1
PREAMBLE_BYTES = 12
HEADER_BYTES_MAX = 1 << 20
TENSORS_MAX = 64
TIMEOUT_MAX_S = 3600.0
REASON_CHARACTERS_MAX = 512
RETRY_AFTER_MAX_S = 60.0


def seal_request(header: wire.Request, tensors: Sequence[WireTensor], run_id: RunId, timeout_s: float) -> bytes:
    """Fill in what the transport fills in; the serialised header."""
    header.version = VERSION
    header.run_id = run_id
    header.timeout_ms = max(1, math.ceil(min(timeout_s, TIMEOUT_MAX_S) * 1000))
    return _seal(header, tensors)


def seal_reply(header: wire.Reply, tensors: Sequence[WireTensor]) -> bytes:
    return _seal(header, tensors)


def _seal(header: wire.Request | wire.Reply, tensors: Sequence[WireTensor]) -> bytes:
    assert len(tensors) <= TENSORS_MAX, f"{len(tensors)} tensors in one message; at most {TENSORS_MAX}"
    del header.tensors[:]
    if tensors:
        header.tensors.extend([tensor.spec() for tensor in tensors])
    raw = header.SerializeToString()
    assert len(raw) <= HEADER_BYTES_MAX, f"own header of {len(raw)} bytes; at most {HEADER_BYTES_MAX}"
    return raw


def open_request(raw: bytes, run_id: RunId) -> wire.Request:
    """Raises RemoteFault for a header that does not parse or is of another run."""
    header = wire.Request()
    try:
        header.ParseFromString(raw)
    except DecodeError:
        raise RemoteFault("request header that does not parse") from None
    if header.version != VERSION:
        raise RemoteFault(f"protocol version {header.version}; this node speaks {VERSION}")
    if header.run_id != run_id:
        raise RemoteFault(f"wrong run {header.run_id[:16]!r}: this node trains run {run_id[:16]!r}")
    return header


def open_reply(raw: bytes) -> wire.Reply:
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
        total += check_spec(spec, nbytes_max - total)
    return total


def reply_of(error: Unavailable | RemoteFault) -> wire.Reply:
    """How a handler's refusal travels."""
    if isinstance(error, RemoteFault):
        return wire.Reply(status=wire.STATUS_REFUSED, reason=str(error)[:REASON_CHARACTERS_MAX])
    status = wire.STATUS_BUSY if isinstance(error, Busy) else wire.STATUS_UNAVAILABLE
    retry_after_ms = math.ceil(min(max(error.retry_after_s, 0.0), RETRY_AFTER_MAX_S) * 1000)
    return wire.Reply(status=status, reason=str(error)[:REASON_CHARACTERS_MAX], retry_after_ms=retry_after_ms)


def raise_for(peer: PeerId, reply: wire.Reply) -> None:
    """Raise what `peer` says in `reply`, unless it is OK."""
    if reply.status == wire.STATUS_OK:
        return
    retry_after_s = reply.retry_after_ms / 1000.0
    match reply.status:
        case wire.STATUS_BUSY:
            raise Busy(f"{short(peer)} is busy: {reply.reason}", retry_after_s)
        case wire.STATUS_UNAVAILABLE:
            raise Unavailable(f"{short(peer)} is not available: {reply.reason}", retry_after_s)
        case wire.STATUS_REFUSED:
            raise Refused(f"{short(peer)} refused: {reply.reason}")
        case _:
            raise RemoteFault(f"{short(peer)} failed: {reply.reason}")


def copies(tensors: Sequence[WireTensor]) -> list[WireTensor]:
    """What arrives is memory of its own. Fake tensors (declared bytes over a repeated pattern) have none to copy."""
    return [
        WireTensor(
            t.dtype, t.shape, memoryview(bytearray(t.data)) if memoryview(t.data).contiguous else t.data, t.codec
        )
        for t in tensors
    ]

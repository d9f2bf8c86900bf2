"""Headers of calls: seal and check requests and replies. Shared by the real transport (net/transport/frame.py) and the
simulated one (swarmsim/transport.py)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from swarmnode.base import bounds
from swarmnode.base.errors import Busy, Forbidden, Refused, RemoteFault, StartAnew, Unavailable, cause_of
from swarmnode.base.ids import PeerId, RunId, short
from swarmnode.base.ports import DTYPE_BYTES, WireTensor
from swarmnode.base.untrusted_text import REASON_CHARACTERS_MAX, printable
from swarmnode.base.wire import access_pb2
from swarmnode.base.wire import call_pb2 as wire

VERSION = 2  # of headers and of all codecs' packets; raise it whenever another version would misread either
HEADER_BYTES_MAX = 1 << 20  # derived: 800 records of the largest size fit
DIMENSIONS_MAX = 8
TENSORS_MAX = 64  # guess: an exchange of every outer method here needs fewer than 8
CODEC_CHARACTERS_MAX = 32
LEAST = 2  # the oldest version that this program still speaks
RUN_DIGITS = slice(16, 32)  # the part of a run id that headers carry; the stream protocol's name carries the first 16
TIMEOUT_MAX_S = 3600.0  # guess: nothing here waits an hour for one call
RETRY_AFTER_MAX_S = 60.0


def seal_request(
    header: wire.Request, tensors: Sequence[WireTensor], run_id: RunId, timeout_s: float, version: int = VERSION
) -> bytes:
    """Fill in version, run, timeout and tensor specs of `header` and return it serialised. Asserts our own bounds."""
    assert len(tensors) <= TENSORS_MAX, f"{len(tensors)} tensors in one call; at most {TENSORS_MAX}"
    header.version = version
    header.run_id = run_id[RUN_DIGITS]
    header.timeout_ms = max(1, math.ceil(min(timeout_s, TIMEOUT_MAX_S) * 1000))
    del header.tensors[:]
    for tensor in tensors:
        header.tensors.append(tensor.spec())
    return header.SerializeToString()


def seal_reply(header: wire.Reply, tensors: Sequence[WireTensor]) -> bytes:
    assert len(tensors) <= TENSORS_MAX, f"{len(tensors)} tensors in one reply; at most {TENSORS_MAX}"
    del header.tensors[:]
    for tensor in tensors:
        header.tensors.append(tensor.spec())
    return header.SerializeToString()


def check_version(told: int, version: int) -> None:
    """Raises RemoteFault unless a message is of the wire version that its stream agreed on."""
    if told != version:
        raise RemoteFault(f"protocol version {told}; this node speaks {version} here: update the older of the two")


def open_request(raw: bytes, run_id: RunId, version: int = VERSION) -> tuple[str, wire.Request]:
    """Parse and check a request; return (method, header with the whole run id).

    Raises RemoteFault if it does not parse, belongs to another run, or has a field out of range, Unavailable if it
    names no method that this version knows: a later version may.
    """
    header = bounds.parse(wire.Request, raw, "request header")
    check_version(header.version, version)
    if header.run_id != run_id[RUN_DIGITS]:
        raise RemoteFault(f"wrong run {header.run_id[:16]!r}: this node trains run {run_id[RUN_DIGITS]!r}")
    header.run_id = run_id
    method = header.WhichOneof("body")
    if method is None:
        raise Unavailable("request without a method this version knows")
    if not 0 < header.timeout_ms <= TIMEOUT_MAX_S * 1000:
        raise RemoteFault(f"timeout of {header.timeout_ms} ms; from 1 ms to {TIMEOUT_MAX_S:.0f} s are allowed")
    bounds.check(header)
    return str(method), header


def open_reply(raw: bytes) -> wire.Reply:
    """Parse and check a reply. Raises RemoteFault if it does not parse, refuses but carries tensors, or has a field out
    of range."""
    header = bounds.parse(wire.Reply, raw, "reply header")
    if header.status != wire.STATUS_OK and header.tensors:
        raise RemoteFault("a reply that is not OK cannot carry tensors")
    bounds.check(header)
    return header


def check_spec(spec: wire.TensorSpec, nbytes_max: int) -> int:
    """The bytes `spec` announces, checked against its own shape and against `nbytes_max`. Allocates nothing.

    Raises RemoteFault for an unknown dtype, too many dimensions, a size over the bound, or a size that does not match
    the shape.
    """
    dtype = spec.dtype
    shape = spec.shape
    nbytes = int(spec.nbytes)
    if dtype not in DTYPE_BYTES:
        raise RemoteFault(f"tensor of unknown dtype {dtype[:16]!r}; known: {', '.join(DTYPE_BYTES)}")
    if len(shape) > DIMENSIONS_MAX:
        raise RemoteFault(f"tensor of {len(shape)} dimensions; at most {DIMENSIONS_MAX}")
    if nbytes > nbytes_max:
        raise RemoteFault(f"tensor of {nbytes} bytes announced; at most {nbytes_max} are accepted here")
    if spec.codec in ("", "raw") and math.prod(shape) * DTYPE_BYTES[dtype] != nbytes:
        raise RemoteFault(f"tensor {dtype}{list(shape)} announced with {nbytes} bytes")
    return nbytes


def check_tensors(specs: Iterable[wire.TensorSpec], nbytes_max: int) -> int:
    """The total bytes `specs` announce. Raises RemoteFault if there are too many tensors or they are too large."""
    total = 0
    for count, spec in enumerate(specs, start=1):
        if count > TENSORS_MAX:
            raise RemoteFault(f"more than {TENSORS_MAX} tensors in one message")
        if len(spec.codec) > CODEC_CHARACTERS_MAX:
            raise RemoteFault(f"codec name of {len(spec.codec)} characters; at most {CODEC_CHARACTERS_MAX}")
        total += check_spec(spec, nbytes_max - total)
    return total


def reply_of(error: Busy | Unavailable | RemoteFault) -> wire.Reply:
    """The reply that carries a handler's refusal to the caller. The peer sees the error's text."""
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
    reply = wire.Reply(
        status=status, reason=printable(cause_of(error), REASON_CHARACTERS_MAX), retry_after_ms=retry_after_ms
    )
    reply.start_anew = isinstance(error, StartAnew)
    if isinstance(error, Forbidden) and error.evidence:
        reply.access_list.CopyFrom(bounds.parse(access_pb2.SignedAccessList, error.evidence, "own access list"))
    return reply


def raise_for(peer: PeerId, reply: wire.Reply) -> None:
    """Raise the error that `reply` from `peer` states: Busy, Unavailable, Refused, Forbidden or RemoteFault. Return if
    OK."""
    if reply.status == wire.STATUS_OK:
        return
    said = printable(reply.reason)
    retry_after_s = min(reply.retry_after_ms / 1000.0, RETRY_AFTER_MAX_S)
    match reply.status:
        case wire.STATUS_BUSY:
            raise Busy(f"{short(peer)} is busy: {said}", retry_after_s)
        case wire.STATUS_UNAVAILABLE:
            if reply.start_anew:
                raise StartAnew(f"{short(peer)}: {said}", retry_after_s)
            raise Unavailable(f"{short(peer)} is not available: {said}", retry_after_s)
        case wire.STATUS_REFUSED:
            raise Refused(f"{short(peer)} refused: {said}")
        case wire.STATUS_FORBIDDEN:
            evidence = reply.access_list.SerializeToString() if reply.HasField("access_list") else b""
            raise Forbidden(f"{short(peer)} does not let us in: {said}", evidence)
        case wire.STATUS_FAULT:
            raise RemoteFault(f"{short(peer)} failed: {said}")
        case _:
            raise RemoteFault(f"{short(peer)} answered with unknown status {reply.status}")

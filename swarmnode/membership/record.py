"""Records: what a node says of itself, signed by the key inside its peer id, with a time to live (design section 6)."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from swarmnode import bounds
from swarmnode.errors import RemoteFault
from swarmnode.identity import SIGNATURE_BYTES, Identity, verify
from swarmnode.ids import PeerId, RunId
from swarmnode.membership import swarm, view
from swarmnode.wire import access_pb2 as access
from swarmnode.wire import record_pb2 as wire

SIGNED_BYTES_MAX = 1280  # hivemind.md: DHT values of about 1 KiB keep a dictionary of 500 quick; a pass adds 190 bytes
CLOCK_SKEW_MAX_S = 3.0  # hivemind lets clocks differ by as much when a node joins

VERIFIED_MAX = 2048  # guess: 3 KiB each; a record is heard about three times, by calls and from the directory

_DOMAIN = b"swarmnode/record/v1\0"


def sign_record(record: wire.Record, identity: Identity) -> wire.SignedRecord:
    """`record` signed by `identity`, which it must name. Asserts that it is within every bound `check_record` has."""
    raw = record.SerializeToString(deterministic=True)
    signed = wire.SignedRecord(record=raw, signature=identity.sign(_DOMAIN + raw))
    fault = _fault(record)
    assert record.peer_id == identity.peer_id, f"a record of {record.peer_id} cannot be signed by {identity.peer_id}"
    assert fault is None, f"own record: {fault}"
    assert signed.ByteSize() <= SIGNED_BYTES_MAX, f"own record has {signed.ByteSize()} bytes, not {SIGNED_BYTES_MAX}"
    _keep(raw, signed.signature, wire.Record.FromString(raw))
    return signed


def open_record(signed: wire.SignedRecord, *, run_id: RunId, now_unix_s: float, ttl_max_s: float) -> wire.Record:
    """The record inside `signed`, verified and neither expired nor claiming to live longer than `ttl_max_s`.

    Raises RemoteFault that says what is wrong with it. Clocks may differ by `CLOCK_SKEW_MAX_S`.
    """
    record = check_record(signed, run_id=run_id)
    check_time(record, now_unix_s, ttl_max_s)
    return record


def check_time(record: wire.Record, now_unix_s: float, ttl_max_s: float) -> None:
    """Raises RemoteFault when `record` has expired or wants to live longer than `ttl_max_s`."""
    left_s = record.expires_unix_ms / 1000.0 - now_unix_s
    if left_s <= 0:
        raise RemoteFault(f"record of {record.peer_id} expired {-left_s:.1f} s ago")
    if left_s > ttl_max_s + CLOCK_SKEW_MAX_S:
        raise RemoteFault(f"record of {record.peer_id} wants to live {left_s:.0f} s; at most {ttl_max_s:.0f} s")


def check_record(signed: wire.SignedRecord, *, run_id: RunId) -> wire.Record:
    """The record inside `signed`, verified in everything but time. Raises RemoteFault; cheapest checks first.

    The message returned is shared with whoever hears the same record again: not to be changed.
    """
    if (known := swarm.shared(signed)) is not None:
        return known[1]
    record, member = check_member(signed, run_id=run_id)
    swarm.share(signed, record, member)
    return record


def check_member(signed: wire.SignedRecord, *, run_id: RunId) -> tuple[wire.Record, swarm.Member]:
    """As `check_record` does, the record inside `signed` and the member it tells of."""
    if (nbytes := signed.ByteSize()) > SIGNED_BYTES_MAX:
        raise RemoteFault(f"record of {nbytes} bytes; at most {SIGNED_BYTES_MAX}")
    return _check(signed.record, signed.signature, run_id)


Verified = tuple[wire.Record, swarm.Member]
_verified: dict[bytes, tuple[bytes, Verified]] = {}  # by signatures: a record's bytes, and it; the oldest first
_verified_max = VERIFIED_MAX


def _keep(raw: bytes, signature: bytes, record: wire.Record) -> Verified:
    """Know `record` again without looking at its signature: it was signed here, or verified."""
    if len(_verified) >= _verified_max:
        del _verified[next(iter(_verified))]
    found = record, swarm.Member.of(record)
    _verified[signature] = raw, found
    return found


def _check(raw: bytes, signature: bytes, run_id: RunId) -> Verified:
    known = _verified.get(signature)
    if known is not None and known[0] == raw and known[1][0].run_id == run_id:
        return known[1]
    if len(signature) != SIGNATURE_BYTES:
        raise RemoteFault(f"record with a signature of {len(signature)} bytes; Ed25519 has {SIGNATURE_BYTES}")
    record = wire.Record()
    try:
        record.ParseFromString(raw)
    except DecodeError:
        raise RemoteFault("record that does not parse") from None
    if record.run_id != run_id:
        raise RemoteFault(f"record of run {record.run_id[:16]!r}; this is run {run_id[:16]!r}")
    if (fault := _fault(record)) is not None:
        raise RemoteFault(f"record of {record.peer_id[:64]!r}: {fault}")
    if not verify(PeerId(record.peer_id), _DOMAIN + raw, signature):
        raise RemoteFault(f"record of {record.peer_id[:64]!r} is forged: its signature does not verify")
    return _keep(raw, signature, record)


def pass_of(record: wire.Record) -> access.Pass | None:
    """The pass `record` carries, not verified; None when it carries none."""
    return getattr(record, "pass") if record.HasField("pass") else None


def _fault(record: wire.Record) -> str | None:
    """What is wrong with the fields of `record`, or None."""
    try:
        bounds.check(record)
    except RemoteFault as fault:
        return str(fault)
    if not all(address.startswith("/") for address in record.addresses):
        return "an address that is not a multiaddr"
    if record.state == wire.NODE_STATE_UNSPECIFIED:
        return "no state"
    told = record.progress
    if told.feeders[:] not in ([], [record.peer_id]) or len(told.samples) != len(told.feeders):
        return "progress of somebody else"
    if record.stage != 0 and record.HasField("blocks"):
        return f"data blocks at stage {record.stage}; only feeders (stage 0) have them"
    return None


def remember(count: int) -> None:
    """Keep `count` verified records, not the few that one node needs, and know messages shared in memory by themselves:
    for a process of many nodes."""
    global _verified_max
    _verified_max = max(1, count)
    _verified.clear()
    swarm.forget_shared(count)
    view.forget()

"""Records: signed self-descriptions of nodes with a time to live. The signing key is the one inside the peer id."""

from __future__ import annotations

from swarmnode.base import bounds
from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import SIGNATURE_BYTES, Identity, verify
from swarmnode.base.ids import PeerId, RunId, part_of, stage_name
from swarmnode.base.remembered import REMEMBERED_MAX
from swarmnode.base.wire import access_pb2 as access
from swarmnode.base.wire import record_pb2 as wire
from swarmnode.net.membership import swarm

# Measured: DHT values of about 1 KiB keep a dictionary of 500 fast; a pass adds 190 bytes
SIGNED_BYTES_MAX = 1280
CLOCK_SKEW_MAX_S = 3.0  # hivemind accepts the same difference of clocks when a node joins

# Derived: 40 s where `init` writes 2 s, which 1,000 nodes in one stage need. Records live as much longer.
STRETCH_MAX = 20
VERIFIED_MAX = REMEMBERED_MAX  # 3 KiB each; a record is heard about three times, by calls and from the directory

_DOMAIN = b"swarmnode/record/v1\0"


def sign_record(record: wire.Record, identity: Identity) -> wire.SignedRecord:
    """`record` signed by `identity`, which it must name. Asserts the bounds of `check_record`."""
    raw = record.SerializeToString(deterministic=True)
    signed = wire.SignedRecord(record=raw, signature=identity.sign(_DOMAIN + raw))
    fault = _fault(record)
    assert record.peer_id == identity.peer_id, f"a record of {record.peer_id} cannot be signed by {identity.peer_id}"
    assert fault is None, f"own record: {fault}"
    assert signed.ByteSize() <= SIGNED_BYTES_MAX, f"own record has {signed.ByteSize()} bytes, not {SIGNED_BYTES_MAX}"
    _keep(raw, signed.signature, bounds.parse(wire.Record, raw, "own record"))
    return signed


def open_record(signed: wire.SignedRecord, *, run_id: RunId, now_unix_s: float, ttl_max_s: float) -> wire.Record:
    """The record inside `signed`, verified, unexpired, and with a time to live of at most `ttl_max_s`.

    Raises RemoteFault that names the problem. Clocks may differ by `CLOCK_SKEW_MAX_S`.
    """
    record = check_record(signed, run_id=run_id)
    check_time(record, now_unix_s, ttl_max_s)
    return record


def check_time(record: wire.Record, now_unix_s: float, ttl_max_s: float) -> None:
    """Raises RemoteFault if `record` has expired or claims to live longer than `ttl_max_s`."""
    left_s = record.expires_unix_ms / 1000.0 - now_unix_s
    if left_s <= 0:
        raise RemoteFault(f"record of {record.peer_id} expired {-left_s:.1f} s ago")
    if left_s > ttl_max_s + CLOCK_SKEW_MAX_S:
        raise RemoteFault(f"record of {record.peer_id} wants to live {left_s:.0f} s; at most {ttl_max_s:.0f} s")


def check_record(signed: wire.SignedRecord, *, run_id: RunId) -> wire.Record:
    """The record inside `signed`, verified except for time. Raises RemoteFault; cheap checks come first.

    The returned message is shared with later receivers of the same record: do not change it.
    """
    if (known := swarm.shared(signed)) is not None:
        return known[1]
    record, member = check_member(signed, run_id=run_id)
    swarm.share(signed, record, member)
    return record


def check_member(signed: wire.SignedRecord, *, run_id: RunId) -> tuple[wire.Record, swarm.Member]:
    """The record inside `signed` and its member, verified as by `check_record`."""
    if (nbytes := signed.ByteSize()) > SIGNED_BYTES_MAX:
        raise RemoteFault(f"record of {nbytes} bytes; at most {SIGNED_BYTES_MAX}")
    return _check(signed.record, signed.signature, run_id)


Verified = tuple[wire.Record, swarm.Member]
_verified: dict[bytes, tuple[bytes, Verified]] = {}  # by signature: the record's bytes and content; the oldest first
_verified_max = VERIFIED_MAX


def _keep(raw: bytes, signature: bytes, record: wire.Record) -> Verified:
    """Cache `record`, which was signed here or verified, so that it need not be verified again."""
    if len(_verified) >= _verified_max:
        del _verified[next(iter(_verified))]
    verified = record, swarm.Member.of(record)
    _verified[signature] = raw, verified
    return verified


def _check(raw: bytes, signature: bytes, run_id: RunId) -> Verified:
    known = _verified.get(signature)
    if known is not None and known[0] == raw and known[1][0].run_id == run_id:
        return known[1]
    if len(signature) != SIGNATURE_BYTES:
        raise RemoteFault(f"record with a signature of {len(signature)} bytes; Ed25519 has {SIGNATURE_BYTES}")
    record = bounds.parse(wire.Record, raw, "record")
    if record.run_id != run_id:
        raise RemoteFault(f"record of run {record.run_id[:16]!r}; this is run {run_id[:16]!r}")
    if (fault := _fault(record)) is not None:
        raise RemoteFault(f"record of {record.peer_id[:64]!r}: {fault}")
    if not verify(PeerId(record.peer_id), _DOMAIN + raw, signature):
        raise RemoteFault(f"record of {record.peer_id[:64]!r} is forged: its signature does not verify")
    return _keep(raw, signature, record)


def pass_of(record: wire.Record) -> access.Pass | None:
    """The unverified pass inside `record`; None if there is none."""
    return getattr(record, "pass") if record.HasField("pass") else None


def _fault(record: wire.Record) -> str | None:
    """The problem in the fields of `record`, or None."""
    try:
        bounds.check(record)
    except RemoteFault as fault:
        return str(fault)
    if not all(address.startswith("/") for address in record.addresses):
        return "an address that is not a multiaddr"
    if record.state == wire.NODE_STATE_UNSPECIFIED:
        return "no state"
    if part_of(PeerId(record.peer_id)) not in (None, record.stage):
        return f"{stage_name(record.stage)} of another stage's part"
    progress = record.progress
    if progress.feeders[:] not in ([], [record.peer_id]) or len(progress.samples) != len(progress.feeders):
        return "progress of another feeder"
    return None


def remember(count: int) -> None:
    """Cache `count` verified records instead of the few that one node needs, and recognise messages shared in memory.
    For a process of many nodes."""
    global _verified_max
    _verified_max = max(1, count)
    _verified.clear()
    swarm.forget_shared(count)

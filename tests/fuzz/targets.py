"""What a stranger, a damaged disk or a careless hand can put into this program, as functions of bytes.

Each target has seeds (valid inputs) and `take`, which must come back quietly: a refusal of ours (SwarmnodeError) is
what it is for, anything else is a bug. `take` also asserts what must hold for what it accepts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError

from swarmnode import owner
from swarmnode.errors import RemoteFault, SwarmnodeError
from swarmnode.identity import Identity
from swarmnode.ids import RunId
from swarmnode.manifest import Manifest, parse, parse_signed, sign, template
from swarmnode.membership.access import Guests, Rules, open_guests, permitted, sign_grant, sign_guests, sign_pass
from swarmnode.membership.door import parse_pass
from swarmnode.membership.invite import Invite, decode, encode
from swarmnode.membership.record import check_record, sign_record
from swarmnode.node.limits import Limits, change
from swarmnode.ports import WireTensor
from swarmnode.transport import frame
from swarmnode.transport.frame import PREAMBLE, Flag, Kind
from swarmnode.wire import access_pb2, call_pb2, control_pb2, record_pb2
from tests.fuzz.watching import receipts, reports, take_receipt, take_report

RUN = RunId("ab" * 32)
OWNER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
KEY = owner.public_bytes(OWNER)
ME = Identity.of_seed(b"m" * 32)
DELEGATE = Identity.of_seed(b"d" * 32)
NBYTES_MAX = 1 << 20


@dataclass(frozen=True)
class Target:
    seeds: tuple[bytes, ...]
    take: Callable[[bytes], None]


def quietly(take: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """`take`, its refusals swallowed: they must say something."""

    @functools.wraps(take)
    def inner(raw: bytes) -> None:
        try:
            take(raw)
        except SwarmnodeError as refusal:
            assert str(refusal), "a refusal that says nothing"

    return inner


# ---- frames


def frames() -> tuple[bytes, ...]:
    tensors = [WireTensor("f32", (2, 3), bytes(24)), WireTensor("u8", (5,), bytes(5), "int8")]
    process = call_pb2.Process(microbatch_id=b"m" * 16, feeder=ME.peer_id, samples=4, itinerary=[0, 1, 2], position=1)
    request = frame.seal_request(call_pb2.Request(process=process), tensors, RUN, 5.0)
    reply = frame.seal_reply(call_pb2.Reply(status=call_pb2.STATUS_OK, processed=call_pb2.Processed(tokens=3)), tensors)
    shown = frame.seal_pass(a_pass())
    return (
        frame.preamble(Kind.REQUEST, len(request)) + request,
        frame.preamble(Kind.REPLY, len(reply), Flag.LAST) + reply,
        shown,
    )


@quietly
def take_frame(raw: bytes) -> None:
    if len(raw) < PREAMBLE.size:
        return
    kind = Kind.REPLY if frame.kind_of(raw) == Kind.REPLY else Kind.REQUEST
    if frame.kind_of(raw) == Kind.PASS:
        frame.open_preamble(raw[: PREAMBLE.size], Kind.PASS)
        parse_pass(raw[PREAMBLE.size :])
        return
    nbytes, _ = frame.open_preamble(raw[: PREAMBLE.size], kind)
    assert nbytes <= frame.HEADER_BYTES_MAX
    body = raw[PREAMBLE.size :]
    header: Any = frame.open_request(body, RUN)[1] if kind is Kind.REQUEST else frame.open_reply(body)
    total = frame.check_tensors(header.tensors, NBYTES_MAX)
    assert total <= NBYTES_MAX, "more is accepted than is allowed"
    assert sum(tensor.nbytes for tensor in frame.allocate(header.tensors)) == total


# ---- records, passes, guest lists


def a_pass() -> access_pb2.Pass:
    return sign_pass(DELEGATE, RUN, sign_grant(OWNER, RUN, DELEGATE, 2_000_000_000, 3), ME.peer_id, 2_000_000_000)


def records() -> tuple[bytes, ...]:
    record = record_pb2.Record(
        run_id=RUN,
        peer_id=ME.peer_id,
        sequence=7,
        expires_unix_ms=1,
        state=record_pb2.NODE_STATE_TRAINING,
        addresses=["/ip4/1.2.3.4/tcp/4001"],
        samples_per_second=3.5,
        blocks=record_pb2.Blocks(finished_below=2, finished=[3, 5]),
        progress=record_pb2.Progress(samples={ME.peer_id: 9}),
    )
    getattr(record, "pass").CopyFrom(a_pass())
    return (sign_record(record, ME).SerializeToString(),)


@quietly
def take_record(raw: bytes) -> None:
    try:
        signed = record_pb2.SignedRecord.FromString(raw)
    except DecodeError:
        return
    record = check_record(signed, run_id=RUN)
    assert record.peer_id == ME.peer_id, "somebody else's signature"


@quietly
def take_pass(raw: bytes) -> None:
    shown = parse_pass(raw)
    if permitted(Rules(RUN, KEY, False), ME.peer_id, shown, 1.9e9)[0]:
        assert shown.grant.delegate == DELEGATE.public_key and shown.grant.machines_max == 3, "a forged pass"


@quietly
def take_guests(raw: bytes) -> None:
    try:
        signed = access_pb2.SignedGuestList.FromString(raw)
    except DecodeError:
        return
    assert open_guests(signed, RUN, KEY) == GUESTS, "a forged guest list"


GUESTS = Guests(3, frozenset([ME.peer_id]), frozenset([DELEGATE.peer_id]), frozenset([b"12345678"]))


# ---- invites and manifests


def invites() -> tuple[bytes, ...]:
    grant = sign_grant(OWNER, RUN, DELEGATE, 2_000_000_000)
    here = (f"/ip4/1.2.3.4/tcp/4001/p2p/{ME.peer_id}", f"/dns4/a.example/tcp/1/p2p/{ME.peer_id}")
    return (
        encode(Invite(RUN, KEY, here)).encode(),
        encode(Invite(RUN, KEY, here, grant, DELEGATE.seed)).encode(),
        encode(Invite(RUN, KEY, here[:1], machine_pass=a_pass(), machine=ME.peer_id)).encode(),
    )


@quietly
def take_invite(raw: bytes) -> None:
    invite = decode(raw.decode("utf-8", "replace"))
    assert decode(encode(invite)).bootstraps, "what is accepted can be passed on"


@quietly
def take_signed_manifest(raw: bytes) -> None:
    _, manifest = parse_signed(raw, "fuzz", None)
    assert manifest == Manifest()


def tables() -> list[bytes]:
    """The template, a table each: what is left out has its default."""
    first, *rest = template().split("\n[")
    return [first.encode(), *(f"[{table}".encode() for table in rest)]


@quietly
def take_manifest(raw: bytes) -> None:
    manifest = parse(raw.decode("utf-8", "replace"), "fuzz")
    assert parse(template(manifest), "again") == manifest


# ---- packets


def _flat() -> Any:
    import torch

    return torch.from_numpy(np.random.default_rng(3).standard_normal(4096).astype(np.float32))


@functools.cache
def _codecs() -> dict[str, Any]:
    from swarmnode.gossip.compression import CODECS, codec

    return {name: codec(name) for name in CODECS}


@functools.cache
def _packets() -> dict[str, Any]:
    flat = _flat()
    return {name: made.encode(flat + 0.01, reference=flat, seed=1) for name, made in _codecs().items()}


def packets() -> tuple[bytes, ...]:
    return tuple(
        bytes([number]) + b"".join(bytes(tensor.data) for tensor in tensors)
        for number, tensors in enumerate(_packets().values())
    )


@quietly
def take_packet(raw: bytes) -> None:
    """The first byte chooses the codec; the rest is cut into the tensors that codec sends."""
    import torch

    if not raw:
        return
    name = list(_codecs())[raw[0] % len(_codecs())]
    made, rest, tensors = _codecs()[name], memoryview(raw)[1:], []
    for like in _packets()[name]:
        data = bytes(rest[: like.nbytes])
        rest = rest[like.nbytes :]
        tensors.append(WireTensor(like.dtype, like.shape, data, like.codec))
    if any(tensor.nbytes != like.nbytes for tensor, like in zip(tensors, _packets()[name], strict=True)):
        tensors = [WireTensor(t.dtype, (t.nbytes,), t.data, t.codec) for t in tensors]
    flat = _flat()
    out = torch.zeros_like(flat)
    try:
        made.decode(tensors, out, flat)
    except RemoteFault:
        assert not out.any(), "a bad packet changed something"
        raise
    assert torch.isfinite(out).all(), f"{name} let a number through that is none"


# ---- the control API


class _Api:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        return {
            "pause": lambda for_s, reason: control_pb2.LimitsReply(),
            "change": lambda changed: change(Limits(), changed) and control_pb2.LimitsReply(),
            "leave": lambda *words: None,
        }[name]


class _Abort(SwarmnodeError):
    pass


class _Context:
    async def abort(self, code: object, details: str) -> None:
        raise _Abort(details)


CONTROL = (
    ("Pause", control_pb2.PauseRequest(for_s=60, reason="x")),
    ("Limit", control_pb2.LimitRequest(changed={"max-up": "20Mbit", "hours": "22-07"})),
    ("Leave", control_pb2.LeaveRequest(reason="go")),
)


@quietly
def take_control(raw: bytes) -> None:
    """The first byte chooses the method. ValueError is what Desk turns into a UsageError."""
    from swarmnode.control.service import _Servicer

    if not raw:
        return
    method, like = CONTROL[raw[0] % len(CONTROL)]
    try:
        request = type(like).FromString(raw[1:])
    except DecodeError:
        return
    servicer = _Servicer(_Api())  # type: ignore[arg-type]
    coroutine = getattr(servicer, method)(request, _Context())
    try:
        coroutine.send(None)
    except (StopIteration, ValueError):
        pass
    finally:
        coroutine.close()


@functools.cache
def targets() -> Mapping[str, Target]:
    """All of them; seeds are made on the first call."""
    signed = sign(Manifest(), OWNER).SerializeToString(deterministic=True)
    control = tuple(bytes([number]) + like.SerializeToString() for number, (_, like) in enumerate(CONTROL))
    return {
        "frame": Target(frames(), take_frame),
        "record": Target(records(), take_record),
        "pass": Target((a_pass().SerializeToString(),), take_pass),
        "guests": Target((sign_guests(OWNER, RUN, GUESTS).SerializeToString(),), take_guests),
        "invite": Target(invites(), take_invite),
        "manifest": Target(tuple(tables()), take_manifest),
        "signed manifest": Target((signed,), take_signed_manifest),
        "packet": Target(packets(), take_packet),
        "control": Target(control, take_control),
        "receipt": Target(receipts(), take_receipt),
        "report": Target(reports(), take_report),
    }


__all__ = ["Target", "targets"]

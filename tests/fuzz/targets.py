"""What a stranger, a damaged disk or a careless hand can put into this program, as functions of bytes.

Each target has seeds (valid inputs) and `take`, which must come back quietly: a refusal of ours (SwarmnodeError) is
what it is for, anything else is a bug. `take` also asserts what must hold for what it accepts. It says whether that was
so: of a target that refuses nearly everything at its first check, a million inputs test that check only. So what is
signed is a target twice: as it comes, and "inside", where a stranger with a key of its own signs what it made up.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError, Message

from swarmnode.base.bounds import FIELDS
from swarmnode.base.errors import Forbidden, RemoteFault, SwarmnodeError, UsageError
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId
from swarmnode.base.ports import WireTensor
from swarmnode.base.wire import access_pb2, call_pb2, record_pb2
from swarmnode.net.membership.progress import to_message
from swarmnode.net.membership.record import _DOMAIN as RECORD_DOMAIN
from swarmnode.net.membership.record import check_record, sign_record
from swarmnode.net.transport import frame
from swarmnode.net.transport.frame import PREAMBLE, FrameFlag, FrameKind
from swarmnode.run import owner
from swarmnode.run.admission.access import _ACCESS_LIST as ACCESS_LIST_DOMAIN
from swarmnode.run.admission.access import (
    AccessList,
    AccessRules,
    open_access_list,
    permitted,
    sign_access_list,
    sign_grant,
    sign_pass,
)
from swarmnode.run.admission.admission import Admission, parse_pass
from swarmnode.run.admission.invite import Invite, decode, encode
from swarmnode.run.manifest import Manifest, parse, parse_signed, sign, template
from swarmnode.run.manifest.recipe import PRESETS
from swarmnode.run.manifest.signed import DOMAIN, canonical, run_id_of, verify
from swarmnode.train.node.limits import Limits, change
from tests.fuzz.files import SEEDS as FILES
from tests.fuzz.watching import receipts, take_receipt
from tests.support.method_tables import CODECS

RUN = RunId("ab" * 32)
OWNER = Ed25519PrivateKey.from_private_bytes(b"o" * 32)
KEY = owner.public_bytes(OWNER)
ME = Identity.of_seed(b"m" * 32)
DELEGATE = Identity.of_seed(b"d" * 32)
NBYTES_MAX = 1 << 20
_NUMBERS = (b"-1", b"0", b"0.0", b"-0.0", b"1e999", b"1e-400", b"9" * 40)
_WORDS = (*_NUMBERS, b"true", b'"x"', b'""', b"[]", b"{}", b'"\\u0000"')
TOML = (*_WORDS, b"nan", b"inf", b"-inf", b"1979-05-27", b"0x10", b"[[model]]", b"[model]", b'["a"]', b'"""')
JSON = (*_WORDS, b"null", b"NaN", b"Infinity", b'[["a"]]', b'{"format":1}', b'"\\ud800"')


@dataclass(frozen=True)
class Target:
    seeds: tuple[bytes, ...]
    take: Callable[[bytes], bool]
    tokens: tuple[bytes, ...] = ()


def quietly(take: Callable[[bytes], object]) -> Callable[[bytes], bool]:
    """`take`, its refusals swallowed: they must say something. True: it accepted the input."""

    @functools.wraps(take)
    def inner(raw: bytes) -> bool:
        try:
            take(raw)
        except SwarmnodeError as refusal:
            assert str(refusal), "a refusal that says nothing"
            return False
        except DecodeError:  # protobuf's own first check, where the code under test leaves it to its caller
            return False
        return True

    return inner


# ---- frames


def frames() -> tuple[bytes, ...]:
    tensors = [WireTensor("f32", (2, 3), bytes(24)), WireTensor("u8", (5,), bytes(5), "int8")]
    process = call_pb2.Process(microbatch_id=b"m" * 16, feeder=ME.peer_id, samples=4, itinerary=[0, 1, 2], position=1)
    request = frame.seal_request(call_pb2.Request(process=process), tensors, RUN, 5.0)
    reply = frame.seal_reply(call_pb2.Reply(status=call_pb2.STATUS_OK, processed=call_pb2.Processed(tokens=3)), tensors)
    shown = frame.seal_pass(a_pass())
    return (
        frame.preamble(FrameKind.REQUEST, len(request)) + request,
        frame.preamble(FrameKind.REPLY, len(reply), FrameFlag.LAST) + reply,
        shown,
    )


@quietly
def take_frame(raw: bytes) -> None:
    if len(raw) < PREAMBLE.size:
        raise RemoteFault("no preamble")
    kind = FrameKind.REPLY if frame.kind_of(raw) == FrameKind.REPLY else FrameKind.REQUEST
    if frame.kind_of(raw) == FrameKind.PASS:
        frame.open_preamble(raw[: PREAMBLE.size], FrameKind.PASS)
        parse_pass(raw[PREAMBLE.size :])
        return
    nbytes, _ = frame.open_preamble(raw[: PREAMBLE.size], kind)
    assert nbytes <= frame.HEADER_BYTES_MAX
    body = raw[PREAMBLE.size :]
    header: Any = frame.open_request(body, RUN)[1] if kind is FrameKind.REQUEST else frame.open_reply(body)
    total = frame.check_tensors(header.tensors, NBYTES_MAX)
    assert total <= NBYTES_MAX, "more is accepted than is allowed"
    assert sum(tensor.nbytes for tensor in frame.allocate(header.tensors)) == total


# ---- records, passes, access lists


def a_pass() -> access_pb2.Pass:
    return sign_pass(DELEGATE, RUN, sign_grant(OWNER, RUN, DELEGATE, 2_000_000_000, 3), ME.peer_id, 2_000_000_000)


def inner_record(signed: bytes) -> bytes:
    return record_pb2.SignedRecord.FromString(signed).record


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
        progress=to_message({ME.peer_id: 9}),
    )
    getattr(record, "pass").CopyFrom(a_pass())
    return (sign_record(record, ME).SerializeToString(),)


@quietly
def take_record(raw: bytes) -> None:
    record = check_record(record_pb2.SignedRecord.FromString(raw), run_id=RUN)
    assert record.peer_id == ME.peer_id, "somebody else's signature"


@quietly
def take_record_inside(raw: bytes) -> None:
    signed = record_pb2.SignedRecord(record=raw, signature=ME.sign(RECORD_DOMAIN + raw))
    record = check_record(signed, run_id=RUN)
    assert (
        record.run_id == RUN
        and record.peer_id == ME.peer_id
        and len(record.addresses) <= FIELDS["Record.addresses"].many
    )


@quietly
def take_pass(raw: bytes) -> None:
    shown = parse_pass(raw)
    permit, reason = permitted(AccessRules(RUN, KEY, False), ME.peer_id, shown, 1.9e9)
    if not permit:
        raise Forbidden(reason)
    assert shown.grant.delegate == DELEGATE.public_key and shown.grant.machines_max == 3, "a forged pass"


@quietly
def take_access_list(raw: bytes) -> None:
    assert open_access_list(access_pb2.SignedAccessList.FromString(raw), RUN, KEY) == ACCESS_LIST, (
        "a forged access list"
    )


@quietly
def take_access_list_inside(raw: bytes) -> None:
    signed = access_pb2.SignedAccessList(list=raw, signature=OWNER.sign(ACCESS_LIST_DOMAIN + raw))
    admission = Admission(AccessRules(RUN, KEY, is_open=False), Noon())
    if admission.learn(signed):
        permit, reason = admission.judge(ME.peer_id)
        assert reason and (not permit or ME.peer_id in admission.rules.access_list.allowed)
        assert admission.refusal(ME.peer_id, reason).args


ACCESS_LIST = AccessList(3, frozenset([ME.peer_id]), frozenset([DELEGATE.peer_id]), frozenset([b"12345678"]))


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


@quietly
def take_manifest_inside(raw: bytes) -> None:
    signed = record_pb2.SignedManifest(manifest=raw, owner=KEY, signature=OWNER.sign(DOMAIN + raw))
    manifest, run_id = verify(signed, None)
    assert canonical(manifest) == raw and run_id == run_id_of(raw, KEY)


def tables() -> tuple[bytes, ...]:
    """The template, a table each (what is left out has its default), and the smallest of them with its comments."""
    first, *rest = template().split("\n[")
    whole = [first, *(f"[{table}" for table in rest)]
    bare = ("\n".join(line for line in text.splitlines() if line and line[0] != "#") for text in whole)
    return tuple(text.encode() for text in (*bare, min(whole, key=len)))


def manifests() -> tuple[bytes, ...]:
    return tuple(canonical(manifest) for manifest in (Manifest(), *PRESETS.values()))


@functools.cache
def _round_trip(manifest: Manifest) -> bool:
    """Once for each different one: it costs twenty times what parsing a table does."""
    return parse(template(manifest), "again") == manifest


@quietly
def take_manifest(raw: bytes) -> None:
    assert _round_trip(parse(raw.decode("utf-8", "replace"), "fuzz"))


# ---- packets


@functools.cache
def _flat() -> Any:
    import torch

    return torch.from_numpy(np.random.default_rng(3).standard_normal(4096).astype(np.float32))


@functools.cache
def _codecs() -> dict[str, Any]:
    from swarmnode.train.gossip.compression import codec

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
        raise RemoteFault("no bytes")
    name = list(_codecs())[raw[0] % len(_codecs())]
    made = _codecs()[name]
    rest = memoryview(raw)[1:]
    tensors = []
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
        assert not np.any(out.numpy()), "a bad packet changed something"
        raise
    assert torch.isfinite(out).all(), f"{name} let a number through that is none"


# ---- activations between stages

BOUNDARIES = ("bf16", "int8", "int4", "int2")
ACTIVATIONS = (2, 3, 70)  # samples, tokens, numbers of a token


@functools.cache
def activations() -> tuple[bytes, ...]:
    import torch

    from swarmnode.model.boundary_code import encode_boundary

    x = torch.from_numpy(np.random.default_rng(5).standard_normal(ACTIVATIONS).astype(np.float32))
    return tuple(bytes([at]) + bytes(encode_boundary(x, kind).data) for at, kind in enumerate(BOUNDARIES))


@quietly
def take_activations(raw: bytes) -> None:
    """The first byte chooses pipeline.boundary; the rest is the tensor's data."""
    import torch

    from swarmnode.model.boundary_code import decode_boundary

    if not raw:
        raise RemoteFault("no bytes")
    kind = BOUNDARIES[raw[0] % len(BOUNDARIES)]
    dtype, codec = ("bf16", "raw") if kind == "bf16" else ("f32", kind)
    found = decode_boundary(WireTensor(dtype, ACTIVATIONS, raw[1:], codec), kind, (None, 3, 70), "activations")
    assert found.shape == ACTIVATIONS and torch.isfinite(found).all(), f"{kind} let a number through that is none"


# ---- the control API


class Noon:
    def unix_s(self) -> float:
        return 1.9e9


CONTROL: Mapping[str, dict[str, object]] = {
    "pause": {"for_s": 60, "reason": "x"},
    "limit": {"changed": {"max-up": "20Mbit", "hours": "22-07"}},
    "leave": {"reason": "go", "stopping": True},
}


@quietly
def take_control(raw: bytes) -> None:
    """The first byte chooses the verb. ValueError is what the daemon turns into a UsageError."""
    from swarmnode.app.control.verb import VERBS

    if not raw:
        raise RemoteFault("no bytes")
    verb = list(CONTROL)[raw[0] % len(CONTROL)]
    take_request(verb, VERBS[verb].from_json(raw[1:]))


@quietly
def take_control_message(raw: bytes) -> None:
    """The same by gRPC."""
    from swarmnode.app.control.verb import VERBS

    if not raw:
        raise RemoteFault("no bytes")
    verb = list(CONTROL)[raw[0] % len(CONTROL)]
    take_request(verb, VERBS[verb].from_wire(raw[1:]))


def take_request(verb: str, request: Message) -> None:
    from swarmnode.app.control.verb import REASON_CHARACTERS_MAX, SECONDS_MAX, arguments

    values = arguments(request)
    assert len(values.get("reason", "")) <= REASON_CHARACTERS_MAX and 0.0 <= values.get("for_s", 0.0) <= SECONDS_MAX
    if verb == "limit":
        try:
            change(Limits(), values["changed"])
        except ValueError as error:
            raise UsageError(str(error)) from None


def control_messages() -> tuple[bytes, ...]:
    from swarmnode.app.control.verb import VERBS

    asked = (VERBS[verb].from_json(json.dumps(values).encode()) for verb, values in CONTROL.items())
    return tuple(bytes([number]) + request.SerializeToString() for number, request in enumerate(asked))


# ---- what a browser and a person give


@quietly
def take_question(raw: bytes) -> None:
    from swarmnode.app.local.chat_page import MESSAGES_MAX, TOKENS_MAX, asked_of

    asked = asked_of(raw)
    assert 1 <= len(asked.messages) <= MESSAGES_MAX and 1 <= asked.tokens <= TOKENS_MAX


@quietly
def take_receipt_line(raw: bytes) -> None:
    from swarmnode.net.membership.receipt import receipt_from_json

    try:
        row = json.loads(raw)
    except (ValueError, RecursionError):
        raise RemoteFault("no JSON") from None
    receipt = receipt_from_json(row)
    assert receipt.client, "a receipt that nobody signed"


@quietly
def take_recipe(raw: bytes) -> None:
    from swarmnode.app.local.starter import parse

    parse(raw.decode(errors="replace"), "x")


QUESTION = b'{"messages": [{"role": "user", "content": "hello"}], "tokens": 20, "temperature": 0.5, "seed": 0}'


def receipt_lines() -> tuple[bytes, ...]:
    from swarmnode.base.wire.call_pb2 import Receipt
    from swarmnode.net.membership.receipt import receipt_to_json

    return tuple(json.dumps(receipt_to_json(Receipt.FromString(raw))).encode() for raw in receipts())


def recipes() -> tuple[bytes, ...]:
    from tests.cli.test_starter import GOOD

    return (GOOD.encode(),)


@functools.cache
def targets() -> Mapping[str, Target]:
    """All of them; seeds are made on the first call."""
    access_list = sign_access_list(OWNER, RUN, ACCESS_LIST)
    signed = sign(Manifest(), OWNER).SerializeToString(deterministic=True)
    control = tuple(bytes([number]) + json.dumps(values).encode() for number, values in enumerate(CONTROL.values()))
    return {
        "frame": Target(frames(), take_frame),
        "record": Target(records(), take_record),
        "record inside": Target(tuple(map(inner_record, records())), take_record_inside),
        "pass": Target((a_pass().SerializeToString(),), take_pass),
        "access_list": Target((access_list.SerializeToString(),), take_access_list),
        "access list inside": Target((access_list.list,), take_access_list_inside),
        "invite": Target(invites(), take_invite),
        "manifest": Target(tables(), take_manifest, TOML),
        "signed manifest": Target((signed,), take_signed_manifest),
        "manifest inside": Target(manifests(), take_manifest_inside, JSON),
        "packet": Target(packets(), take_packet),
        "activations": Target(activations(), take_activations),
        "control": Target(control, take_control, JSON),
        "control message": Target(control_messages(), take_control_message),
        "receipt": Target(receipts(), take_receipt),
        "receipt line": Target(receipt_lines(), take_receipt_line, JSON),
        "question": Target((QUESTION,), take_question, JSON),
        "recipe": Target(recipes(), take_recipe, TOML),
        **{name: Target((seed,), quietly(take), JSON) for name, (seed, take) in FILES.items()},
    }


__all__ = ["Target", "targets"]

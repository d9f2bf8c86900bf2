"""Every field of every message has its range, and what is out of it is refused where it arrives."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from swarmnode.base import bounds
from swarmnode.base.bounds import FIELDS, Bound
from swarmnode.base.errors import RemoteFault
from swarmnode.base.header import open_reply, open_request, seal_request
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId, seeded
from swarmnode.base.untrusted_text import printable
from swarmnode.base.wire import access_pb2, call_pb2, record_pb2, report_pb2
from swarmnode.net.membership.record import check_record
from tests.support.messages import fill, out_of_range

RUN = RunId("ab" * 32)
FILES = (record_pb2, access_pb2, call_pb2, report_pb2)


def reachable() -> dict[str, Descriptor]:
    """All messages of the protocol between nodes, with what they contain. The control API, on a socket that only this
    user can open, is not among them but for what a report carries."""
    found: dict[str, Descriptor] = {}

    def take(descriptor: Descriptor) -> None:
        if descriptor.name in found or descriptor.GetOptions().map_entry:
            return
        found[descriptor.name] = descriptor
        for field in descriptor.fields:
            if field.message_type is not None:
                take(field.message_type)

    for file in FILES:
        for descriptor in file.DESCRIPTOR.message_types_by_name.values():
            take(descriptor)
    return found


def fields() -> Iterator[tuple[str, Descriptor, FieldDescriptor]]:
    for descriptor in reachable().values():
        for field in descriptor.fields:
            yield f"{descriptor.name}.{field.name}", descriptor, field


def test_every_field_of_every_message_is_in_the_table_and_nothing_else() -> None:
    assert {name for name, _, _ in fields()} == set(FIELDS)
    assert all(bound.why for bound in FIELDS.values())
    assert all(bound.many >= 1 or name == "StatusReply.peers" for name, bound in FIELDS.items())


def test_text_and_bytes_have_a_size_and_numbers_a_range_that_the_wire_does_not_already_have() -> None:
    for name, _, field in fields():
        bound = FIELDS[name]
        if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            assert bound.most <= 1 << 20, name
        if field.type == FieldDescriptor.TYPE_DOUBLE:
            assert bound.most < 1e300, name
        if field.is_repeated:
            assert bound.many <= 1 << 14, name


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_values_out_of_range_are_refused_or_not_shown(name: str) -> None:
    _, descriptor, field = next(found for found in fields() if found[0] == name)
    bound = FIELDS[name]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        for value in out_of_range(bound, inner).values():
            message = message_factory.GetMessageClass(descriptor)()
            getattr(message, field.name)["key"] = value
            bounds.check(message)
            held = getattr(message, field.name)
            assert "key" not in held or shown_well(bound, held["key"])
        return
    for what, value in out_of_range(bound, field).items():
        message = made(descriptor, field, [value] if field.is_repeated else value)
        if field.enum_type is not None:
            bounds.check(message)
            assert getattr(message, field.name) == bound.other, "a later version's value counts as a known one"
            continue
        if bound.cleaned:
            bounds.check(message)
            shown = getattr(message, field.name)
            assert all(shown_well(bound, one) for one in (shown if field.is_repeated else [shown])), what
            continue
        with pytest.raises(RemoteFault, match=name) as caught:
            bounds.check(message)
        assert len(str(caught.value)) < 400 and str(caught.value).isprintable()
    if field.is_repeated and field.message_type is None:
        message = made(descriptor, field, [sample(field, bound)] * (bound.many + 1))
        if bound.cleaned:
            bounds.check(message)
            assert len(getattr(message, field.name)) == bound.many
            return
        with pytest.raises(RemoteFault, match="entries"):
            bounds.check(message)


def shown_well(bound: Bound, value: float | str) -> bool:
    if isinstance(value, str):
        return len(value) <= bound.most and value.isprintable()
    return bound.least <= value <= bound.most


def sample(field: FieldDescriptor, bound: Bound) -> Any:
    kinds = {FieldDescriptor.TYPE_STRING: "x", FieldDescriptor.TYPE_BYTES: b"x"}
    return kinds.get(field.type, 1)


def made(descriptor: Descriptor, field: FieldDescriptor, value: Any) -> Any:
    return message_factory.GetMessageClass(descriptor)(**{field.name: value})


def test_values_made_from_the_table_pass_the_check() -> None:
    rng = seeded("bounds", "whole")
    for descriptor in reachable().values():
        for _ in range(20):
            message = message_factory.GetMessageClass(descriptor)()
            fill(message, rng, share=1.0)
            bounds.check(message)


def test_headers_are_checked_where_they_arrive() -> None:
    exchange = call_pb2.Request(exchange=call_pb2.Exchange(round=2**62))
    with pytest.raises(
        RemoteFault, match=r"Exchange.round = 4611686018427387904; expected 0 to 9007199254740992 rounds"
    ):
        open_request(seal_request(exchange, (), RUN, 5.0), RUN)
    reply = call_pb2.Reply(status=call_pb2.STATUS_OK, snapshot=call_pb2.Snapshot(inner_steps=2**60))
    with pytest.raises(RemoteFault, match=r"Snapshot.inner_steps"):
        open_reply(reply.SerializeToString())


def test_the_reason_of_a_refusal_is_made_plain() -> None:
    reply = call_pb2.Reply(status=call_pb2.STATUS_REFUSED, reason="no\x1b[2J\x07\u202e way " + "x" * 9999)
    opened = open_reply(reply.SerializeToString())
    assert opened.reason.isprintable() and opened.reason.startswith("no [2J") and len(opened.reason) == 512


@pytest.mark.parametrize("field", ["step", "reason", "giver"])
def test_a_signed_receipt_with_terminal_escapes_is_refused(field: str) -> None:
    """It is kept and shown as it was signed, so it cannot be made plain."""
    told = call_pb2.PacketReceipt(**{field: "\x1b]0;owned\x07\x1b[2J"})  # type: ignore[arg-type]
    with pytest.raises(RemoteFault, match=f"PacketReceipt.{field}") as caught:
        open_request(seal_request(call_pb2.Request(packet_receipt=told), (), RUN, 5.0), RUN)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["", "plain", "two\nlines", "\x1b]0;owned\x07", "\u202egnp.exe", "\ud800", "\x9b31m"])
def test_printable_text_is_printable(text: str) -> None:
    assert printable(text, 20).isprintable() and len(printable(text, 20)) == len(text)


def test_a_check_costs_what_the_message_has() -> None:
    """A message of the most entries is checked in one pass: each entry is compared with its bound once."""
    looks = 0

    class Counting(float):
        def __ge__(self, value: float) -> bool:
            nonlocal looks
            looks += 1
            return super().__ge__(value)

    counted = {
        name: replace(bound, most=Counting(bound.most)) if name.startswith("Progress") else bound
        for name, bound in FIELDS.items()
    }
    rng = random.Random(1)
    message = record_pb2.Progress(samples=[rng.getrandbits(52) for _ in range(4096)], total=2**53)
    bounds.Bounds(counted).check(message)
    assert looks == 4097


def test_values_and_fields_of_a_later_version_are_neither_refused_nor_lose_their_signature() -> None:
    me = Identity.of_seed(b"v" * 32)
    record = record_pb2.Record(
        run_id="ab" * 32, peer_id=me.peer_id, sequence=1, expires_unix_ms=1, state=record_pb2.NODE_STATE_TRAINING
    )
    later = record.SerializeToString() + b"\x30\x4d" + b"\xba\x3e\x03new"  # state = 77, and field 999 = "new"
    signed = record_pb2.SignedRecord(record=later, signature=me.sign(b"swarmnode/record/v1\0" + later))
    seen = check_record(signed, run_id=RunId("ab" * 32))
    assert seen.state == record_pb2.NODE_STATE_PAUSED, "it serves nothing, as far as this version knows"
    relayed = record_pb2.SignedRecord.FromString(signed.SerializeToString())
    assert check_record(relayed, run_id=RunId("ab" * 32)).sequence == 1
    answer = call_pb2.Reply.FromString(b"\x08\x63")  # status = 99
    bounds.check(answer)
    assert answer.status == call_pb2.STATUS_UNAVAILABLE

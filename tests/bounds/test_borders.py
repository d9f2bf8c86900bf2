"""What is checked at a border is all that is kept: unknown fields go at every parse, in one place."""

import re
from pathlib import Path

import pytest
from google.protobuf.message import Message

from swarmnode.base import bounds
from swarmnode.base.errors import RemoteFault
from swarmnode.base.header import open_reply, open_request, seal_reply, seal_request
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.wire import access_pb2, call_pb2, record_pb2, report_pb2
from swarmnode.net.membership.record import SIGNED_BYTES_MAX
from swarmnode.run.admission.access import AccessList, open_access_list, sign_access_list, sign_grant, sign_pass
from swarmnode.run.admission.admission import parse_pass
from tests.fuzz.targets import KEY, OWNER

ROOT = Path(__file__).parents[2]
RUN = RunId("ab" * 32)
ONE = Identity.of_seed(b"1" * 32)
UNKNOWN = b"\xfa\x07\xb0\x09" + bytes(1200)  # field 127, bytes: no message here has it
PARSES = re.compile(r"\b(FromString|ParseFromString|MergeFromString)\b")


def test_messages_are_parsed_in_one_place() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for package in ("swarmnode", "swarmnode_methods", "swarmsim")
        for path in (ROOT / package).rglob("*.py")
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")) and PARSES.search(path.read_text())
    }
    child = "swarmnode/net/transport/p2pd_control.py"  # p2pd's own protocol
    assert found == {"swarmnode/base/bounds/__init__.py", child}


MESSAGES = [
    getattr(file, name)
    for file in (record_pb2, access_pb2, call_pb2, report_pb2)
    for name in file.DESCRIPTOR.message_types_by_name
]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.DESCRIPTOR.name)
def test_unknown_fields_are_dropped(kind: type[Message]) -> None:
    assert bounds.parse(kind, UNKNOWN, "it").ByteSize() == 0
    for field in kind.DESCRIPTOR.fields:
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        nested = kind()
        place = getattr(nested, field.name)
        (place.add() if field.is_repeated else place).MergeFromString(UNKNOWN)
        assert nested.ByteSize() > 1000, "the test's own message carries it"
        assert bounds.parse(kind, nested.SerializeToString(), "it").ByteSize() < 10, field.name


def test_headers_carry_no_more_than_they_were_checked_for() -> None:
    receipt = call_pb2.Receipt(run_id=RUN, samples=4)
    receipt.MergeFromString(UNKNOWN)
    request = call_pb2.Request(receipt=call_pb2.ReceiptRequest(receipt=receipt))
    _, opened = open_request(seal_request(request, [], RUN, 5.0), RUN)
    assert opened.receipt.receipt.ByteSize() < 100
    record = record_pb2.SignedRecord(record=b"r", signature=b"s")
    record.MergeFromString(UNKNOWN)
    reply = call_pb2.Reply(status=call_pb2.STATUS_OK, record=record, receipt=receipt)
    reply_opened = open_reply(seal_reply(reply, []))
    assert reply_opened.receipt.ByteSize() < 100 and reply_opened.record.ByteSize() < SIGNED_BYTES_MAX / 10


def test_passes_and_lists_are_kept_without_them() -> None:
    grant = sign_grant(OWNER, RUN, ONE, 2_000_000_000)
    shown = sign_pass(ONE, RUN, grant, PeerId(ONE.peer_id), 2_000_000_000)
    size = shown.ByteSize()
    shown.grant.MergeFromString(UNKNOWN[:2] + b"\x10" + bytes(16))
    assert parse_pass(shown.SerializeToString()).ByteSize() == size
    signed = sign_access_list(OWNER, RUN, AccessList(3))
    signed.MergeFromString(UNKNOWN)
    kept = bounds.opened(access_pb2.SignedAccessList, signed.SerializeToString(), "list")
    assert kept.ByteSize() < 200 and open_access_list(kept, RUN, KEY).sequence == 3


def test_a_message_that_does_not_parse_is_named() -> None:
    with pytest.raises(RemoteFault, match="a receipt that does not parse"):
        bounds.parse(call_pb2.Receipt, b"\xff", "a receipt")

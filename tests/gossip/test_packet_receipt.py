"""Receipts say who believed what, and nobody else can have said it."""

import pytest

from swarmnode.errors import RemoteFault
from swarmnode.gossip.acceptance import RECEIPT_BYTES_MAX, bare, check_receipt, receipt, whole
from swarmnode.identity import Identity
from swarmnode.ids import RunId
from swarmnode.ports import Packet, Verdict, WireTensor
from swarmnode.wire import call_pb2 as wire

RUN = RunId("ab" * 32)
GIVER, RECEIVER = (Identity.of_seed(bytes([i]) * 32) for i in (1, 2))
PACKET = Packet(1.0, 77, [WireTensor("u8", (5,), b"12345")])


def made(keep: float = 1.0, reason: str = "within 4 times") -> wire.PacketReceipt:
    return receipt(RECEIVER, RUN, 3, 12, GIVER.peer_id, PACKET, Verdict(keep, "accepted", reason))


def test_a_receipt_says_what_became_of_a_packet() -> None:
    found = wire.PacketReceipt.FromString(made(0.25).SerializeToString())
    check_receipt(found, RUN, GIVER.peer_id, RECEIVER.peer_id)
    assert (found.accepted, found.keep, found.step, found.samples, found.nbytes, found.round, found.stage) == (
        *(True, 0.25, "accepted", 77, 5, 12, 3),
    )
    assert not made(0.0).accepted
    assert made(reason="x" * 10_000).ByteSize() < RECEIPT_BYTES_MAX


def test_fields_known_to_both_are_signed_and_not_sent() -> None:
    sent = bare(made())
    assert len(sent.SerializeToString()) < 110
    assert whole(sent, RUN, GIVER.peer_id, RECEIVER.peer_id) == made()
    for repeated in (made(), wire.PacketReceipt(giver=GIVER.peer_id)):
        with pytest.raises(RemoteFault, match="without saying"):
            whole(repeated, RUN, GIVER.peer_id, RECEIVER.peer_id)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"samples": 78}, "forged"),
        ({"signature": b"1" * 64}, "forged"),
        ({"signature": b""}, "forged"),
        ({"giver": RECEIVER.peer_id}, "are due"),
        ({"receiver": GIVER.peer_id}, "are due"),
        ({"run_id": "cd" * 32}, "are due"),
        ({"keep": 2.0}, "keep = 2.0"),
        ({"keep": float("nan")}, "keep = nan"),
        ({"accepted": False}, "accepted = False"),
        ({"reason": "x" * 2000}, "bytes"),
    ],
)
def test_a_changed_receipt_is_refused(change: dict[str, object], error: str) -> None:
    found = made()
    for key, value in change.items():
        setattr(found, key, value)
    with pytest.raises(RemoteFault, match=error):
        check_receipt(found, RUN, GIVER.peer_id, RECEIVER.peer_id)

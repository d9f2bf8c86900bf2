"""Receipts say who believed what, and nobody else can have said it."""

import pytest

from swarmnode.base.errors import RemoteFault
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Packet, Verdict, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import AGAIN_S, TRIES
from swarmnode.train.gossip.acceptance import (
    RECEIPT_BYTES_MAX,
    Reputation,
    bare,
    check_receipt,
    receipt,
    whole,
)

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


A = PeerId("a")
B = PeerId("b")


def test_three_broken_packets_in_a_row_leave_a_peer_out_for_a_while() -> None:
    reputation = Reputation()
    for _ in range(TRIES - 1):
        reputation.record_broken_packet(A, 10.0)
    reputation.record_taken_packet(A)
    for n in range(TRIES):
        assert not reputation.left_out(10.0), f"{n} in a row"
        reputation.record_broken_packet(A, 10.0)
    reputation.record_broken_packet(B, 10.0)
    assert reputation.left_out(9.9 + AGAIN_S) == {A: "3 packets in a row of a broke the rules"}
    assert not reputation.left_out(10.0 + AGAIN_S)
    reputation.record_broken_packet(A, 10.0 + AGAIN_S)
    assert A in reputation.left_out(10.0 + AGAIN_S), "the first one after that leaves it out again"
    reputation.record_taken_packet(A)
    assert not reputation.left_out(10.0 + AGAIN_S)

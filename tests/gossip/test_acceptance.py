"""Receipts say who believed what, and nobody else can have said it; trust falls at once and comes back with time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import RemoteFault
from swarmnode.gossip.acceptance import (
    FALL,
    HALF_LIFE_S,
    LEAST,
    RECEIPT_BYTES_MAX,
    RISE,
    Reputation,
    bare,
    check_receipt,
    receipt,
    whole,
)
from swarmnode.identity import Identity
from swarmnode.ids import PeerId, RunId
from swarmnode.ports import Packet, Verdict, WireTensor
from swarmnode.remembered import REMEMBERED_MAX
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


A, B = PeerId("a"), PeerId("b")


def test_six_refusals_leave_a_peer_out_until_time_has_passed() -> None:
    reputation = Reputation()
    for _ in range(6):
        assert reputation.meets(A, 10.0)[0]
        left = reputation.record_broken_packet(A, 10.0)
    assert left == pytest.approx(FALL**6)
    met, reason = reputation.meets(A, 10.0)
    assert not met and reason == "trust in a is 0.12, 0.15 is least"
    assert reputation.meets(B, 10.0)[0]
    back_s = HALF_LIFE_S * math.log2((1 - FALL**6) / (1 - LEAST))
    assert not reputation.meets(A, 10.0 + 0.99 * back_s)[0] and reputation.meets(A, 10.0 + 1.01 * back_s)[0]


@given(st.lists(st.tuples(st.floats(0, 1000), st.booleans()), max_size=30))
def test_never_outside_of_0_and_1(steps: list[tuple[float, bool]]) -> None:
    """Twin: a list of times of refusals and of packets taken, replayed from the beginning."""
    reputation, now, trust = Reputation(), 0.0, 1.0
    for seconds, refused in steps:
        now += seconds
        trust = 1 - (1 - trust) * 0.5 ** (seconds / HALF_LIFE_S)
        if refused:
            trust *= FALL
            reputation.record_broken_packet(A, now)
        else:
            trust = 1 - RISE * (1 - trust)
            reputation.taken(A, now)
        assert reputation.trust(A, now) == pytest.approx(trust, abs=1e-9) and 0 <= trust <= 1


def test_memory_is_bounded_and_keeps_the_worst() -> None:
    reputation = Reputation()
    for _ in range(7):
        reputation.record_broken_packet(A, 0.0)
    for i in range(REMEMBERED_MAX + 5):
        reputation.record_broken_packet(PeerId(f"p{i}"), 1.0)
    assert len(reputation._trust) == REMEMBERED_MAX and not reputation.meets(A, 1.0)[0]

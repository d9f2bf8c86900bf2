"""Receipts for packets: the receiver signs whether it believed a packet, and sends the receipt to the packet's
sender.

Volunteers can show receipts as evidence of what their work was worth to others, and see why a packet was refused.
Receipts prove what receivers said, not that it was just: colluding peers can praise each other.
"""

from __future__ import annotations

from swarmnode.errors import RemoteFault
from swarmnode.identity import SIGNATURE_BYTES, Identity, unsigned, verify
from swarmnode.ids import PeerId, RunId
from swarmnode.ports import Packet, Verdict
from swarmnode.untrusted_text import printable
from swarmnode.wire import call_pb2 as wire

RECEIPT_BYTES_MAX = 1024
TEXT_MAX = 160  # characters of a reason
_DOMAIN = b"swarmnode/packet-receipt/v1\0"


def receipt(
    identity: Identity, run_id: RunId, stage: int, round_index: int, giver: PeerId, packet: Packet, verdict: Verdict
) -> wire.PacketReceipt:
    """The signed verdict of `identity` on a packet of `giver`."""
    found = wire.PacketReceipt(
        run_id=run_id,
        stage=stage,
        round=round_index,
        giver=giver,
        receiver=identity.peer_id,
        accepted=verdict.keep > 0.0,
        keep=verdict.keep,
        step=verdict.step,
        reason="" if verdict.keep == 1.0 else printable(verdict.reason, TEXT_MAX),
        samples=packet.samples,
        nbytes=sum(tensor.nbytes for tensor in packet.tensors),
    )
    found.signature = identity.sign(unsigned(_DOMAIN, found))
    return found


def sent_to(hearer: PeerId, found: wire.PacketReceipt) -> wire.PacketReceipt:
    """`found` as it travels to `hearer` from its receiver: without what both know. They sign and keep the whole."""
    bare = wire.PacketReceipt()
    bare.CopyFrom(found)
    for field in ("run_id", "receiver", *(("giver",) if found.giver == hearer else ())):
        bare.ClearField(field)
    return bare


def whole(found: wire.PacketReceipt, run_id: RunId, hearer: PeerId, receiver: PeerId) -> wire.PacketReceipt:
    """The inverse, at `hearer`, of what `receiver` sent; nothing is checked. Raises RemoteFault for what is there and
    should not be."""
    if found.run_id or found.receiver or found.giver == hearer:
        raise RemoteFault("receipt that says what goes without saying")
    found.run_id, found.receiver, found.giver = run_id, receiver, found.giver or hearer
    return found


def check_receipt(found: wire.PacketReceipt, run_id: RunId, giver: PeerId, receiver: PeerId) -> None:
    """Raises RemoteFault unless `receiver` signed `found` for a packet of `giver` in this run; cheapest first."""
    if found.ByteSize() > RECEIPT_BYTES_MAX:
        raise RemoteFault(f"receipt of {found.ByteSize()} bytes; at most {RECEIPT_BYTES_MAX}")
    names = (found.run_id, found.giver, found.receiver)
    if names != (run_id, giver, receiver):
        raise RemoteFault(f"receipt for (run, giver, receiver) {names}; {(run_id, giver, receiver)} are due")
    if not 0.0 <= found.keep <= 1.0 or found.accepted != (found.keep > 0.0):
        raise RemoteFault(f"receipt that says accepted = {found.accepted} and keep = {found.keep}")
    if len(found.signature) != SIGNATURE_BYTES or not verify(receiver, unsigned(_DOMAIN, found), found.signature):
        raise RemoteFault(f"receipt of {receiver} is forged: its signature does not verify")

"""Acts on the verdict on a partner's packet: a count, a line in the log, trust, and a signed receipt to its sender.

A volunteer can show receipts as evidence of what its work was worth to others, and see why a packet was refused. They
prove what receivers said, not that it was just: colluding peers can praise each other. So what a receipt says of a
third peer's packet counts for nothing.

Honest replicas never send a packet that breaks the rules of its codec (malformed, out of range, not finite), however
far behind they are. A peer that sent TRIES of them in a row is left out of our pairs for AGAIN_S: a lone step in the
rounds in which we would have met it. Then one more is tried. All other refusals are judgements, may be wrong, and cost
that one packet.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Collection, Mapping, Sequence

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.identity import SIGNATURE_BYTES, Identity, unsigned, verify
from swarmnode.base.ids import PeerId, RunId, short
from swarmnode.base.metrics import name
from swarmnode.base.ports import EQUAL, Answer, Call, OuterReport, Packet, Verdict
from swarmnode.base.remembered import Remembered
from swarmnode.base.untrusted_text import printable
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import AGAIN_S, SMALL_CALL_S, TRIES
from swarmnode.net.membership.swarm import GOSSIPING, StageContext

RECEIPT_BYTES_MAX = 1024
TEXT_MAX = 160  # characters of a reason
_DOMAIN = b"swarmnode/packet-receipt/v1\0"


def receipt(
    identity: Identity, run_id: RunId, stage: int, round_index: int, giver: PeerId, packet: Packet, verdict: Verdict
) -> wire.PacketReceipt:
    """The signed verdict of `identity` on a packet of `giver`."""
    signed = wire.PacketReceipt(
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
    signed.signature = identity.sign(unsigned(_DOMAIN, signed))
    return signed


def bare(found: wire.PacketReceipt) -> wire.PacketReceipt:
    """`found` as it travels to the packet's sender: without what both know. They sign and keep the whole."""
    sent = wire.PacketReceipt()
    sent.CopyFrom(found)
    for known in ("run_id", "receiver", "giver"):
        sent.ClearField(known)
    return sent


def whole(found: wire.PacketReceipt, run_id: RunId, giver: PeerId, receiver: PeerId) -> wire.PacketReceipt:
    """The inverse, at `giver`, of what `receiver` sent; nothing is checked. Raises RemoteFault for what is there and
    should not be."""
    if found.run_id or found.receiver or found.giver:
        raise RemoteFault("receipt that says what goes without saying")
    found.run_id = run_id
    found.receiver = receiver
    found.giver = giver
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


PROVEN = ("misshapen",)  # verdicts' steps (robust.py) that no honest packet gets, whatever its receiver's state
NEWCOMER = "newcomer"


class Reputation:
    """One replica's view of its partners, by the event loop's seconds."""

    def __init__(self) -> None:
        self._broken = Remembered[PeerId, tuple[int, float]]()  # packets in a row, and when the last came

    def record_broken_packet(self, peer: PeerId, now_s: float) -> None:
        """A packet of `peer` broke the rules."""
        self._broken[peer] = self._broken.get(peer, (0, now_s))[0] + 1, now_s

    def record_taken_packet(self, peer: PeerId) -> None:
        """A packet of `peer` was believed."""
        self._broken.pop(peer, None)

    def left_out(self, now_s: float) -> dict[PeerId, str]:
        """Peers not to be met, and why."""
        return {
            peer: f"{count} packets in a row of {short(peer)} broke the rules"
            for peer, (count, since_s) in self._broken.items()
            if count >= TRIES and now_s < since_s + AGAIN_S
        }


class Acceptance:
    """One replica's dealings with what its partners sent. The verdicts themselves are robust.py's."""

    def __init__(self, here: StageContext, packet_taken: Callable[[PeerId], None] = lambda peer: None) -> None:
        """`packet_taken` is told each peer whose packet was averaged."""
        self._here = here
        self.reputation = Reputation()
        self._packet_taken = packet_taken
        self._out: dict[PeerId, str] = {}  # left out and why, as of the last look
        self._met = Remembered[PeerId, int]()  # packets taken here of each, in a round that both met in

    def left_out(self, members: Collection[PeerId] | None = None) -> set[PeerId]:
        """The `members` of the stage (None: all known) that are not to be met: their packets broke the rules too
        often."""
        out = self.reputation.left_out(asyncio.get_running_loop().time())
        if out:
            here = self._here.swarm().stages[self._here.stage]
            members = [one.peer for one in here if one.state in GOSSIPING] if members is None else members
            out = {peer: reason for peer, reason in out.items() if peer in members}
        for peer, reason in out.items():
            if peer not in self._out:
                self._here.telemetry.count(name.PEER_FAULTS, kind="distrusted")
                self._here.telemetry.event("peer.left_out", level="warning", peer=peer, reason=reason)
        self._out = out
        return {*out}

    @property
    def has_met(self) -> bool:
        """Whether any packet was taken here in a round."""
        return bool(self._met)

    def packets_taken(self, peer: PeerId) -> int:
        """Packets of `peer` taken here in rounds."""
        return self._met.get(peer, 0)

    def record_final_deltas(self, leavers: Sequence[Packet], verdicts: Sequence[Verdict], round_index: int) -> None:
        """Count, log and remember the verdicts on the packets of replicas that left."""
        for packet, verdict in zip(leavers, verdicts, strict=True):
            self._here.telemetry.count(name.PACKETS, step=verdict.step)
            if verdict.keep == 0.0:
                self._doubt(round_index, PeerId(packet.sender), verdict)

    def judged(
        self, tasks: asyncio.TaskGroup, round_index: int, came: Mapping[PeerId, Packet], report: OuterReport
    ) -> list[PeerId]:
        """Count, log, remember and, in one of `tasks`, sign the verdicts on the packets that `came`, the first ones of
        the report. Returns whom this replica met: whose packet was taken, and newcomers, who had nothing to give."""
        here = self._here
        met = list[PeerId]()
        for (other, packet), verdict in zip(came.items(), report.verdicts, strict=False):  # what leavers gave follows
            self._weigh(round_index, other, verdict)
            given = receipt(here.identity, here.run_id, here.stage, round_index, other, packet, verdict)
            tasks.create_task(self._tell(other, given))
            if verdict.keep > 0.0 or verdict.step == NEWCOMER:
                met.append(other)
        return met

    def _weigh(self, round_index: int, other: PeerId, verdict: Verdict) -> None:
        step = verdict.step
        telemetry = self._here.telemetry
        telemetry.count(name.PACKETS, step=step)
        if verdict.keep > 0.0:
            if verdict.reason != EQUAL:  # sending ours back is no work
                self._packet_taken(other)
            self.reputation.record_taken_packet(other)
            self._met[other] = self.packets_taken(other) + 1
        elif step != NEWCOMER:
            self._doubt(round_index, other, verdict)
        if step == "clipped" and verdict.keep > 0.0:
            telemetry.event("exchange.clipped", round=round_index, peer=other, keep=verdict.keep, reason=verdict.reason)

    def _doubt(self, round_index: int, other: PeerId, verdict: Verdict) -> None:
        """Hold a refused packet against `other`, if it broke the rules, and log it."""
        if verdict.step in PROVEN:
            self.reputation.record_broken_packet(other, asyncio.get_running_loop().time())
        self._here.telemetry.count(name.PEER_FAULTS, kind="packet")
        self._here.telemetry.event(
            "exchange.refused",
            level="warning",
            round=round_index,
            peer=other,
            step=verdict.step,
            reason=verdict.reason,
        )

    async def _tell(self, peer: PeerId, given: wire.PacketReceipt) -> None:
        call = Call(wire.Request(run_id=self._here.run_id, packet_receipt=bare(given)))
        try:
            await self._here.transport.call(peer, call, timeout_s=SMALL_CALL_S, reply_bytes_max=0)
        except (RemoteFault, Unavailable):
            return
        self._here.telemetry.event("receipt.given", level="debug", round=given.round, peer=peer, step=given.step)

    async def serve_receipt(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "packet_receipt": what a partner made of our packet, kept in the log with its signature. A
        word on a third peer's packet, as older nodes send it, is dropped."""
        given = call.header.packet_receipt
        me = self._here.me
        if given.giver and given.giver != me:
            return Answer(wire.Reply(packet_receipt=wire.PacketReceiptTaken()))
        given = whole(given, self._here.run_id, me, peer)
        check_receipt(given, self._here.run_id, me, peer)
        self._here.telemetry.event(
            "receipt.got",
            round=given.round,
            peer=peer,
            accepted=given.accepted,
            step=given.step,
            reason=given.reason,
            samples=given.samples,
            receipt=base64.b64encode(given.SerializeToString()).decode(),
        )
        return Answer(wire.Reply(packet_receipt=wire.PacketReceiptTaken()))

"""Acts on the verdict on a partner's packet: a count, a line in the log, trust, and a signed receipt.

The receipt goes to the packet's sender. A refusal, or the first acceptance after one, also goes to other replicas of
the stage: a sender whose packets broke the rules here is left out sooner if they did so elsewhere (refusals.py).

Receipts for packets: the receiver signs whether it believed a packet, and sends the receipt to the packet's
sender.

Volunteers can show receipts as evidence of what their work was worth to others, and see why a packet was refused.
Receipts prove what receivers said, not that it was just: colluding peers can praise each other.
"""

from __future__ import annotations

import asyncio
import base64
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.gossip.refusals import PROVEN, RefusalTally, Reputation
from swarmnode.gossip.robust import EQUAL
from swarmnode.identity import SIGNATURE_BYTES, Identity, unsigned, verify
from swarmnode.ids import PeerId, RunId, digest64
from swarmnode.metrics import name
from swarmnode.ports import Answer, Call, OuterReport, Packet, Telemetry, Transport, Verdict
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


RECEIPT_TIMEOUT_S = 5.0  # guess: one small message; an unreachable replica gets no receipt
HEARERS_MAX = 32  # guess: replicas told of a refusal at once; in larger stages others hear of others
MET_MAX = 4096  # guess: replicas remembered whose packet was taken; those met longest ago are forgotten first
NEWCOMER = "newcomer"


class Acceptance:
    """One replica's dealings with what its partners sent. The verdicts themselves are robust.py's."""

    def __init__(
        self,
        run_id: RunId,
        stage: int,
        identity: Identity,
        transport: Transport,
        telemetry: Telemetry,
        mates: Callable[[], Collection[PeerId]],
        packet_taken: Callable[[PeerId], None] = lambda peer: None,
    ) -> None:
        """`mates`: the stage's replicas, as far as is known here; `packet_taken` is told each peer whose packet was
        averaged."""
        self._run_id = run_id
        self._stage = stage
        self._identity = identity
        self._transport = transport
        self._telemetry = telemetry
        self._mates = mates
        self.reputation = Reputation()
        self.refusal_tally = RefusalTally()
        self._packet_taken = packet_taken
        self._out: dict[PeerId, str] = {}  # left out and why, as of the last look
        # packets taken here of each, in a round that both met in: their word is heard
        self._met: OrderedDict[PeerId, int] = OrderedDict()

    def left_out(self, members: Collection[PeerId] | None = None) -> set[PeerId]:
        """The `members` of the stage (None: all known) that are not to be met: their packets broke the rules too often
        at us, or once and at most of the others."""
        if not self.refusal_tally and not self.reputation:
            self._out = {}
            return set()
        now_s = asyncio.get_running_loop().time()
        members = self._mates() if members is None else members
        out = {peer: self.reputation.meets(peer, now_s)[1] for peer in self.reputation.excluded(now_s) & {*members}}
        out |= self.refusal_tally.left_out({*members}, now_s, self._transport.peer_id, self._met)
        for peer, reason in out.items():
            if peer not in self._out:
                self._telemetry.count(name.PEER_FAULTS, kind="distrusted")
                self._telemetry.event("peer.left_out", level="warning", peer=peer, reason=reason)
        self._out = out
        return {*out}

    def met(self, peer: PeerId) -> int:
        """Packets of `peer` taken here in rounds."""
        return self._met.get(peer, 0)

    def against(self, peer: PeerId) -> int:
        """Return how many of the replicas heard refused the last packet of `peer` that they judged."""
        return self.refusal_tally.against(peer)

    def left(self, leavers: Sequence[Packet], verdicts: Sequence[Verdict], round_index: int) -> None:
        """Count, log and remember the verdicts on the packets of replicas that left."""
        for packet, verdict in zip(leavers, verdicts, strict=True):
            self._telemetry.count(name.PACKETS, step=verdict.step)
            if verdict.keep == 0.0:
                self._doubt(round_index, PeerId(packet.sender), verdict)

    def judged(
        self, tasks: asyncio.TaskGroup, round_index: int, came: Mapping[PeerId, Packet], report: OuterReport
    ) -> list[PeerId]:
        """Count, log, remember and, in one of `tasks`, sign the verdicts on the packets that `came`, the first ones of
        the report. Returns whom this replica met: whose packet was taken, and newcomers, who had nothing to give."""
        met = []
        for (other, packet), verdict in zip(came.items(), report.verdicts, strict=False):  # what leavers gave follows
            self._weigh(round_index, other, verdict)
            given = receipt(self._identity, self._run_id, self._stage, round_index, other, packet, verdict)
            for hearer in (other, *self._hearers(round_index, other, verdict)):
                tasks.create_task(self._tell(hearer, given))
            if verdict.keep > 0.0 or verdict.step == NEWCOMER:
                met.append(other)
        return met

    def _weigh(self, round_index: int, other: PeerId, verdict: Verdict) -> None:
        step, reason = verdict.step, verdict.reason
        self._telemetry.count(name.PACKETS, step=step)
        if verdict.keep > 0.0:
            if verdict.reason != EQUAL:  # sending ours back is no work
                self._packet_taken(other)
            self.reputation.taken(other, asyncio.get_running_loop().time())
            self._met[other] = self.met(other) + 1
            self._met.move_to_end(other)
            if len(self._met) > MET_MAX:
                self._met.popitem(last=False)
        elif step != NEWCOMER:
            self._doubt(round_index, other, verdict)
        if step in ("clipped", "direction", "loss") and verdict.keep > 0.0:
            self._telemetry.event("exchange.clipped", round=round_index, peer=other, keep=verdict.keep, reason=reason)

    def _doubt(self, round_index: int, other: PeerId, verdict: Verdict) -> None:
        """Hold a refused packet against `other`, if it broke the rules, and log it."""
        now_s = asyncio.get_running_loop().time()
        trust = (self.reputation.refused if verdict.step in PROVEN else self.reputation.trust)(other, now_s)
        self._telemetry.count(name.PEER_FAULTS, kind="packet")
        self._telemetry.event(
            "exchange.refused",
            level="warning",
            round=round_index,
            peer=other,
            step=verdict.step,
            reason=verdict.reason,
            trust=round(trust, 3),
        )

    def _hearers(self, round_index: int, other: PeerId, verdict: Verdict) -> list[PeerId]:
        """Return the other replicas to tell of the verdict on `other`'s packet: those to which it is news."""
        if verdict.step == NEWCOMER:
            return []
        me, accepted = self._transport.peer_id, verdict.keep > 0.0
        news = not accepted or self.refusal_tally.refused_by(other, me)
        self.refusal_tally.heard(other, me, round_index, accepted, asyncio.get_running_loop().time(), verdict.step)
        if not news:
            return []
        mates = [peer for peer in self._mates() if peer not in (me, other)]
        return sorted(mates, key=lambda peer: digest64("hearer", me, round_index, peer))[:HEARERS_MAX]

    async def _tell(self, peer: PeerId, given: wire.PacketReceipt) -> None:
        call = Call(wire.Request(run_id=self._run_id, packet_receipt=sent_to(peer, given)))
        try:
            await self._transport.call(peer, call, timeout_s=RECEIPT_TIMEOUT_S, reply_bytes_max=0)
        except (RemoteFault, Unavailable):
            return
        self._telemetry.event("receipt.given", level="debug", round=given.round, peer=peer, step=given.step)

    def _overheard(self, peer: PeerId, given: wire.PacketReceipt) -> None:
        """A replica's word on a third one's packet. Only replicas of this stage have a voice that gave us a packet we
        took: any key can say that it is one, and sign what it likes."""
        giver = PeerId(given.giver)
        check_receipt(given, self._run_id, giver, peer)
        if given.stage == self._stage and peer in self._met and {giver, peer} <= set(self._mates()):
            now_s = asyncio.get_running_loop().time()
            self.refusal_tally.heard(giver, peer, given.round, given.accepted, now_s, given.step)
            self._telemetry.event(
                "receipt.heard", round=given.round, peer=peer, giver=giver, accepted=given.accepted, step=given.step
            )

    async def serve_receipt(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "packet_receipt": what a partner made of our packet, kept in the log with its signature, or
        a replica of another one's packet."""
        given = whole(call.header.packet_receipt, self._run_id, self._transport.peer_id, peer)
        if given.giver != self._transport.peer_id:
            self._overheard(peer, given)
            return Answer(wire.Reply(packet_receipt=wire.PacketReceiptTaken()))
        check_receipt(given, self._run_id, self._transport.peer_id, peer)
        self._telemetry.event(
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

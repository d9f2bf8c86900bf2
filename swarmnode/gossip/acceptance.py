"""What follows from a verdict on a partner's packet: a count, a line in the log, standing, and a signed receipt."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.gossip.receipt import check_receipt, receipt
from swarmnode.gossip.standing import Standings
from swarmnode.identity import Identity
from swarmnode.ids import PeerId, RunId
from swarmnode.metrics import name
from swarmnode.ports import Answer, Call, OuterReport, Packet, Telemetry, Transport, Verdict
from swarmnode.wire import call_pb2 as wire

RECEIPT_TIMEOUT_S = 5.0  # guess: one small message; who cannot be told goes without
NEWCOMER = "newcomer"


class Acceptance:
    """One replica's dealings with what its partners sent. The verdicts themselves are robust.py's."""

    def __init__(
        self, run_id: RunId, stage: int, identity: Identity, transport: Transport, telemetry: Telemetry
    ) -> None:
        self._run_id = run_id
        self._stage = stage
        self._identity = identity
        self._transport = transport
        self._telemetry = telemetry
        self.standings = Standings()

    def meets(self, peer: PeerId) -> bool:
        """Whether `peer` is trusted enough to be met."""
        return self.standings.meets(peer, asyncio.get_running_loop().time())[0]

    def judged(
        self,
        tasks: asyncio.TaskGroup,
        round_index: int,
        other: PeerId,
        packets: Sequence[Packet],
        report: OuterReport,
    ) -> bool:
        """Count, log, remember and, in one of `tasks`, sign the verdicts on `other`'s packets. Returns whether the
        replicas met: one of them was taken, or a newcomer had nothing to give."""
        for packet, verdict in zip(packets, report.verdicts, strict=False):  # verdicts on what leavers gave follow
            self._count(round_index, other, verdict)
            tasks.create_task(self._give(round_index, other, packet, verdict))
        return any(verdict.keep > 0.0 or verdict.step == NEWCOMER for verdict in report.verdicts[: len(packets)])

    def _count(self, round_index: int, other: PeerId, verdict: Verdict) -> None:
        step, reason = verdict.step, verdict.reason
        self._telemetry.count(name.PACKETS, step=step)
        if verdict.keep == 0.0 and step != NEWCOMER:
            trust = round(self.standings.refused(other, asyncio.get_running_loop().time()), 3)
            self._telemetry.count(name.PEER_FAULTS, kind="packet")
            self._telemetry.event(
                "exchange.refused",
                level="warning",
                round=round_index,
                peer=other,
                step=step,
                reason=reason,
                trust=trust,
            )
        elif step == "clipped":
            self._telemetry.event("exchange.clipped", round=round_index, peer=other, keep=verdict.keep, reason=reason)

    async def _give(self, round_index: int, other: PeerId, packet: Packet, verdict: Verdict) -> None:
        given = receipt(self._identity, self._run_id, self._stage, round_index, other, packet, verdict)
        call = Call(wire.Request(run_id=self._run_id, packet_receipt=given))
        try:
            await self._transport.call(other, call, timeout_s=RECEIPT_TIMEOUT_S, reply_bytes_max=0)
        except (RemoteFault, Unavailable):
            return
        self._telemetry.event("receipt.given", level="debug", round=round_index, peer=other, step=verdict.step)

    async def serve_receipt(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "packet_receipt": what a partner made of our packet, kept in the log with its signature."""
        given = call.header.packet_receipt
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

"""The handler of "report", by which a coordinator asks for a node's state. The transport bounds how often a peer calls
(transport/stranger_limit.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.identity import Identity
from swarmnode.ids import PeerId, RunId
from swarmnode.membership.liveness import LOOK_SHARE, SMALL_CALL_S
from swarmnode.membership.receipt import WorkBook, check_receipt, sign_receipt
from swarmnode.metrics import name
from swarmnode.metrics.events import RecentEvent, RecentEvents
from swarmnode.ports import Answer, Call, Clock, Telemetry, Transport
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import report_pb2

REPORT_LINKS_MAX = 64
REPORT_EVENTS_MAX = 64
REPORT_RECEIPTS_MAX = 32  # 8 kB; as many as a node renews at a time, so that none is left behind

KIND_OF_METHOD: Mapping[str, str] = {
    "process": "pipeline",
    "reserve": "pipeline",
    "opening": "pipeline",
    "recompute": "pipeline",
    "exchange": "gossip",
    "commit": "gossip",
    "fallback": "gossip",
    "table": "gossip",
    "packet_receipt": "gossip",
    "data_chunk": "data",
    "snapshot": "state",
    "chunk": "state",
}
PERIOD_MIN_S = 1.0


FIRST_S = 4.0  # guess: a volunteer who looks just after joining sees receipts
PERIOD_S = 30.0  # guess: between two rounds of asking; a kill loses the receipts of so long


@dataclass(eq=False)
class ReceiptExchange:
    """Handler of "receipt", and the asking. `keep` is given every receipt that verifies, the newest of its client."""

    run_id: RunId
    identity: Identity
    work: WorkBook
    clock: Clock
    telemetry: Telemetry
    keep: Callable[[wire.Receipt], Awaitable[None]]

    def __post_init__(self) -> None:
        self._began_unix_s = int(self.clock.unix_s())

    def serve(self, transport: Transport) -> None:
        """Register."""
        transport.serve("receipt", self.sign, tensor_bytes_max=0)

    async def sign(self, peer: PeerId, call: Call) -> Answer:
        """A receipt for the work of `peer` for this process so far. Raises Unavailable when there is none."""
        if (done := self.work.done.get(peer)) is None:
            raise Unavailable("nothing was worked off for this node")
        until = max(self._began_unix_s, int(self.clock.unix_s()))
        return Answer(
            wire.Reply(receipt=sign_receipt(self.identity, self.run_id, peer, done, self._began_unix_s, until))
        )

    async def collect(self, transport: Transport) -> None:
        """Ask clients for receipts until cancelled: soon at first, then every PERIOD_S."""
        period_s = FIRST_S
        while True:
            await asyncio.sleep(period_s)
            await self.once(transport)
            period_s = min(PERIOD_S, 2.0 * period_s)

    async def once(self, transport: Transport) -> None:
        """Ask each of the last REPORT_RECEIPTS_MAX clients once."""
        for client in list(self.work.clients)[-REPORT_RECEIPTS_MAX:]:
            request = Call(wire.Request(receipt=wire.ReceiptRequest()))
            try:
                answer = await transport.call(client, request, timeout_s=SMALL_CALL_S, reply_bytes_max=0)
                receipt = answer.header.receipt
                check_receipt(receipt, self.run_id, transport.peer_id)
                if receipt.client != client:
                    raise RemoteFault("a receipt of somebody else")
            except (RemoteFault, Unavailable) as error:
                self.telemetry.event("receipt.failed", level="debug", peer=client, reason=str(error))
                continue
            if receipt.microbatches:
                await self.keep(receipt)


async def measuring(
    transport: Transport,
    counts: Callable[[], Sequence[tuple[int, int]]],
    samples_total: Callable[[], int],
    telemetry: Telemetry,
    announce_period_s: float,
) -> None:
    """Keep the gauges current until cancelled. `counts`: of each stage members, and how many of them serve it."""
    loop = asyncio.get_running_loop()
    period_s = max(PERIOD_MIN_S, LOOK_SHARE * announce_period_s)
    before: dict[tuple[str, str], int] = {}
    seen: Sequence[tuple[int, int]] = ()
    while True:
        begun_s = loop.time()
        await asyncio.sleep(period_s)
        telemetry.observe(name.LOOP_LAG_SECONDS, max(0.0, loop.time() - begun_s - period_s))
        if (here := counts()) != seen:
            _tell_swarm(here, telemetry)
            seen = here
        telemetry.gauge(name.RUN_SAMPLES, float(samples_total()))
        now = dict(transport.bytes_by_method())
        for (method, direction), nbytes in now.items():
            grown = nbytes - before.get((method, direction), 0)
            if grown:
                kind = KIND_OF_METHOD.get(method, "control")
                telemetry.count(name.LINK_BYTES, grown, kind=kind, direction=direction)
        before = now


def _tell_swarm(counts: Sequence[tuple[int, int]], telemetry: Telemetry) -> None:
    serving = [count for _, count in counts]
    telemetry.gauge(name.PEERS, float(sum(members for members, _ in counts)))
    telemetry.gauge(name.STAGES, float(len(serving)))
    telemetry.gauge(name.STAGES_EMPTY, float(serving.count(0)))
    telemetry.gauge(name.REPLICAS_FEWEST, float(min(serving)))


@dataclass(eq=False)
class Reporter:
    """Answers with `facts()`, and the events and receipts asked for.

    `incarnation` differs between two lives of the same key;
    `receipts(serial, most)` gives those after `serial`, serialised, and the serial of the last of them.
    """

    facts: Callable[[], report_pb2.Report]
    recent: RecentEvents
    incarnation: int
    receipts: Callable[[int, int], tuple[int, list[bytes]]] = lambda serial, most: (serial, [])

    async def answer(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "report"."""
        request, report = call.header.report, self.facts()
        report.incarnation = self.incarnation
        same = request.incarnation == self.incarnation
        after = request.events_after if same else 0
        report.receipts_serial, receipts = self.receipts(request.receipts_after if same else 0, REPORT_RECEIPTS_MAX)
        report.receipts.extend(receipts)
        report.events.extend(_to_wire(event, report) for event in self.recent.after(after, REPORT_EVENTS_MAX))
        return Answer(wire.Reply(report=report))


def _to_wire(happening: RecentEvent, report: report_pb2.Report) -> report_pb2.EventReport:
    return report_pb2.EventReport(
        serial=happening.serial,
        unix_ms=int(happening.unix_s * 1000),
        event=happening.event,
        level=happening.level,
        stage=report.status.stage,
        fields=happening.fields,
    )

"""A node's word of itself: receipts, gauges, and the handler of "report", by which a coordinator asks for its
state. The transport bounds how often a peer calls (net/transport/stranger_limit.py)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.metrics import name
from swarmnode.base.metrics.events import RecentEvent, RecentEvents
from swarmnode.base.ports import Answer, Call, Clock, Telemetry, Transport
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import report_pb2
from swarmnode.net.membership.liveness import LOOK_SHARE, SMALL_CALL_S
from swarmnode.net.membership.receipt import WorkBook, check_receipt, sign_receipt

REPORT_LINKS_MAX = 64
REPORT_EVENTS_MAX = 64
REPORT_RECEIPTS_MAX = 32  # 8 kB; as many as a node renews at a time, so that none is left behind

KIND_OF_METHOD: Mapping[str, str] = {
    "process": "pipeline",
    "reserve": "pipeline",
    "opening": "pipeline",
    "recompute": "pipeline",
    "exchange": "gossip",
    "butterfly": "gossip",
    "commit": "gossip",
    "fallback": "gossip",
    "table": "gossip",
    "packet_receipt": "gossip",
    "step_end": "gossip",
    "data_chunk": "data",
    "snapshot": "state",
    "chunk": "state",
}
PERIOD_MIN_S = 1.0


# Receipts. What a node shows as given is their sum, so they are kept as new as it matters: a client is asked again once
# it has not signed for a hundredth of what it signed for. A node that leaves calls all once more, and gives what it
# signed: so nobody's work is lost because the other one is gone.

PERIOD_S = 2.0  # guess: between two looks; a kill loses the receipts of so long, or of UNSIGNED_SHARE
UNSIGNED_SHARE = 0.01  # guess: what is shown as given is so near to what is done
ASKED_MAX = 4  # guess: clients that are called in a look, those with most to sign first
FAREWELLS_MAX = 32  # peers called by a node that leaves
FAREWELL_S = 3.0  # guess: for all of them; who does not answer by then has left, too


@dataclass(eq=False)
class ReceiptExchange:
    """Handler of "receipt", and the asking. `keep` is given every receipt that verifies, the newest of its client.
    `alone`: a machine signs for itself, in a run of one stage. `context`: tokens of a sample; 0: not known."""

    run_id: RunId
    identity: Identity
    work: WorkBook
    clock: Clock
    telemetry: Telemetry
    keep: Callable[[wire.Receipt], Awaitable[None]]
    alone: bool = False
    context: int = 0

    def __post_init__(self) -> None:
        self._began_unix_s = int(self.clock.unix_s())
        self._asked = Remembered[PeerId, int]()  # the samples that we had trained for a client when it was asked last

    def serve(self, transport: Transport) -> None:
        """Register."""

        async def answer(peer: PeerId, call: Call) -> Answer:
            if call.header.receipt.HasField("receipt") and peer in self.work.clients:
                await self._take(peer, call.header.receipt.receipt, transport.peer_id)
            return await self.sign(peer, call)

        transport.serve("receipt", answer, tensor_bytes_max=0)

    async def sign(self, peer: PeerId, call: Call) -> Answer:
        """A receipt for the work of `peer` for this process so far. Raises Unavailable when there is none."""
        if (receipt := self._receipt(peer)) is None:
            raise Unavailable("nothing was worked off for this node")
        return Answer(wire.Reply(receipt=receipt))

    def _receipt(self, peer: PeerId) -> wire.Receipt | None:
        if (done := self.work.done.get(peer)) is None:
            return None
        until = max(self._began_unix_s, int(self.clock.unix_s()))
        return sign_receipt(self.identity, self.run_id, peer, done, self._began_unix_s, until)

    async def collect(self, transport: Transport) -> None:
        """Ask clients for receipts, those that have much to sign for, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            for client in self._due():
                await self._exchange(transport, client)

    async def once(self, transport: Transport) -> None:
        """Ask each of the last FAREWELLS_MAX clients once."""
        for client in list(self.work.clients)[-FAREWELLS_MAX:]:
            await self._exchange(transport, client)

    async def farewell(self, transport: Transport) -> None:
        """Exchange receipts for the last time with all that worked for this node, or that it worked for."""
        peers = list(dict.fromkeys([*reversed(self.work.clients), *reversed(self.work.done)]))[:FAREWELLS_MAX]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S), asyncio.TaskGroup() as tasks:
                for peer in peers:
                    tasks.create_task(self._exchange(transport, peer, give=True))

    def _due(self) -> list[PeerId]:
        """The clients for which UNSIGNED_SHARE more was trained since they were asked, most first."""
        unsigned = {client: samples - self._asked.get(client, 0) for client, samples in self.work.clients.items()}
        due = [peer for peer, count in unsigned.items() if count > UNSIGNED_SHARE * self._asked.get(peer, 0)]
        return sorted(due, key=lambda peer: -unsigned[peer])[:ASKED_MAX]

    async def _exchange(self, transport: Transport, peer: PeerId, *, give: bool = False) -> None:
        """Take the receipt of `peer`, and `give` it ours."""
        me = transport.peer_id
        mine = self._receipt(peer) if give or peer == me else None
        self._asked[peer] = self.work.clients.get(peer, 0)
        try:
            if peer == me and mine is not None:
                await self._take(peer, mine, me)
                return
            request = Call(wire.Request(receipt=wire.ReceiptRequest(receipt=mine)))
            answer = await transport.call(peer, request, timeout_s=SMALL_CALL_S, reply_bytes_max=0)
            await self._take(peer, answer.header.receipt, me)
        except (RemoteFault, Unavailable) as error:
            self.telemetry.event("receipt.failed", level="debug", peer=peer, reason=str(error))

    async def _take(self, peer: PeerId, receipt: wire.Receipt, me: PeerId) -> None:
        """Keep the `receipt` of `peer`. Raises RemoteFault where it is none for us."""
        check_receipt(receipt, self.run_id, me, self.clock.unix_s(), alone=self.alone)
        if receipt.client != peer:
            raise RemoteFault("a receipt of somebody else")
        if self.context and receipt.tokens != receipt.samples * self.context:
            raise RemoteFault(f"a receipt of {receipt.tokens} tokens in {receipt.samples} samples of {self.context}")
        if receipt.microbatches:
            await self.keep(receipt)


async def measuring(
    transport: Transport,
    counts: Callable[[], Sequence[tuple[int, int]]],
    samples_total: Callable[[], int],
    telemetry: Telemetry,
    announce_period_s: float,
    look_at_speed: Callable[[], object],
) -> None:
    """Keep the gauges current until cancelled. `counts`: of each stage members, and how many of them serve it.
    `look_at_speed` notes what the run has trained by now."""
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
        look_at_speed()
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
        request = call.header.report
        report = self.facts()
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

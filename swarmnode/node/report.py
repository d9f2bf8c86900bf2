"""The handler of "report", by which a coordinator asks for a node's state. Its cost is bounded at any call rate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from swarmnode.errors import Busy
from swarmnode.ids import PeerId
from swarmnode.metrics.recent_events import RecentEvent, RecentEvents
from swarmnode.ports import Answer, Call
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import report_pb2

REPORT_LINKS_MAX = 64
REPORT_EVENTS_MAX = 64
REPORT_RECEIPTS_MAX = 32  # 8 kB; as many as a node renews at a time (thanks.CLIENTS_MAX), so that none is left behind
FRESH_S = 0.5  # guess: facts are gathered at most this often; a busy node answers from what it said just before
ANSWERS_PER_S = 50.0  # guess: a flood costs an answer of a few kB each 20 ms at most
BURST = 20.0


class Reporter:
    """Answers with `facts()`, gathered at most every FRESH_S, and the events and receipts asked for.

    Raises Busy above ANSWERS_PER_S, whoever asks. `incarnation` differs between two lives of the same key;
    `receipts(serial, most)` gives those after `serial`, serialised, and the serial of the last of them.
    """

    def __init__(
        self,
        facts: Callable[[], report_pb2.Report],
        recent: RecentEvents,
        incarnation: int,
        receipts: Callable[[int, int], tuple[int, list[bytes]]] = lambda serial, most: (serial, []),
    ) -> None:
        self._facts = facts
        self._receipts = receipts
        self._recent = recent
        self._incarnation = incarnation
        self._gathered: report_pb2.Report | None = None
        self._gathered_at = -math.inf
        self._allowed = BURST
        self._asked_at = -math.inf

    async def answer(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "report"."""
        now_s = asyncio.get_running_loop().time()
        elapsed_s = min(BURST, now_s - self._asked_at)
        self._allowed, self._asked_at = min(BURST, self._allowed + ANSWERS_PER_S * elapsed_s), now_s
        if self._allowed < 1.0:
            raise Busy("this node is asked for reports too often", 1.0)
        self._allowed -= 1.0
        if self._gathered is None or now_s - self._gathered_at > FRESH_S:
            self._gathered, self._gathered_at = self._facts(), now_s
        asked = call.header.report
        report = report_pb2.Report()
        report.CopyFrom(self._gathered)
        report.incarnation = self._incarnation
        same = asked.incarnation == self._incarnation
        after = asked.events_after if same else 0
        report.receipts_serial, receipts = self._receipts(asked.receipts_after if same else 0, REPORT_RECEIPTS_MAX)
        report.receipts.extend(receipts)
        report.events.extend(_to_wire(event, report) for event in self._recent.after(after, REPORT_EVENTS_MAX))
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

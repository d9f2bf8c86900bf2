"""What rides on calls: news of progress and records, and on those of rounds next to nothing."""

from __future__ import annotations

import asyncio

from swarmnode.identity import Identity
from swarmnode.ids import PeerId, RunId
from swarmnode.membership.progress import Progress, to_samples
from swarmnode.node.line import Line
from swarmnode.ports import Answer, Call, Handler
from swarmnode.transport.memory import MemoryNetwork, MemoryTransport
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2

RUN = RunId("ab" * 32)
RECORD = record_pb2.SignedRecord(record=b"record", signature=b"signature")
US, THEM = (Identity.of_seed(bytes([i]) * 32).peer_id for i in (1, 2))
ANSWERS = {
    "process": wire.Reply(processed=wire.Processed()),
    "exchange": wire.Reply(exchanged=wire.Exchanged()),
    "commit": wire.Reply(committed=wire.Committed()),
}


def test_on_rounds_no_record_rides_and_progress_on_the_exchange_alone() -> None:
    async def main() -> None:
        network, heard = MemoryNetwork(), dict[str, wire.Request]()
        progress = {US: Progress(), THEM: Progress()}
        lines = {
            me: Line(MemoryTransport(network, me, RUN), progress[me], lambda: (1, RECORD), lambda r: None, lambda: None)
            for me in (US, THEM)
        }

        def served(method: str) -> None:
            async def handler(peer: PeerId, call: Call) -> Answer:
                heard[method] = call.header
                return Answer(ANSWERS[method])

            lines[THEM].serve(method, handler, tensor_bytes_max=0)

        async def call(request: wire.Request) -> wire.Reply:
            return (await lines[US].call(THEM, Call(request), timeout_s=5.0, reply_bytes_max=0)).header

        for method in ANSWERS:
            served(method)
        progress[US].merge_entries({"a": 3, "b": 5})
        progress[THEM].merge_entries({"b": 5, "c": 7})
        commit = await call(wire.Request(commit=wire.Commit()))
        exchange = await call(wire.Request(exchange=wire.Exchange()))
        for header in (heard["commit"], commit):
            assert not header.HasField("record") and not header.HasField("progress")
        assert to_samples(heard["exchange"].progress) == {"a": 3, "b": 5}
        assert to_samples(exchange.progress) == {"c": 7}, "what the caller said is not said back"
        assert not heard["exchange"].HasField("record") and not exchange.HasField("record")
        process = await call(wire.Request(process=wire.Process(purpose=wire.PURPOSE_VALIDATE)))
        assert heard["process"].record == RECORD == process.record

    asyncio.run(main())


def test_an_answer_that_is_urgent_stays_so() -> None:
    """Who answers a microbatch says that its gradient goes before other bulk; the transport below has to hear of it."""

    class Below(MemoryTransport):
        def serve(self, method: str, handler: Handler, *, tensor_bytes_max: int) -> None:
            self.handler = handler

    async def main() -> None:
        below = Below(MemoryNetwork(), US, RUN)
        line = Line(below, Progress(), lambda: (1, RECORD), lambda record: None, lambda: None)

        async def handler(peer: PeerId, call: Call) -> Answer:
            return Answer(ANSWERS["process"], urgent=call.header.process.samples == 1)

        line.serve("process", handler, tensor_bytes_max=0)
        for samples in (1, 2):
            answer = await below.handler(THEM, Call(wire.Request(process=wire.Process(samples=samples))))
            assert answer.urgent is (samples == 1)

    asyncio.run(main())

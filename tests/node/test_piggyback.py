"""What rides on calls: news of progress and records, and on those of rounds next to nothing."""

import pytest

from benchmarks.memory_network import MemoryNetwork, MemoryTransport
from swarmnode.base.errors import Unavailable
from swarmnode.base.identity import Identity
from swarmnode.base.ids import PeerId, RunId
from swarmnode.base.ports import Admit, Answer, Call, Handler
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.net.membership.progress import Progress, to_samples
from swarmnode.train.node.piggyback import PiggybackTransport

RUN = RunId("ab" * 32)
US, THEM = (Identity.of_seed(bytes([i]) * 32).peer_id for i in (1, 2))


def of(peer: PeerId) -> record_pb2.SignedRecord:
    return record_pb2.SignedRecord(record=record_pb2.Record(peer_id=peer).SerializeToString(), signature=b"signature")


RECORD = of(US)
ANSWERS = {
    "process": wire.Reply(processed=wire.Processed()),
    "exchange": wire.Reply(exchanged=wire.Exchanged()),
    "commit": wire.Reply(committed=wire.Committed()),
}


async def test_on_rounds_a_record_rides_once_and_progress_on_the_exchange_alone() -> None:
    """Also of a peer that refuses us because it does not know us (any more) the next call tells who we are."""

    network = MemoryNetwork()
    heard = dict[str, wire.Request]()
    sequence = 1
    progress = {US: Progress(), THEM: Progress()}
    taken = list[record_pb2.SignedRecord]()
    lines = {
        me: PiggybackTransport(
            MemoryTransport(network, me, RUN), progress[me], lambda: (sequence, RECORD), known.append, lambda: None
        )
        for me, known in ((US, list[record_pb2.SignedRecord]()), (THEM, taken))
    }

    def admit(peer: PeerId, header: wire.Request) -> None:
        if not taken:
            raise Unavailable("not known here")

    def served(method: str) -> None:
        async def handler(peer: PeerId, call: Call) -> Answer:
            heard[method] = call.header
            return Answer(ANSWERS[method])

        lines[THEM].serve(method, handler, tensor_bytes_max=0, admit=admit)

    async def call(request: wire.Request) -> wire.Reply:
        return (await lines[US].call(THEM, Call(request), timeout_s=5.0, reply_bytes_max=0)).header

    for method in ANSWERS:
        served(method)
    progress[US].merge_entries({"a": 3, "b": 5})  # type: ignore[dict-item]
    progress[THEM].merge_entries({"b": 5, "c": 7})  # type: ignore[dict-item]
    commit = await call(wire.Request(commit=wire.Commit()))
    assert heard["commit"].record == RECORD and taken == [RECORD]
    exchange = await call(wire.Request(exchange=wire.Exchange()))
    assert not commit.HasField("record")
    assert not heard["commit"].HasField("progress") and not commit.HasField("progress")
    assert to_samples(heard["exchange"].progress) == {"a": 3, "b": 5}
    assert to_samples(exchange.progress) == {"c": 7}, "what the caller said is not said back"
    assert not heard["exchange"].HasField("record") and not exchange.HasField("record")
    taken.clear()  # it has lost what it knew
    with pytest.raises(Unavailable, match="not known here"):
        await call(wire.Request(exchange=wire.Exchange()))
    await call(wire.Request(exchange=wire.Exchange()))
    assert heard["exchange"].record == RECORD and taken == [RECORD]
    sequence = 2
    process = await call(wire.Request(process=wire.Process(purpose=wire.PURPOSE_VALIDATE)))
    assert heard["process"].record == RECORD == process.record


async def test_a_record_of_somebody_else_or_of_nobody_is_not_even_verified() -> None:
    """Else one peer could tell of as many keys as it can sign with."""
    network = MemoryNetwork()
    learned = list[record_pb2.SignedRecord]()
    them = PiggybackTransport(
        MemoryTransport(network, THEM, RUN), Progress(), lambda: None, learned.append, lambda: None
    )

    async def handler(peer: PeerId, call: Call) -> Answer:
        return Answer(ANSWERS["process"])

    them.serve("process", handler, tensor_bytes_max=0)
    us = MemoryTransport(network, US, RUN)
    for record in (of(THEM), record_pb2.SignedRecord(record=b"\xff", signature=b"signature"), of(US)):
        request = wire.Request(run_id=RUN, process=wire.Process(), record=record)
        await us.call(THEM, Call(request), timeout_s=5.0, reply_bytes_max=0)
    assert learned == [of(US)]


async def test_an_answer_that_is_urgent_stays_so() -> None:
    """Who answers a microbatch says that its gradient goes before other bulk; the transport below has to hear of it."""

    class Below(MemoryTransport):
        def serve(self, method: str, handler: Handler, *, tensor_bytes_max: int, admit: Admit | None = None) -> None:
            self.handler = handler

    below = Below(MemoryNetwork(), US, RUN)
    line = PiggybackTransport(below, Progress(), lambda: (1, RECORD), lambda record: None, lambda: None)

    async def handler(peer: PeerId, call: Call) -> Answer:
        return Answer(ANSWERS["process"], urgent=call.header.process.samples == 1)

    line.serve("process", handler, tensor_bytes_max=0)
    for samples in (1, 2):
        answer = await below.handler(THEM, Call(wire.Request(process=wire.Process(samples=samples))))
        assert answer.urgent is (samples == 1)

"""A peer that causes events as fast as it can: the history before stays, and one line says what was left out."""

import json
import pathlib

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory_network import MemoryNetwork, MemoryTransport
from swarmnode.base.identity import Identity
from swarmnode.base.ids import RunId
from swarmnode.base.metrics.exporter import (
    ALL_BURST,
    PEER_BURST,
    PEER_PER_S,
    PROVOKED,
    REPEATED,
    SUMMARY_S,
    EventLimiter,
    PrometheusTelemetry,
)
from swarmnode.base.ports import Call, Packet, Verdict, WireTensor
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.run.manifest import Manifest
from swarmnode.train.gossip.acceptance import Acceptance, bare, receipt
from tests.support.clock import ManualClock
from tests.support.stage_context import stage_context

RUN = RunId("ab" * 32)
GOT = {"peer": "p1"}


async def test_receipts_without_end_do_not_push_the_history_out(tmp_path: pathlib.Path) -> None:
    """One replica sends 4,000 receipts, properly signed, within five seconds: 3 MB of log. The log holds 1 MB."""
    me, sender = (Identity.of_seed(bytes([i]) * 32) for i in (1, 2))
    clock = ManualClock(1.7e9)
    path = tmp_path / "events.jsonl"
    exporter = PrometheusTelemetry(clock=clock, run=RUN, node=me.peer_id, path=path, log_bytes_max=1 << 20)

    async def flood() -> None:
        transport = MemoryTransport(MemoryNetwork(), me.peer_id, RUN)
        acceptance = Acceptance(stage_context(Manifest(), 1, RUN, transport=transport, identity=me, telemetry=exporter))
        packet = Packet(1.0, 8, [WireTensor("u8", (4,), bytes(4))])
        signed = receipt(sender, RUN, 1, 7, me.peer_id, packet, Verdict(0.0, "misshapen", "x" * 160))
        call = Call(wire.Request(run_id=RUN, packet_receipt=bare(signed)))
        for _ in range(400):
            again = Call(wire.Request())
            again.header.CopyFrom(call.header)
            await acceptance.serve_receipt(sender.peer_id, again)

    exporter.event("node.ready", serves=1)
    for _ in range(10):
        await flood()
        clock.now_s += 0.5
    exporter.event("exchange.paired", round=8)
    clock.now_s += SUMMARY_S
    exporter.event("receipt.got", peer="another", round=9)
    said = [json.loads(line) for line in path.read_text().splitlines()]
    assert not path.with_name("events.jsonl.1").exists(), "the log was turned over"
    assert [line["event"] for line in said if line["event"] != "receipt.got"] == [
        "node.ready",
        "exchange.paired",
        "events.more",
    ]
    written = sum(line["event"] == "receipt.got" for line in said) - 1
    more = next(line["fields"] for line in said if line["event"] == "events.more")
    assert isinstance(more, dict)
    assert (more["of"], more["peer"], more["count"]) == ("receipt.got", sender.peer_id, 4_000 - written)
    assert written <= PEER_BURST + 5 * PEER_PER_S


def test_many_keys_together_and_kinds_of_one_key_are_bounded_too() -> None:
    flood = EventLimiter()
    assert sum(flood.admit("receipt.got", {"peer": f"key{i}"}, 0.0) for i in range(5000)) == ALL_BURST
    flood = EventLimiter()
    kinds = sorted(PROVOKED)
    assert sum(flood.admit(kinds[i % len(kinds)], GOT, 0.0) for i in range(5000)) == PEER_BURST
    assert flood.admit("receipt.got", {"peer": "honest"}, 0.0)


def test_an_honest_pace_is_written_whole_and_so_is_the_rhythm_of_the_node() -> None:
    flood = EventLimiter()
    assert all(flood.admit("receipt.got", GOT, float(second)) for second in range(3600))
    assert all(flood.admit("exchange.paired", GOT, 0.0) for _ in range(5000))
    assert flood.due(3600.0) == []


@given(st.lists(st.tuples(st.sampled_from(sorted(PROVOKED)), st.sampled_from("abc"), st.floats(-100.0, 100.0))))
def test_written_and_suppressed_events_are_all_events(events: list[tuple[str, str, float]]) -> None:
    """Whatever the clock does, also where it jumps back."""
    flood = EventLimiter()
    now_s = 0.0
    written = 0
    told = 0
    for event, peer, step in events:
        for _ in range(50):
            told += sum(int(more["count"]) for more in flood.due(now_s))
            written += flood.admit(event, {"peer": peer}, now_s)
        now_s += step
    told += sum(int(more["count"]) for more in flood.due(now_s + 1e6))
    assert written + told == 50 * len(events)


def test_a_repeated_event_is_one_line_and_a_sum_a_minute(tmp_path: pathlib.Path) -> None:
    """A feeder alone has nobody who could check answers: it says so once, not with each answer (525 in 90 s)."""
    clock = ManualClock(1.7e9)
    path = tmp_path / "events.jsonl"
    exporter = PrometheusTelemetry(clock=clock, run=RUN, node="n", path=path)
    for number in range(3000):
        peer = f"12D3Koo{number % 7}"
        at = number // 10
        exporter.event("audit.done", level="debug", peer=peer, stage_of_peer=1, outcome="undone", reason="no other")
        exporter.event("stage.stays", source=0, target=1, reason=f"no state after {at} attempts; the last: {peer} left")
        exporter.event("exchange.lone", round=number, reason=f"round {number}: the odd one out")
        clock.now_s += 0.1
    exporter.event("audit.done", level="warning", peer="p", stage_of_peer=1, outcome="wrong", reason="far")
    said = [json.loads(line) for line in path.read_text().splitlines()]
    assert sum(line["event"] == "exchange.lone" for line in said) == 3000, "a node's own rhythm is written whole"
    of = lambda event: [line["fields"] for line in said if line["event"] == event]  # noqa: E731
    assert [each["outcome"] for each in of("audit.done")] == ["undone", "wrong"]
    assert len(of("stage.stays")) == 1
    sums = [more for more in of("events.more") if more["of"] == "audit.done"]
    assert {more["reason"] for more in sums} == {"undone no other"}
    assert len(sums) <= 3000 * 0.1 / SUMMARY_S
    assert 3000 - 1 - sum(more["count"] for more in sums) < SUMMARY_S / 0.1, "of the last minute alone"
    assert {line["level"] for line in said if line["event"] == "events.more"} == {"info"}


@given(st.lists(st.tuples(st.sampled_from(sorted(REPEATED)), st.sampled_from("abc"), st.floats(-100.0, 100.0))))
def test_written_and_counted_repeats_are_all_events(events: list[tuple[str, str, float]]) -> None:
    limiter = EventLimiter()
    now_s = 0.0
    written = 0
    told = 0
    for event, reason, step in events:
        for _ in range(50):
            told += sum(int(more["count"]) for more in limiter.due(now_s))
            written += limiter.admit(event, {"reason": reason}, now_s)
        now_s += step
    told += sum(int(more["count"]) for more in limiter.due(now_s + 1e6))
    assert written + told == 50 * len(events)

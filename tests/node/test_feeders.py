"""Replicas of the first stage feed, each from its own copy of the text; a node that reads none serves later stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.memory_network import MemoryTransport
from swarmnode.base.errors import NotPermitted, Unavailable
from swarmnode.base.identity import Identity
from swarmnode.base.ports import Call
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.base.wire import record_pb2
from swarmnode.train.node.limits import NodeRole
from tests.support.records import record, resigned
from tests.support.village import RUN, manifest, village


async def test_a_node_with_text_takes_over_when_the_only_feeder_dies_and_one_that_reads_none_stays() -> None:
    run = manifest(stages=2)
    run = replace(run, pipeline=replace(run.pipeline, rebalance_period_s=1.0))

    async with village(run) as v:
        feeder = v.add(0)
        other = v.add(1)
        await v.until(lambda: feeder.fed > 64, "it feeds the run")
        without = v.add(None, role=NodeRole.REPLICA)
        await v.until(lambda: without.node.state == record_pb2.NODE_STATE_TRAINING, "it serves")
        assert without.node.stage == 1 and 0 in without.node.presence.status.unable
        await feeder.die()
        await v.until(lambda: other.fed > 64, "the node with text moves to the first stage")
        assert without.node.stage == 1


async def test_a_node_that_reads_no_text_cannot_be_sent_to_the_first_stage() -> None:
    async with village(manifest(stages=2)) as v:
        v.people.remove(sent := v.add(0, role=NodeRole.REPLICA))
        assert sent.task is not None
        with pytest.raises(BaseExceptionGroup) as found:
            await sent.task
        leaf: BaseException = found.value
        while isinstance(leaf, BaseExceptionGroup):
            leaf = leaf.exceptions[0]
        assert isinstance(leaf, NotPermitted) and "reads no text" in str(leaf)


async def test_feeders_of_older_versions_are_told_what_they_cannot_do() -> None:
    """One without a stage, at the place after the last; one that gives work to others of its stage, and that work."""
    async with village(manifest(stages=2)) as v:
        feeder = v.add(0)
        last = v.add(1)
        sent: list[Call] = []
        send = feeder.transport.call

        async def seen(peer: str, call: Call, **given: object) -> object:
            if call.header.HasField("process"):
                sent.append(call)
            return await send(peer, call, **given)  # type: ignore[arg-type]

        feeder.transport.call = seen  # type: ignore[method-assign,assignment]
        await v.until(lambda: bool(sent), "a microbatch")
        old = Identity.of_seed(bytes([97]) * 32)

        def asked(position: int) -> Call:
            header = wire.Request()
            header.CopyFrom(sent[0].header)
            header.process.position = position
            header.process.feeder = old.peer_id
            return Call(header, sent[0].tensors[position - 1 :])

        told = record_pb2.Record.FromString(record(old, v.run.pipeline.stages).record)
        told.blocks.SetInParent()
        first = asked(0)
        first.header.record.CopyFrom(resigned(told, old))
        transport = MemoryTransport(v.network, old.peer_id, RUN)
        with pytest.raises(Unavailable, match="begins at its feeder's own replica"):
            await transport.call(feeder.node.me, first, timeout_s=5.0, reply_bytes_max=1 << 20)
        assert [m.peer for m in feeder.node.presence.peer_table.swarm().members() if m.peer == old.peer_id] == []
        with pytest.raises(Unavailable, match="comes from"):
            await feeder.transport.call(last.node.me, asked(1), timeout_s=5.0, reply_bytes_max=1 << 20)
        await v.trains(64, "training goes on")

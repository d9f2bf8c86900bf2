"""Feeders share their text with replicas of the first stage that have none."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.memory_network import MemoryTransport
from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.identity import Identity
from swarmnode.ids import PeerId
from swarmnode.manifest import Manifest
from swarmnode.node.limits import NodeRole
from swarmnode.ports import Call, WireTensor
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2
from tests.support.records import record, resigned
from tests.support.village import RUN, Numbers, SendsNoise, Village, excluded, manifest, village


def audited(stages: int = 2) -> Manifest:
    run = manifest(stages=stages)
    return replace(run, pipeline=replace(run.pipeline, audit_share=0.2))


class OtherText(Numbers):
    """Another text under the same numbers."""

    def train(self, indices: Sequence[int]) -> WireTensor:
        return super().train([index + 3 for index in indices])


def counted(v: Village) -> int:
    """Samples whose gradients replicas of the first stage have added."""
    return sum(replica.counted for replica in v.made if replica.stage.part.stage == 0)


def too_old(v: Village) -> float:
    """At most so many samples were fed whose gradients came too late to be added, as happens on a loaded machine."""
    return v.run.inner.microbatch * sum(p.quiet.total("swarmnode_stale_gradients_total") for p in v.people)


async def test_two_feeders_share_a_replica_without_text_and_audits_blame_nobody() -> None:
    async with village(audited()) as v:
        feeders = [v.add(0), v.add(0)]
        without, *last = v.add(0, role=NodeRole.REPLICA), v.add(1), v.add(1)
        await v.until(lambda: all(p.node.state == record_pb2.NODE_STATE_TRAINING for p in v.people), "all train")
        await v.trains(320, "they train")
        worked = [p.served.hop.samples for p in (*feeders, without)]
        assert min(worked) > 0.1 * sum(worked), f"each of three replicas has work: {worked}"
        assert all(p.fed > 64 for p in feeders) and without.served.feeder is None
        assert not any(excluded(p) for p in v.people)
        assert any(p.quiet.total("swarmnode_audits_total", outcome="right") for p in last)
        async with asyncio.timeout(100):
            await v.leave()
        # Every gradient was added once: what was fed is what each stage counted.
        assert -too_old(v) <= counted(v) - v.total() <= 4 * 4


async def test_a_node_with_text_takes_over_when_the_only_feeder_dies() -> None:
    run = manifest(stages=2)
    run = replace(run, pipeline=replace(run.pipeline, rebalance_period_s=1.0))

    async with village(run) as v:
        feeder, _, *others = v.add(0), v.add(0, role=NodeRole.REPLICA), v.add(1), v.add(1)
        await v.until(lambda: feeder.fed > 64, "it feeds the run")
        await feeder.die()
        await v.until(lambda: any(p.fed > 64 for p in others), "a node with text moves to the first stage")


@pytest.mark.parametrize("readers", [0, 2])
async def test_a_feeder_of_another_text_is_found_out_and_its_replica_is_not(readers: int) -> None:
    """By our own copy of the text, or by what other feeders read."""
    async with village(audited()) as v:
        first, second = v.add(0, role=NodeRole.REPLICA), v.add(1)
        liar = v.add(0, samples=lambda: OtherText(v.run))
        honest = [v.add(0) for _ in range(readers)]
        await v.until(lambda: liar.node.me in excluded(second), "the feeder is found out")
        assert not excluded(second) - {liar.node.me} and not any(excluded(p) for p in (first, *honest))


async def test_a_replica_that_makes_noise_of_fed_tokens_is_found_out_and_the_feeder_is_not() -> None:
    async with village(audited()) as v:
        liar = v.add(0, SendsNoise, role=NodeRole.REPLICA)
        v.add(0, role=NodeRole.REPLICA)
        second, feeder = v.add(1), v.add(0)
        await v.until(lambda: liar.node.me in excluded(second), "the replica is found out")
        assert feeder.node.me not in excluded(second)


async def test_only_a_feeder_feeds_and_only_under_its_own_name() -> None:
    async with village(manifest(stages=2)) as v:
        feeder, first, second = v.add(0), v.add(0, role=NodeRole.REPLICA), v.add(1)
        sent: list[Call] = []
        send = feeder.transport.call

        async def seen(peer: str, call: Call, **given: object) -> object:
            if peer == first.node.me and call.header.HasField("process"):
                sent.append(call)
            return await send(peer, call, **given)  # type: ignore[arg-type]

        feeder.transport.call = seen  # type: ignore[method-assign,assignment]
        await v.until(lambda: bool(sent), "a microbatch for the replica without text")
        asked = {"timeout_s": 5.0, "reply_bytes_max": 1 << 20}

        def altered(feeder: PeerId | None = None, by: Identity | None = None) -> Call:
            header = wire.Request()
            header.CopyFrom(sent[0].header)
            header.process.microbatch_id = b"x" * 16
            header.process.feeder = feeder or header.process.feeder
            if by is not None:  # an older version's node that only feeds: it is at the place after the last stage
                header.process.feeder = by.peer_id
                told = record_pb2.Record.FromString(record(by, v.run.pipeline.stages).record)
                told.blocks.SetInParent()
                header.record.CopyFrom(resigned(told, by))
            return Call(header, sent[0].tensors)

        with pytest.raises(Unavailable, match=r"replicas of stage 0; .* has stage 1"):
            await second.transport.call(first.node.me, altered(), **asked)  # type: ignore[arg-type]
        with pytest.raises(Unavailable, match="starts no microbatches"):
            await first.transport.call(feeder.node.me, altered(), **asked)  # type: ignore[arg-type]
        with pytest.raises(RemoteFault, match="comes from"):
            await feeder.transport.call(first.node.me, altered(second.node.me), **asked)  # type: ignore[arg-type]
        with pytest.raises(RemoteFault, match="not signed"):
            await feeder.transport.call(first.node.me, altered(), **asked)  # type: ignore[arg-type]
        old = Identity.of_seed(bytes([97]) * 32)
        with pytest.raises(Unavailable, match=r"replicas of stage 0; .* has no stage"):
            await MemoryTransport(v.network, old.peer_id, RUN).call(first.node.me, altered(by=old), **asked)  # type: ignore[arg-type]

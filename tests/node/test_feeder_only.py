"""Nodes that only feed: text goes to replicas of the first stage on other machines, which need none of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.manifest import Manifest
from swarmnode.node.limits import NodeRole
from swarmnode.ports import Call, WireTensor
from swarmnode.wire import call_pb2 as wire
from swarmnode.wire import record_pb2
from tests.support.village import Numbers, SendsNoise, Village, Villager, excluded, manifest, village


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


def feeds_only(v: Village, **given: object) -> Villager:
    return v.add(None, role=NodeRole.FEEDER, **given)  # type: ignore[arg-type]


async def test_replicas_without_text_are_fed_by_a_node_without_a_stage() -> None:
    async with village(manifest(stages=2)) as v:
        replicas = [v.add(stage, role=NodeRole.REPLICA) for stage in (0, 0, 1)]
        feeder = feeds_only(v)
        await v.until(lambda: feeder.fed > 160, "it feeds the run")
        work = feeder.node._slot.work
        assert work is not None and work.feeder is not None and feeder.node.served is None
        assert all(p.served.hop.samples > 16 for p in replicas), "both replicas of the first stage take part"
        await v.until(lambda: all(p.served.gossip.done > 0 for p in replicas[:2]), "and meet in rounds")
        first, now = work.feeder.validation_first, work.feeder.validation
        assert first is not None and now is not None and now[0] < first, "it validates, and the loss falls"
        assert all(p.served.feeder is None for p in replicas)
        for p in replicas:
            swarm = p.node.presence.peer_table.swarm()
            assert [m.peer for m in swarm.without_stage] == [feeder.node.me] == [*swarm.feeders()]
            assert sum(swarm.sizes) == len(replicas) == len(list(swarm.members())), "it counts as no replica"
        async with asyncio.timeout(100):
            await v.leave()
        # Every gradient was added once: what was fed is what each stage counted.
        assert -too_old(v) <= counted(v) - v.total() <= 4 * 4


async def test_two_feeders_share_a_replica_without_text_and_audits_blame_nobody() -> None:
    async with village(audited()) as v:
        feeders = [v.add(0), v.add(0)]
        without, *last = v.add(0, role=NodeRole.REPLICA), v.add(1), v.add(1)
        await v.until(lambda: all(p.node.state == record_pb2.NODE_STATE_TRAINING for p in v.people), "all train")
        await v.trains(320, "they train")
        worked = [p.served.hop.samples for p in (*feeders, without)]
        assert min(worked) > 0.1 * sum(worked), f"each of three replicas has work: {worked}"
        assert all(p.fed > 64 for p in feeders)
        assert not any(excluded(p) for p in v.people)
        assert any(p.quiet.total("swarmnode_audits_total", outcome="right") for p in last)


async def test_a_node_with_text_takes_over_when_the_only_feeder_dies() -> None:
    run = manifest(stages=2)
    run = replace(run, pipeline=replace(run.pipeline, rebalance_period_s=1.0))

    async with village(run) as v:
        v.add(0, role=NodeRole.REPLICA)
        others = [v.add(1), v.add(1)]
        feeder = feeds_only(v)
        await v.until(lambda: feeder.fed > 64, "it feeds the run")
        await feeder.die()
        await v.until(lambda: any(p.fed > 64 for p in others), "a node with text moves to the first stage")


async def test_a_feeder_pauses_and_goes_on() -> None:
    async with village(manifest(stages=2)) as v:
        v.add(0, role=NodeRole.REPLICA)
        v.add(1)
        feeder = feeds_only(v)
        await v.until(lambda: feeder.fed > 32, "it feeds")
        await feeder.node.pause_control.apply(False, "asked to")
        assert feeder.node.state == record_pb2.NODE_STATE_PAUSED
        before = feeder.fed
        await asyncio.sleep(0.3)
        assert feeder.fed == before
        await feeder.node.pause_control.apply(True, "asked to")
        await v.until(lambda: feeder.fed > before + 32, "it feeds again")


@pytest.mark.parametrize("readers", [0, 2])
async def test_a_feeder_of_another_text_is_found_out_and_its_replica_is_not(readers: int) -> None:
    """By our own copy of the text, or by what other feeders read."""
    async with village(audited()) as v:
        first, second = v.add(0, role=NodeRole.REPLICA), v.add(1)
        liar = feeds_only(v, samples=lambda: OtherText(v.run))
        honest = [feeds_only(v) for _ in range(readers)]
        await v.until(lambda: liar.node.me in excluded(second), "the feeder is found out")
        assert not excluded(second) - {liar.node.me} and not any(excluded(p) for p in (first, *honest))


async def test_a_replica_that_makes_noise_of_fed_tokens_is_found_out_and_the_feeder_is_not() -> None:
    async with village(audited()) as v:
        liar = v.add(0, SendsNoise, role=NodeRole.REPLICA)
        v.add(0, role=NodeRole.REPLICA)
        second, feeder = v.add(1), feeds_only(v)
        await v.until(lambda: liar.node.me in excluded(second), "the replica is found out")
        assert feeder.node.me not in excluded(second)


async def test_only_a_feeder_feeds_and_only_under_its_own_name() -> None:
    async with village(manifest(stages=2)) as v:
        first, second = v.add(0, role=NodeRole.REPLICA), v.add(1)
        feeder = feeds_only(v)
        await v.until(lambda: feeder.fed > 16, "they train")
        sent: list[Call] = []
        send = feeder.transport.call

        async def seen(peer: str, call: Call, **given: object) -> object:
            if call.header.HasField("process"):
                sent.append(call)
            return await send(peer, call, **given)  # type: ignore[arg-type]

        feeder.transport.call = seen  # type: ignore[method-assign,assignment]
        await v.until(lambda: bool(sent), "a microbatch")
        asked = {"timeout_s": 5.0, "reply_bytes_max": 1 << 20}

        def altered(change: str, by: Sequence[WireTensor] | None = None) -> Call:
            header = wire.Request()
            header.CopyFrom(sent[0].header)
            header.process.microbatch_id = b"x" * 16
            if change == "feeder":
                header.process.feeder = second.node.me
            return Call(header, by or sent[0].tensors)

        with pytest.raises(Unavailable, match="feeders"):
            await second.transport.call(first.node.me, altered(""), **asked)  # type: ignore[arg-type]
        with pytest.raises(RemoteFault, match="comes from"):
            await feeder.transport.call(first.node.me, altered("feeder"), **asked)  # type: ignore[arg-type]
        with pytest.raises(RemoteFault, match="not signed"):
            await feeder.transport.call(first.node.me, altered(""), **asked)  # type: ignore[arg-type]
        for method in ("exchange", "snapshot", "reserve"):
            request = wire.Request(run_id=sent[0].header.run_id)
            getattr(request, method).SetInParent()
            with pytest.raises((Unavailable, RemoteFault)):
                await second.transport.call(feeder.node.me, Call(request), **asked)  # type: ignore[arg-type]

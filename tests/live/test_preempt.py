"""Real nodes on machines that clouds take away: each cloud's notice is heard, answered, and survived."""

import asyncio
import dataclasses
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fake_cloud import FakeMetadata
from benchmarks.swarm.harness import resting, trains
from benchmarks.swarm.laws import told
from swarmnode.control import client
from swarmnode.local.child import Child, NodePlan
from tests.support.live_swarm import swarm_in

PLAYS = {"node-00": "aws", "node-01": "gcp", "node-02": "azure"}


class WallClock:
    def unix_s(self) -> float:
        return time.time()


def events(child: Child, event: str) -> list[dict[str, Any]]:
    return told(child.plan.home, event)


async def test_machines_are_taken_away_by_three_clouds(tmp_path: Path) -> None:
    fakes = {name: FakeMetadata(WallClock(), f"vm-{name}", 60.0) for name in PLAYS}
    urls = {name: await fake.start() for name, fake in fakes.items()}

    def command(plan: NodePlan) -> Sequence[str]:
        if plan.name in PLAYS:
            plan = dataclasses.replace(plan, flags=("--notice", PLAYS[plan.name], "--notice-url", urls[plan.name]))
        return resting(plan)

    swarm = swarm_in(tmp_path, nodes=5, command=command)
    fleet = swarm.fleet
    try:
        async with swarm.running():
            await swarm.progress(128, "from the start")
            for name in ("node-00", "node-02", "node-01"):
                child = next(child for child in fleet.nodes if child.name == name)
                await swarm.until(lambda child=child: trains(child), f"{name} trains")
                await fakes[name].say("preempt")
                await swarm.until(lambda child=child: child.reason != "", f"{name} leaves")
                assert child.reason == "preempted", child.reason
                last = events(child, "node.left")[-1]
                assert last["cut"] == [] and last["finished"] == last["held"]
                assert list(child.plan.home.glob("stage-*.safetensors")), "and has saved its stage"
                await swarm.progress(64, f"after {name} was taken away")
            assert len(fakes["node-02"].played.approved) == 1, "Azure was told that the machine may go"
    finally:
        for fake in fakes.values():
            await fake.close()


async def test_a_node_that_stands_still_is_gone_round_and_another_drains(tmp_path: Path) -> None:
    swarm = swarm_in(tmp_path)
    async with swarm.running():
        await swarm.progress(128, "from the start")
        await swarm.until(lambda: len(swarm.training(1)) == 2, "two replicas of stage 1")
        still = swarm.training(1)[0]
        assert still.ready is not None and still.status is not None
        steps, peer = still.status.inner_steps, still.ready.peer_id
        still.signal(signal.SIGSTOP)
        try:
            await swarm.progress(128, "while a replica of stage 1 stands still")
            feeders = swarm.training(0)
            await swarm.until(
                lambda: any(fields["peer"] == peer for c in feeders for fields in events(c, "peer.banned")),
                "the one that stands still is banned",
            )
        finally:
            still.signal(signal.SIGCONT)
        await swarm.until(
            lambda: still.status is not None and still.status.inner_steps > steps, "it works again when it runs"
        )
        drained = swarm.training(0)[0]
        reply = await asyncio.to_thread(client.drain, drained.plan.home, 60.0, "the test wants it")
        assert not reply["cut"] and reply["finished"] == reply["held"] and reply["sent"] == reply["unsent"], reply
        await swarm.until(lambda: drained.reason != "", "the node told has left")
        assert drained.reason == "preempted", drained.reason
        await swarm.progress(64, "after one was drained")

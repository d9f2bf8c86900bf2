"""Real nodes on machines that clouds take away or that stand still: each is survived, and nothing is lost."""

import asyncio
import dataclasses
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.fake_cloud import FakeMetadata
from benchmarks.swarm.harness import resting, trains
from benchmarks.swarm.laws import told
from swarmnode.control import client
from swarmnode.local.child import Child, NodePlan
from tests.support.clock import WallClock
from tests.support.live_swarm import swarm_in

PREEMPTED = "node-00"


def events(child: Child, event: str) -> list[dict[str, Any]]:
    return told(child.plan.home, event)


async def test_nodes_that_stand_still_are_preempted_or_drained_are_survived(tmp_path: Path) -> None:
    """tests/cloud/test_watch.py has the notices of all clouds."""
    fake = FakeMetadata(WallClock(), f"vm-{PREEMPTED}", 60.0)
    url = await fake.start()

    def command(plan: NodePlan) -> Sequence[str]:
        flags = ("--notice", "azure", "--notice-url", url) if plan.name == PREEMPTED else plan.flags
        return resting(dataclasses.replace(plan, flags=flags))

    swarm = swarm_in(tmp_path, nodes=5, command=command)
    try:
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

            preempted = next(child for child in swarm.fleet.nodes if child.name == PREEMPTED)
            await swarm.until(lambda: trains(preempted), "the node on a machine of Azure trains")
            await fake.say("preempt")
            await swarm.until(lambda: preempted.reason != "", "it leaves")
            assert preempted.reason == "preempted", preempted.reason
            last = events(preempted, "node.left")[-1]
            assert last["cut"] == [] and last["finished"] == last["held"]
            assert list(preempted.plan.home.glob("stage-*.safetensors")), "and has saved its stage"
            assert len(fake.played.approved) == 1, "Azure was told that the machine may go"
            await swarm.progress(64, "after a machine was taken away")

            await swarm.until(lambda: len(swarm.training(0)) == 2, "two replicas of stage 0")
            drained = swarm.training(0)[0]
            reply = await asyncio.to_thread(client.drain, drained.plan.home, 60.0, "the test wants it")
            assert not reply["cut"] and reply["finished"] == reply["held"] and reply["sent"] == reply["unsent"], reply
            await swarm.until(lambda: drained.reason != "", "the node told has left")
            assert drained.reason == "preempted", drained.reason
            await swarm.progress(64, "after one was drained")
    finally:
        await fake.close()

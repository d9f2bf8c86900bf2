"""Bytes of the directory at each of many real DHT nodes on loopback, and the time until callers know of a death.

All nodes live in one process; each has its own p2pd, DHT node, directory, presence and failure detector, and no model:
what a node says of itself does not need one. Bytes are those of p2pd's sockets (`ss`), DHT and calls together. A death
is a frozen p2pd (SIGSTOP): nothing refuses a call.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.swarm.dashboard import SilentTelemetry
from swarmnode.concurrency import background_tasks
from swarmnode.daemon.clock import SystemClock
from swarmnode.ids import PeerId, RunId, digest
from swarmnode.manifest import Manifest
from swarmnode.manifest.text import from_tree
from swarmnode.membership.liveness import Pinger
from swarmnode.node.failure_detector import FailureDetector, unban
from swarmnode.node.membership_handlers import MembershipHandlers
from swarmnode.node.piggyback import PiggybackTransport
from swarmnode.node.presence import Presence, StageObserver
from swarmnode.node.run_text import sends_to
from swarmnode.pipeline.microbatch_size import SampleRates
from swarmnode.transport.directory import DhtDirectory
from swarmnode.transport.key_file import create
from swarmnode.transport.libp2p import Libp2pTransport
from swarmnode.wire import record_pb2

RUN = RunId(digest("directory", "live").hex())
STAGES = 2
POLL_S = 0.25
SOCKET = re.compile(r"pid=(\d+)")
COUNTED = re.compile(r"bytes_(?:sent|received):(\d+)")


@dataclass(frozen=True, slots=True)
class LiveNode:
    """A node without a model."""

    transport: Libp2pTransport
    directory: DhtDirectory
    presence: Presence
    stage: int
    pid: int

    def sends(self, peer: PeerId, stage: int) -> bool:
        """Whether it might send work for `stage` to `peer`."""
        now = asyncio.get_running_loop().time()
        return self.presence.routers[stage].takes(peer, now)


@asynccontextmanager
async def _node(
    manifest: Manifest, folder: Path, number: int, known: list[tuple[PeerId, list[str]]]
) -> AsyncIterator[LiveNode]:
    key = folder / f"{number}.key"
    identity = create(key)
    transport = await Libp2pTransport.create(key, identity, RUN)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(transport.close)
        clock = SystemClock()
        MembershipHandlers(record_pb2.SignedManifest()).serve(transport)
        directory = await DhtDirectory.create(transport, known, RUN, STAGES, unix_s=clock.unix_s, join_timeout_s=120.0)
        stack.push_async_callback(directory.close)
        telemetry = SilentTelemetry()
        presence = Presence(manifest, RUN, directory, clock, identity, telemetry, StageObserver)
        directory.prefer(lambda peer: False, lambda: False, presence.peer_table.order)
        line = PiggybackTransport(transport, presence.progress, presence.record, presence.learn, lambda: None)
        stage = number % STAGES
        targets = sends_to(manifest, stage)
        presence.note(addresses=tuple(await transport.addresses()), rates=SampleRates({1: 1.0}))
        presence.attend(stage, targets, 1.0)
        presence.set_state(record_pb2.NODE_STATE_TRAINING, "benchmark")
        detector = FailureDetector(manifest, presence, Pinger(line, RUN), clock, telemetry, line.answered_s)
        period_s = manifest.limits.announce_period_s
        async with background_tasks() as tasks:
            tasks.create_task(presence.announcing())
            tasks.create_task(presence.watching(sorted({stage, *targets})))
            tasks.create_task(detector.run())
            tasks.create_task(unban(line, RUN, presence.routers, presence.banned, telemetry, period_s))
            yield LiveNode(transport, directory, presence, stage, transport.daemon.pid)


def socket_bytes() -> dict[int, int]:
    """Bytes that the open TCP connections of each process sent and received, by process id (`ss` of iproute2)."""
    lines = subprocess.run(["ss", "-tinHpO"], capture_output=True, text=True, check=True).stdout.splitlines()
    moved = dict[int, int]()
    for line in lines:
        if (owner := SOCKET.search(line)) is not None:
            pid = int(owner[1])
            moved[pid] = moved.get(pid, 0) + sum(map(int, COUNTED.findall(line)))
    return moved


async def run(nodes: int = 64, deaths: int = 4, measured_s: float = 60.0, bound_s: float = 120.0) -> dict[str, Any]:
    """The row of `nodes`. `bound_s`: until all callers must know all replicas, and of all deaths."""
    manifest = from_tree({"pipeline": {"stages": STAGES}, "model": {"layers": STAGES}}, "benchmark")
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        living = list[LiveNode]()
        known = list[tuple[PeerId, list[str]]]()
        for number in range(nodes):
            living.append(await stack.enter_async_context(_node(manifest, folder, number, known)))
            known = known or [(living[0].transport.peer_id, await living[0].transport.addresses())]
        callers = [one for one in living if sends_to(manifest, one.stage)]
        called = [one for one in living if one.stage == STAGES - 1]
        pairs = {(caller, one) for caller in callers for one in called}
        await _until(lambda: all(_takes(*pair) for pair in pairs), bound_s)
        began = socket_bytes()
        await asyncio.sleep(measured_s)
        ended = socket_bytes()
        kbits = sorted(8e-3 * (ended[one.pid] - began.get(one.pid, 0)) / measured_s for one in living)
        dead = called[1 : 1 + deaths]  # the first one may be the meeting point
        waiting = {(caller, one) for caller in callers for one in dead}
        for one in dead:
            os.kill(one.pid, signal.SIGSTOP)
        killed = loop.time()
        known_s = list[float]()
        try:
            for _ in range(round(bound_s / POLL_S)):
                await asyncio.sleep(POLL_S)
                knows = {pair for pair in waiting if not _takes(*pair)}
                known_s += [loop.time() - killed] * len(knows)
                waiting -= knows
                if not waiting:
                    break
        finally:
            for one in dead:
                os.kill(one.pid, signal.SIGCONT)
    return {
        "nodes": nodes,
        "busiest_kbits": round(kbits[-1], 1),
        "mean_kbits": round(sum(kbits) / len(kbits), 1),
        "callers": len(known_s) + len(waiting),
        "known_median_s": round(median(known_s), 1) if known_s else None,
        "known_worst_s": round(max(known_s), 1) if known_s else None,
        "never": len(waiting),
    }


def _takes(caller: LiveNode, one: LiveNode) -> bool:
    return caller.sends(one.transport.peer_id, one.stage)


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    for _ in range(round(seconds / POLL_S)):
        if condition():
            return
        await asyncio.sleep(POLL_S)
    raise TimeoutError


if __name__ == "__main__":
    print(json.dumps(uvloop.run(run())))

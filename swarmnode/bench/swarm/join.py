"""Time from a pasted command to the first accepted work: `swarmnode join INVITE` in a fresh home, repeatedly, with a
local swarm that trains. `swarmnode bench join` prints the seconds; the target is at most 30.

Work is accepted when a microbatch's gradient enters an inner step of the newcomer, or returns to it if it feeds. The
time includes Python's imports, p2pd, the DHT, the manifest, the machine's measurement, the download of the state, and
the round that a newcomer receives before it works.
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from typing import Any

from swarmnode.bench.swarm.harness import FINE_S, SwarmHarness, swarm_of
from swarmnode.local.child import Child, NodePlan
from swarmnode.local.spawn import NODE
from swarmnode.manifest import PRESETS, read_signed, verify
from swarmnode.membership.invite import Invite, encode
from swarmnode.wire.record_pb2 import NODE_STATE_SYNCING, NODE_STATE_TRAINING

JOINS = 3
NODES = 3
TARGET_S = 30.0


def run(joins: int = JOINS, preset: str = "demo") -> dict[str, Any]:
    """{"joins": [seconds from the command on], "median_s", "target_s"}."""
    with swarm_of(PRESETS[preset], NODES) as swarm:
        rows = asyncio.run(_measure(swarm, joins))
    median = statistics.median(row["first accepted, s"] for row in rows)
    return {"joins": rows, "median_s": median, "target_s": TARGET_S}


async def _measure(swarm: SwarmHarness, joins: int) -> list[dict[str, Any]]:
    async with swarm.running():
        await swarm.until(lambda: swarm.done() > 20, "the first twenty microbatches")
        return [await _join(swarm, number) for number in range(joins)]


async def _join(swarm: SwarmHarness, number: int) -> dict[str, Any]:
    bootstrap = swarm.fleet.bootstrap
    assert bootstrap is not None and bootstrap.ready is not None
    manifest = bootstrap.plan.manifest
    signed, _ = read_signed(manifest)
    line = encode(Invite(verify(signed, None)[1], signed.owner, bootstrap.ready.addresses))
    home = Path(manifest).parent / f"newcomer-{number}"
    plan = NodePlan(f"newcomer-{number}", home, manifest, bootstrap.plan.cache)
    here = ("--listen", "/ip4/127.0.0.1/tcp/0", "--metrics-port", "0", "--notice", "none")
    command = [*NODE, "join", line, "--home", str(home), *here]
    loop = asyncio.get_running_loop()
    begun = loop.time()
    child = await Child.start(plan, [*command, "--cache", str(plan.cache)], fork=False)
    swarm.fleet.nodes.append(child)
    row: dict[str, Any] = {}

    def worked() -> bool:
        now, status = loop.time() - begun, child.status
        if status is None:
            return False
        row.setdefault("daemon up, s", now)
        if status.state in (NODE_STATE_SYNCING, NODE_STATE_TRAINING):
            row.setdefault("state here, s", now)
        if status.state == NODE_STATE_TRAINING:
            row.setdefault("trains, s", now)
        return status.inner_steps > 0 or status.tokens_per_second > 0

    await swarm.until(worked, f"work of {plan.name} is accepted", FINE_S)
    return {**row, "first accepted, s": loop.time() - begun}

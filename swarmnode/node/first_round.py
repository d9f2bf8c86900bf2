"""The first round of a newcomer: it receives one before it serves."""

from __future__ import annotations

import asyncio
import math

from swarmnode.gossip.exchange import Gossip
from swarmnode.manifest import Manifest
from swarmnode.node.lifecycle import SYNC_WAIT_MAX_S, ready_to_serve
from swarmnode.node.presence import Presence
from swarmnode.node.stage_change import costs
from swarmnode.pipeline.rebalance import load
from swarmnode.ports import Telemetry
from swarmnode.wire import record_pb2

WAIT_MIN_S = 1e-3  # the rest of a wait may be less than a step of the clock


async def syncing(gossip: Gossip, presence: Presence, stage: int, manifest: Manifest, telemetry: Telemetry) -> None:
    """Receive one round at weight 0 before serving, unless the next round is too far away. Looks again at least every
    announce period, until it has waited for long enough."""
    shares, period_s = costs(manifest), manifest.limits.announce_period_s
    begun = asyncio.get_running_loop().time()
    presence.set_state(record_pb2.NODE_STATE_SYNCING, "state loaded")
    while True:
        done, waited_s, received = gossip.done, asyncio.get_running_loop().time() - begun, not gossip.newcomer
        swarm = presence.peer_table.swarm()
        # The run is at most as fast as its slowest stage says it could be.
        fastest = min(load(swarm, shares).capacity)
        round_in_s = gossip.left / fastest if fastest > 0.0 else 0.0
        if stage == 0 and not swarm.feeders():
            round_in_s = math.inf  # all wait for this node to feed
        ready, reason = ready_to_serve(
            swarm, stage, presence.me, received=received, waited_s=waited_s, round_in_s=round_in_s
        )
        if ready:
            gossip.end_newcomer()
            telemetry.event("node.state", state="synced", reason=reason)
            return
        try:
            async with asyncio.timeout(min(period_s, max(WAIT_MIN_S, SYNC_WAIT_MAX_S - waited_s))):
                await gossip.beyond(done)
        except TimeoutError:
            pass

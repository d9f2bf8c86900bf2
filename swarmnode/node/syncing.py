"""What a newcomer with its state does before it serves: it receives one round."""

from __future__ import annotations

import asyncio

from swarmnode.gossip.exchange import Gossip
from swarmnode.manifest import Manifest
from swarmnode.node.lifecycle import SYNC_WAIT_MAX_S, ready_to_serve
from swarmnode.node.moving import costs
from swarmnode.node.presence import Presence
from swarmnode.pipeline.rebalance import load
from swarmnode.ports import Telemetry
from swarmnode.wire import record_pb2

WAIT_MIN_S = 1e-3  # what is left of a wait may be less than a step of the clock


async def syncing(gossip: Gossip, presence: Presence, stage: int, manifest: Manifest, telemetry: Telemetry) -> None:
    """Receive one round at weight 0 before serving (design section 6), unless that is too far away; looks anew at least
    every announce period, and when it has waited for long enough."""
    shares, period_s = costs(manifest), manifest.limits.announce_period_s
    begun = asyncio.get_running_loop().time()
    presence.set_state(record_pb2.NODE_STATE_SYNCING, "state loaded")
    while True:
        gossip.finished.clear()
        waited_s, received = asyncio.get_running_loop().time() - begun, not gossip.newcomer
        swarm = presence.book.swarm()
        # The run is at most as fast as its slowest stage says it could be.
        fastest = min(load(swarm, shares).capacity)
        round_in_s = gossip.left / fastest if fastest > 0.0 else 0.0
        ready, reason = ready_to_serve(
            swarm, stage, presence.me, received=received, waited_s=waited_s, round_in_s=round_in_s
        )
        if ready:
            gossip.newcomer = False
            telemetry.event("node.state", state="synced", reason=reason)
            return
        try:
            async with asyncio.timeout(min(period_s, max(WAIT_MIN_S, SYNC_WAIT_MAX_S - waited_s))):
                await gossip.finished.wait()
        except TimeoutError:
            pass

"""Ends bans by pings. A ban would otherwise last until the peer's next record, for minutes in a large swarm (simulated:
thousand; 104 honest peers were banned at its end)."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence

from swarmnode.ids import PeerId
from swarmnode.membership.pinger import ping_fault
from swarmnode.pipeline.route import BAN_MAX_S, Router
from swarmnode.ports import Telemetry, Transport

SHARE = 0.1  # guess: of the announce period, between two rounds of pings ...
PERIOD_MIN_S, PERIOD_MAX_S = 1.0, 15.0  # ... within these
AT_ONCE_MAX = 8  # guess: peers pinged in a round, by router


async def unban(
    line: Transport,
    run_id: str,
    routers: Sequence[Router],
    banned: asyncio.Event,
    telemetry: Telemetry,
    announce_period_s: float,
) -> None:
    """Ping peers whose ban has lasted its time, until cancelled. A peer that answers may be chosen again; one that does
    not is pinged ever more rarely: most such peers are dead, and stay in the table until their record expires."""
    loop = asyncio.get_running_loop()
    period_s = min(PERIOD_MAX_S, max(PERIOD_MIN_S, SHARE * announce_period_s))

    async def ask(router: Router, peer: PeerId) -> None:
        if await ping_fault(line, run_id, peer) is None:
            router.unban(peer)
            telemetry.event("peer.unbanned", peer=peer, reason="answers a ping")
        else:
            router.ban(peer, loop.time(), max(BAN_MAX_S, announce_period_s))

    while True:
        banned.clear()
        if (wait_s := min(router.ban_ends for router in routers) - loop.time()) > 0.0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s if math.isfinite(wait_s) else None):
                    await banned.wait()
        await asyncio.sleep(period_s)
        due = [(router, peer) for router in routers for peer in router.due(loop.time(), AT_ONCE_MAX)]
        if due:
            async with asyncio.TaskGroup() as tasks:
                for router, peer in due:
                    tasks.create_task(ask(router, peer))

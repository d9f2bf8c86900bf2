"""Replicas that answer no more, seen by those that send them work.

A router bans a replica after a fault. When the ban has lasted its time a ping tells whether the replica lives. Each ban
is also told to TOLD mates, which send work to the same stage: who hears of it pings for itself, bans a silent replica
and tells others, so that news of a death spreads as a rumour does [Demers et al. 1987, "Epidemic algorithms"; SWIM, Das
et al. 2002, tells of deaths on calls that happen anyway]. A liar's word costs one ping a replica and AGAIN_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Iterator
from random import Random

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId, short
from swarmnode.base.ports import Answer, Call, Telemetry, Transport
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import AGAIN_S, PING_TIMEOUT_S, PINGED_MAX, ping_fault
from swarmnode.train.node.presence import Presence
from swarmnode.train.pipeline.route import BAN_MAX_S, Router

TOLD = 3  # guess: mates that one node tells of a ban; five hops reach 300
HEARD_MAX = PINGED_MAX  # names that wait for their ping


class SilenceWatch:
    """Ends bans of replicas that answer, and spreads word of those that do not."""

    def __init__(
        self,
        transport: Transport,
        run_id: RunId,
        presence: Presence,
        telemetry: Telemetry,
        announce_period_s: float,
        chance: Random,
    ) -> None:
        self._transport = transport
        self._run_id = run_id
        self._presence = presence
        self._telemetry = telemetry
        self._ban_max_s = max(BAN_MAX_S, announce_period_s)
        self._chance = chance
        self._heard: dict[PeerId, PeerId] = {}  # named by others, and by whom; not yet pinged
        self._asked = Remembered[PeerId, float]()  # loop time of the last ping of one that was named
        self._told = Remembered[PeerId, float]()  # loop time at which mates were told of a ban

    async def hear(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "silence": `peer` banned the replica that it names."""
        named = PeerId(call.header.silence.peer)
        now_s = asyncio.get_running_loop().time()
        asked_s = self._asked.get(named, -math.inf)
        if now_s >= asked_s + AGAIN_S and len(self._heard) < HEARD_MAX and self._router_of(named) is not None:
            self._heard[named] = peer
            self._asked[named] = now_s
            self._presence.banned.set()
        return Answer(wire.Reply())

    def _router_of(self, peer: PeerId) -> Router | None:
        """The router that has `peer` and has not banned it."""
        member = self._presence.peer_table.member(peer)
        if member is None:
            return None
        router = self._presence.routers[member.stage]
        return None if router.banned(peer, asyncio.get_running_loop().time()) else router

    async def run(self) -> None:
        """Ping and tell until cancelled."""
        loop = asyncio.get_running_loop()
        presence = self._presence
        while True:
            presence.banned.clear()
            work = [*self._work()]
            if work:
                await asyncio.gather(*work)
                continue
            wait_s = min(router.ban_ends for router in presence.routers) - loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wait_s) if math.isfinite(wait_s) else None):
                    await presence.banned.wait()

    def _work(self) -> Iterator[Awaitable[None]]:
        """Pings and tellings that are due."""
        now_s = asyncio.get_running_loop().time()
        for router in self._presence.routers:
            for peer in router.due(now_s, PINGED_MAX):
                yield self._try_again(router, peer)
        for named, teller in self._heard.items():
            yield self._verify(named, teller)
        self._heard.clear()
        for peer in self._presence.newly_banned():
            if now_s >= self._told.get(peer, -math.inf) + AGAIN_S:
                self._told[peer] = now_s
                yield self._tell(peer)

    async def _try_again(self, router: Router, peer: PeerId) -> None:
        """End the ban of `peer` if it answers. One that does not is pinged ever more rarely: most such peers are dead,
        and stay in the table until their record expires."""
        if await ping_fault(self._transport, self._run_id, peer) is None:
            router.unban(peer)
            self._telemetry.event("peer.unbanned", peer=peer, reason="answers a ping")
        else:
            router.ban(peer, asyncio.get_running_loop().time(), self._ban_max_s)

    async def _verify(self, named: PeerId, teller: PeerId) -> None:
        """Ban `named` if it answers no ping."""
        if await ping_fault(self._transport, self._run_id, named) is None:
            return
        if (router := self._router_of(named)) is not None:
            banned_s = router.ban(named, asyncio.get_running_loop().time())
            reason = f"answers no ping; {short(teller)} told of its silence"
            self._telemetry.event("peer.banned", level="warning", peer=named, seconds=banned_s, reason=reason)

    async def _tell(self, peer: PeerId) -> None:
        """Tell some mates that `peer` was banned here."""
        presence = self._presence
        stage = presence.status.stage
        if stage is None:
            return
        serving = presence.peer_table.swarm().serving(stage)
        mates = [member.peer for member in serving if member.peer not in (presence.me, peer)]
        call = Call(wire.Request(run_id=self._run_id, silence=wire.Silence(peer=peer)))
        await asyncio.gather(*(self._say(mate, call) for mate in self._chance.sample(mates, min(TOLD, len(mates)))))

    async def _say(self, mate: PeerId, call: Call) -> None:
        with contextlib.suppress(RemoteFault, Unavailable):  # another mate tells it, or its own work does
            await self._transport.call(mate, call, timeout_s=PING_TIMEOUT_S, reply_bytes_max=0)

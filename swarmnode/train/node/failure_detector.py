"""Finds dead replicas, before their records expire.

`FailureDetector` looks at whole stages: silent replicas are pinged, and those that do not answer are marked dead, so
that routers, joiners and rebalancing see the gap at once. `SilenceWatch` looks at the replicas that this node sends
work to.

A router bans a replica after a fault, or after a probe: every PROBE_S a node pings one of those that it would send work
to, so that somebody soon pings each. When the ban has lasted its time a ping tells whether the replica lives.

Each ban is also told to TOLD mates, which send work to the same stage. A mate that knows the replica pings for itself,
bans it if it is silent, and tells others; one that does not know it passes the word on, HOPS_MAX times. So news of a
death spreads as a rumour does [Demers et al. 1987, "Epidemic algorithms"; probes and rumours: SWIM, Das et al. 2002]. A
liar's word costs one ping a replica and AGAIN_S, and PASSED_PER_S words of each node.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine, Iterable, Iterator

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId, seeded, short
from swarmnode.base.ports import Answer, Call, Clock, Telemetry
from swarmnode.base.remembered import Remembered
from swarmnode.base.token_bucket import TokenBucket
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.recovery.recovery_source import overdue, quiet
from swarmnode.net.membership.liveness import AGAIN_S, LOOK_SHARE, PING_TIMEOUT_S, PINGED_MAX, Pinger, ping_fault
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.piggyback import PiggybackTransport
from swarmnode.train.node.presence import Presence
from swarmnode.train.pipeline.route import BAN_MAX_S, Router

PROBE_S = 2.0  # measured: docs/measurements/simulated-swarms.md
TOLD = 5  # guess: mates that one node tells of a ban; four hops reach 600
HOPS_MAX = 3  # guess: mates know a fifth of a large stage, so that 25 of them know a replica five times over
PASSED_PER_S = 1.0  # guess: of a thousand nodes one dies in 20 s at 16 % an hour
PASSED_BURST = 60.0  # guess: a zone's failure


class FailureDetector:
    """Watches all stages for one node, and reports when a stage is lost and when it is back."""

    def __init__(
        self, manifest: Manifest, presence: Presence, pinger: Pinger, clock: Clock, telemetry: Telemetry
    ) -> None:
        self._limits = manifest.limits
        self._stages = manifest.pipeline.stages
        self._presence = presence
        self._pinger = pinger
        self._clock = clock
        self._telemetry = telemetry
        self._lost: dict[int, float] = {}  # stage -> loop time since when

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SHARE * self._limits.announce_period_s)
            for stage in range(self._stages):
                members = self._presence.peer_table.present(stage)
                if stage in self._lost or overdue(members, self._clock.unix_s(), self._limits):
                    await self._look(stage)
            await self._call()

    async def _call(self) -> None:
        """In a small swarm: ping replicas that went silent while others of their stage did not."""
        presence = self._presence
        if presence.peer_table.size > PINGED_MAX:
            return
        if quiet_stages := self._quiet(range(self._stages)):
            await presence.look(quiet_stages)  # records of stages that we have little to do with come late
            targets = [peer for peers in self._quiet(quiet_stages).values() for peer in peers]
            answering = await self._pinger.answering(targets)
            if dead := [peer for peer in targets if peer not in answering]:
                presence.mark_dead(dead)

    def _quiet(self, stages: Iterable[int]) -> dict[int, list[PeerId]]:
        """Members that went silent, by stage; this node is not among them. No stage of which all have: that is
        `_look`'s."""
        swarm = self._presence.peer_table.swarm()
        now_unix_s = self._clock.unix_s()
        me = self._presence.me
        quiet_of = {}
        for stage in stages:
            serving = swarm.serving(stage)
            peers = quiet(serving, now_unix_s, self._limits)
            if len(peers) == len(serving):
                continue
            if others := [peer for peer in peers if peer != me]:
                quiet_of[stage] = others
        return quiet_of

    async def _look(self, stage: int) -> None:
        """Find out whether `stage` is lost, or back."""
        presence = self._presence
        loop = asyncio.get_running_loop()
        swarm = presence.peer_table.swarm()
        if stage in self._lost:
            if swarm.serving(stage):
                seconds = loop.time() - self._lost.pop(stage)
                self._telemetry.event("stage.back", of_stage=stage, seconds=round(seconds, 3))
            return
        await presence.look([stage])  # others' records come by calls only while we have to do with them
        members = presence.peer_table.swarm().serving(stage)
        if not overdue(members, self._clock.unix_s(), self._limits):
            return
        if await self._pinger.answering([member.peer for member in members]):
            return
        presence.mark_dead([member.peer for member in members])
        self._lost[stage] = loop.time()
        self._telemetry.event(
            "stage.lost", level="warning", of_stage=stage, replicas=len(members), reason="none answers"
        )


class SilenceWatch:
    """Ends bans of replicas that answer, and spreads word of those that do not."""

    def __init__(
        self, manifest: Manifest, run_id: RunId, transport: PiggybackTransport, presence: Presence, telemetry: Telemetry
    ) -> None:
        self._transport = transport
        self._run_id = run_id
        self._presence = presence
        self._telemetry = telemetry
        self._ban_max_s = max(BAN_MAX_S, manifest.limits.announce_period_s)
        self._chance = seeded(manifest.seed, "silence", presence.me)
        self._asked = Remembered[PeerId, float]()  # loop time of the last ping, or word passed on, of a named replica
        self._told = Remembered[PeerId, float]()  # loop time at which mates were told of a ban
        self._passed = TokenBucket.full(PASSED_PER_S, PASSED_BURST)
        self._heard: dict[PeerId, PeerId] = {}  # named by others, and by whom; to be pinged
        self._unknown: dict[PeerId, int] = {}  # named by others and not known here, and the hops of the word
        self._pinging = set[PeerId]()

    async def hear(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "silence": `peer` banned the replica that it names."""
        named = PeerId(call.header.silence.peer)
        hops = call.header.silence.hops + 1
        now_s = asyncio.get_running_loop().time()
        if now_s < self._asked.get(named, -math.inf) + AGAIN_S:
            return Answer(wire.Reply())
        if self._presence.peer_table.member(named) is None:
            if hops < HOPS_MAX and self._passed.take(now_s):
                self._asked[named] = now_s
                self._unknown[named] = hops
        elif self._router_of(named) is not None and len(self._heard) + len(self._pinging) < PINGED_MAX:
            self._asked[named] = now_s
            self._heard[named] = peer
        self._presence.routing.banned.set()
        return Answer(wire.Reply())

    def _router_of(self, peer: PeerId) -> Router | None:
        """The router that has `peer` and has not banned it."""
        member = self._presence.peer_table.member(peer)
        if member is None:
            return None
        router = self._presence.routing.routers[member.stage]
        return None if router.banned(peer, asyncio.get_running_loop().time()) else router

    async def run(self) -> None:
        """Ping and tell until cancelled."""
        loop = asyncio.get_running_loop()
        presence = self._presence
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._probe())
            while True:
                presence.routing.banned.clear()
                for work in self._work():
                    tasks.create_task(work)
                wait_s = min(router.ban_ends for router in presence.routing.routers) - loop.time()
                pause_s = wait_s if wait_s > 0.0 else PING_TIMEOUT_S  # it is being pinged
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s if math.isfinite(pause_s) else None):
                        await presence.routing.banned.wait()

    def _work(self) -> Iterator[Coroutine[None, None, None]]:
        """Pings and tellings that are due."""
        now_s = asyncio.get_running_loop().time()
        for router in self._presence.routing.routers:
            for peer in router.due(now_s, PINGED_MAX):
                if peer not in self._pinging:
                    yield self._try_again(router, peer)
        for named, teller in self._heard.items():
            yield self._verify(named, teller)
        self._heard.clear()
        for named, hops in self._unknown.items():
            yield self._tell(named, hops)
        self._unknown.clear()
        for peer in self._presence.routing.newly_banned():
            if now_s >= self._told.get(peer, -math.inf) + AGAIN_S:
                self._told[peer] = now_s
                self._asked[peer] = now_s
                yield self._tell(peer, 0)

    async def _probe(self) -> None:
        """Ping one replica after the other, drawn, until cancelled. Nothing else speaks for its silence, so it has two
        tries. Who waits for a replica's answer watches it already; and a ping on a busy line says nothing."""
        chance = self._chance
        while True:
            await asyncio.sleep(PROBE_S * (0.5 + chance.random()))
            swarm = self._presence.peer_table.swarm()
            replicas = [member.peer for stage in self._presence.routing.sends_to for member in swarm.serving(stage)]
            if not replicas:
                continue
            peer = chance.choice(replicas)
            if peer in self._transport.asked or self._transport.line_queue or self._router_of(peer) is None:
                continue
            if await self._silent(peer) and await self._silent(peer):
                self._ban(peer, "answers no ping")

    def _ban(self, peer: PeerId, reason: str) -> None:
        if (router := self._router_of(peer)) is not None:
            banned_s = router.ban(peer, asyncio.get_running_loop().time())
            self._telemetry.event("peer.banned", level="warning", peer=peer, seconds=banned_s, reason=reason)

    async def _silent(self, peer: PeerId) -> bool:
        """Whether `peer` answers no ping."""
        self._pinging.add(peer)
        try:
            return await ping_fault(self._transport, self._run_id, peer) is not None
        finally:
            self._pinging.discard(peer)

    async def _try_again(self, router: Router, peer: PeerId) -> None:
        """End the ban of `peer` if it answers. One that does not is pinged ever more rarely: most such peers are dead,
        and stay in the table until their record expires."""
        if await self._silent(peer):
            router.ban(peer, asyncio.get_running_loop().time(), self._ban_max_s)
        else:
            router.unban(peer)
            self._telemetry.event("peer.unbanned", peer=peer, reason="answers a ping")

    async def _verify(self, named: PeerId, teller: PeerId) -> None:
        """Ban `named` if it answers no ping."""
        if await self._silent(named):
            self._ban(named, f"answers no ping; {short(teller)} told of its silence")

    async def _tell(self, peer: PeerId, hops: int) -> None:
        """Tell some mates that `peer` was banned, here or `hops` nodes before."""
        presence = self._presence
        stage = presence.status.stage
        if stage is None:
            return
        serving = presence.peer_table.swarm().serving(stage)
        mates = [member.peer for member in serving if member.peer not in (presence.me, peer)]
        call = Call(wire.Request(run_id=self._run_id, silence=wire.Silence(peer=peer, hops=hops)))
        await asyncio.gather(*(self._say(mate, call) for mate in self._chance.sample(mates, min(TOLD, len(mates)))))

    async def _say(self, mate: PeerId, call: Call) -> None:
        with contextlib.suppress(RemoteFault, Unavailable):  # another mate tells it, or its own work does
            await self._transport.call(mate, call, timeout_s=PING_TIMEOUT_S, reply_bytes_max=0)

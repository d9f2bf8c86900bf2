"""Pings: which peers are alive. Records outlive their nodes by up to their time to live."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.ids import PeerId, RunId, digest64
from swarmnode.membership.swarm import Swarm
from swarmnode.ports import Call, Transport
from swarmnode.wire import call_pb2 as wire

PING_TIMEOUT_S = 2.0  # guess: a busy machine answers a ping within a second; a frozen one never does
PINGED_MAX = 64  # guess: peers pinged at once; in larger swarms one more or less does not matter


async def ping(transport: Transport, run_id: str, peer: PeerId) -> None:
    """Return when `peer` answers a ping. Raises RemoteFault when it does not within PING_TIMEOUT_S."""
    try:
        await transport.call(
            peer, Call(wire.Request(run_id=run_id, ping=wire.Ping())), timeout_s=PING_TIMEOUT_S, reply_bytes_max=0
        )
    except Unavailable:
        return  # a refusal is an answer


async def ping_fault(transport: Transport, run_id: str, peer: PeerId) -> RemoteFault | None:
    """The reason why a ping to `peer` failed, None when it was answered."""
    try:
        await ping(transport, run_id, peer)
    except RemoteFault as fault:
        return fault
    return None


class Pinger:
    """Pings many peers of one run at once."""

    def __init__(self, transport: Transport, run_id: RunId) -> None:
        self._transport = transport
        self._run_id = run_id

    async def answering(self, peers: Sequence[PeerId]) -> frozenset[PeerId]:
        """The peers that answer. The first PINGED_MAX are pinged; the others are taken to be alive."""
        async with asyncio.TaskGroup() as tasks:
            pings = [
                (peer, tasks.create_task(ping_fault(self._transport, self._run_id, peer)))
                for peer in peers[:PINGED_MAX]
            ]
        return frozenset(peer for peer, fault in pings if fault.result() is None) | frozenset(peers[PINGED_MAX:])

    async def answering_in(self, swarm: Swarm, stages: Sequence[int], sample: int) -> frozenset[PeerId]:
        """The members of `stages` that are alive, without this node. Of each stage `sample` members are pinged first.

        The rest of a stage is taken to be alive when half of its sample answers, else it is pinged.
        """
        me, first_asked, others = self._transport.peer_id, [], []
        for stage in dict.fromkeys(stages):
            peers = [member.peer for member in swarm.stages[stage] if member.peer != me]
            first = digest64("few", me) % max(1, len(peers))  # different nodes ping different samples
            peers = peers[first:] + peers[:first]
            first_asked.append(peers[:sample])
            others.append(peers[sample:])
        alive = set(await self.answering([peer for peers in first_asked for peer in peers]))
        for asked, rest in zip(first_asked, others, strict=True):
            doubtful = 2 * len(alive.intersection(asked)) < len(asked)
            alive |= await self.answering(rest) if doubtful else set(rest)
        return frozenset(alive)

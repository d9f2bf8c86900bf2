"""A second chance in the same round: a replica whose partners failed asks another replica for its packet of the
round.

A partner fails when it lies, dies, or has another view of the members. A lone step while other replicas are here
costs as much as a lie would (measured: swarmnode bench attack, a packet of NaN +0.013 nat). So the replica asks
others, one after the other, in an order of its own. Each replica keeps its packet of the last round until the next
round. It gives that packet to at most one asker, after its own exchanges are over, and takes nothing in return.
Uploads therefore at most double, and only where a pair failed. The asker checks the packet as it checks a partner's
before it averages.

The fallback needs a method whose replicas may continue from different slow weights (NoLoCo and plain averaging, in
pairs or groups). There is nobody else to ask where the whole stage meets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from swarmnode.base.errors import RemoteFault, Unavailable
from swarmnode.base.ids import PeerId, RunId, seeded, short, stage_name
from swarmnode.base.ports import Answer, Call, Packet
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import TRIES
from swarmnode.net.membership.swarm import StageContext
from swarmnode.run.manifest import GossipSpec, Manifest
from swarmnode.run.manifest.gossip_compat import rules_of
from swarmnode.train.gossip.outgoing_packet import OutgoingPacket, packet_of, reply_bytes_max

KEPT_BYTES_MAX = Manifest().limits.frame_bytes_max  # of host memory; a larger packet is not kept


def allows_fallback(gossip: GossipSpec) -> bool:
    """Return whether a run allows fallback partners."""
    return rules_of(gossip).takes_fallback and gossip.group != 0


def fallback_order(
    run_id: RunId,
    stage: int,
    round_index: int,
    me: PeerId,
    candidates: Collection[PeerId],
) -> tuple[list[PeerId], str]:
    """Return (the TRIES replicas that `me` asks, in order; the reason). The order is random, so that two askers of one
    round seldom ask the same replica."""
    others = sorted({*candidates} - {me})
    seeded("fallback", run_id, stage, round_index, me).shuffle(others)
    return others[:TRIES], f"of {len(others)} others" if others else "nobody else is here"


class FallbackPartner:
    """Gives one replica's packet of its last round to the first asker, and asks others for theirs."""

    def __init__(
        self, here: StageContext, left_out: Callable[[], Collection[PeerId]], round_max: Callable[[], int]
    ) -> None:
        """`left_out` returns the stage's replicas that this one does not meet. `round_max` returns the last round
        that may be asked for."""
        self._here = here
        self._left_out = left_out
        self._round_max = round_max
        self._round = -1  # the last round whose exchanges are over
        self._kept: OutgoingPacket | None = None
        self._changed = asyncio.Condition()

    async def offer(self, ours: OutgoingPacket) -> None:
        """Offer this round's packet to askers: the round's exchanges are over. A newcomer's packet is not offered,
        since it holds nothing, nor is one above KEPT_BYTES_MAX."""
        async with self._changed:
            self._round = ours.round_index
            self._kept = ours if ours.weight > 0.0 and ours.nbytes <= KEPT_BYTES_MAX else None
            self._changed.notify_all()

    def drop(self) -> None:
        """Forget the packet before the next round's is made, so that two are never kept."""
        self._kept = None

    async def ask(self, peer: PeerId, round_index: int, nbytes: int, timeout_s: float) -> Packet:
        """Return the packet of `peer`, expected to be about as large as ours of `nbytes`. Raises RemoteFault or
        Unavailable."""
        request = wire.FallbackRequest(round=round_index, stage=self._here.stage)
        answer = await self._here.transport.call(
            peer,
            Call(wire.Request(run_id=self._here.run_id, fallback=request)),
            timeout_s=timeout_s,
            reply_bytes_max=reply_bytes_max(nbytes),
        )
        return packet_of(answer, round_index, peer, fallback=True)

    async def serve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "fallback". Waits a bounded time for the end of our own exchanges. Raises RemoteFault
        for another stage, and Unavailable if there is no packet to give."""
        request = call.header.fallback
        if request.stage != self._here.stage:
            raise RemoteFault(
                f"a packet of {stage_name(request.stage)} asked of a replica of {stage_name(self._here.stage)}"
            )
        if peer in self._left_out():  # an unknown replica may ask: perhaps its partner did not know it either
            raise Unavailable(f"{short(peer)} is left out here")
        if request.round > self._round_max():
            raise Unavailable(f"round {request.round} is beyond {self._round_max()}, the next one here")
        try:
            async with asyncio.timeout(self._here.manifest.limits.exchange_timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._round >= request.round)
        except TimeoutError:
            raise Unavailable(f"still in round {request.round}, or before it") from None
        kept = self._kept
        if kept is None or kept.round_index != request.round:
            raise Unavailable(f"the packet of round {request.round} is given away, or there is none")
        self._kept = None
        reply = wire.Exchanged(round=kept.round_index, samples=kept.samples)
        return Answer(wire.Reply(exchanged=reply), kept.tensors)

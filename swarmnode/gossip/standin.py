"""A second chance in the same round: who met nobody it believes asks another replica for its packet of the round.

The partner lied, died, or went by another view of who is here: a lone step, although others are here, costs as much as
the lie would have (measured: swarmnode bench attack, a packet of NaN +0.013 nat). So the replica asks, one after the
other, those it was not paired with, in an order of its own. Whoever is asked keeps its packet of the last round until
the next, and gives it again to one other at most, once its own meeting is over; it takes nothing in return. So uploads
at most double, and only where a pair failed. Who asks averages the packet in, as its partner's, after the same checks.

Only where replicas that got different packets may go on from different slow weights (NoLoCo and plain averaging, in
pairs or groups): where the whole stage meets there is nobody else to ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from swarmnode.errors import RemoteFault, Unavailable
from swarmnode.gossip.calling import Message, packet_of, reply_bytes_max
from swarmnode.ids import PeerId, RunId, seeded, short
from swarmnode.manifest import GossipSpec
from swarmnode.ports import Answer, Call, Packet, Transport
from swarmnode.wire import call_pb2 as wire

ASKED_MAX = 3  # guess: of six honest replicas each gives to one; two askers seldom want the same one thrice
KEPT_BYTES_MAX = 1 << 30  # guess: of host memory; a larger packet is not kept
METHODS = ("noloco", "average")  # as the manifest says them; of others slow weights must be equal at all who meet


def stands_in(gossip: GossipSpec) -> bool:
    """Whether replicas of such a run stand in for each other's partners."""
    return gossip.method in METHODS and gossip.group != 0


def stand_ins(
    run_id: RunId,
    stage: int,
    round_index: int,
    me: PeerId,
    candidates: Collection[PeerId],
    against: Callable[[PeerId], int],
) -> tuple[list[PeerId], str]:
    """(whom `me`, who met nobody, asks in this order; the reason). First those whose packets the fewest refused lately
    (`against`), of these by lot, so that two who ask in one round seldom ask the same."""
    others = sorted({*candidates} - {me})
    seeded("standin", run_id, stage, round_index, me).shuffle(others)
    others.sort(key=against)
    return others[:ASKED_MAX], f"of {len(others)} others" if others else "nobody else is here"


class StandIns:
    """One replica's packet of its last round, for whoever asks first, and its own asking."""

    def __init__(
        self,
        run_id: RunId,
        stage: int,
        transport: Transport,
        timeout_s: float,
        left_out: Callable[[], Collection[PeerId]],
        round_max: Callable[[], int],
    ) -> None:
        """`left_out`: replicas of the stage whom we do not meet. `round_max`: the last round anybody near asks for."""
        self._run_id = run_id
        self._stage = stage
        self._transport = transport
        self._timeout_s = timeout_s
        self._left_out = left_out
        self._round_max = round_max
        self._round = -1  # of the last meeting that is over
        self._kept: Message | None = None
        self._changed = asyncio.Condition()

    async def offer(self, ours: Message) -> None:
        """Our meeting of this round is over: its packet may be asked for. A newcomer's holds nothing."""
        async with self._changed:
            self._round = ours.round_index
            self._kept = ours if ours.weight > 0.0 and ours.nbytes <= KEPT_BYTES_MAX else None
            self._changed.notify_all()

    def drop(self) -> None:
        """The next round's packet is about to be made: two are never kept."""
        self._kept = None

    async def ask(self, peer: PeerId, round_index: int, nbytes: int, timeout_s: float) -> Packet:
        """The packet of `peer`, about as large as ours of `nbytes`. Raises RemoteFault and Unavailable."""
        asked = wire.StandIn(round=round_index, stage=self._stage)
        answer = await self._transport.call(
            peer,
            Call(wire.Request(run_id=self._run_id, standin=asked)),
            timeout_s=timeout_s,
            reply_bytes_max=reply_bytes_max(nbytes),
        )
        return packet_of(answer, round_index, peer, standin=True)

    async def serve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "standin". Waits a bounded time for the end of our own meeting. Raises RemoteFault and
        Unavailable."""
        asked = call.header.standin
        if asked.stage != self._stage:
            raise RemoteFault(f"a packet of stage {asked.stage} asked of a replica of stage {self._stage}")
        if peer in self._left_out():  # one that is not known here may ask: its partner may not have known it either
            raise Unavailable(f"{short(peer)} is left out here")
        if asked.round > self._round_max():
            raise Unavailable(f"round {asked.round} is beyond {self._round_max()}, the next one here")
        try:
            async with asyncio.timeout(self._timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._round >= asked.round)
        except TimeoutError:
            raise Unavailable(f"still in round {asked.round}, or before it") from None
        kept = self._kept
        if kept is None or kept.round_index != asked.round:
            raise Unavailable(f"the packet of round {asked.round} is given away, or there is none")
        self._kept = None
        reply = wire.Exchanged(round=kept.round_index, samples=kept.samples)
        return Answer(wire.Reply(exchanged=reply), kept.tensors)

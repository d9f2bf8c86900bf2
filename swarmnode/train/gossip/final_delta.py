"""A leaver's last exchange: it gives what it learned since its last round to one replica that stays, the successor.

A round would need both sides at a boundary, and the leaver has no time for that. It marks a boundary of its own and
sends the message it would have sent at the next round. The successor averages it into its own next round as one more
packet, weighted by the samples behind it, as if the two had met then. The message counts only in the round it was made
for, so that no stale tensors are averaged. Replicas of different strides have different next rounds, so the successor
says for which round it must be made.

It is judged as a partner's packet is. Keys cost nothing, so it is taken only from a replica whose packet was taken here
in a round since the last one it gave: else a peer that never leaves would count in every round, at every replica. A
replica that has met nobody yet, as one that comes while the last one of its stage leaves, takes one of each.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarmnode.base.errors import Busy, Refused, RemoteFault, SwarmnodeError, Unavailable
from swarmnode.base.ids import PeerId, RunId, short, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.ports import Answer, Call, Packet, Priority, Telemetry, Transport, WireTensor
from swarmnode.base.remembered import Remembered
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.net.membership.liveness import SMALL_CALL_S, TRIES
from swarmnode.net.membership.swarm import StageContext
from swarmnode.train.gossip.acceptance import Acceptance

KEPT_MAX = 2  # guess: leavers from which a replica takes a message in a round; other leavers ask another replica
RETRY_S = 1.0
PAUSE_S = 0.5
SHARE_MAX = 1.0  # a leaver counts at most as much as a replica that stays

Make = Callable[[int | None], Awaitable[tuple[wire.FinalDelta, Sequence[WireTensor]]]]
"""Makes the leaver's message for a round (None: the leaver's next one). Raises Unavailable for a round that is over for
the leaver."""


@dataclass(slots=True)
class _FinalDelta:
    peer: PeerId
    round_index: int
    samples: int
    tensors: Sequence[WireTensor]


class FinalDeltas:
    """The messages that leavers gave this replica for its next round."""

    def __init__(self, here: StageContext, next_round: Callable[[], int], acceptance: Acceptance) -> None:
        self._here = here
        self._acceptance = acceptance
        self._given = Remembered[PeerId, int]()  # packets of each key that were taken here when its last one was
        self._next_round = next_round
        self._kept: list[_FinalDelta] = []
        self._merged: set[tuple[PeerId, int]] = set()  # (leaver, round) of those that the last round with any took

    async def serve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "final_delta". Answers with our next round to a message for another one. A message that has
        counted is acknowledged again, since the answer was lost. Raises RemoteFault for another stage or codec,
        Unavailable for a peer that is not met or gave one already, and Busy when enough messages are kept."""
        request = call.header.final_delta
        if request.stage != self._here.stage:
            raise RemoteFault(
                f"final delta for {stage_name(request.stage)} sent to a replica of {stage_name(self._here.stage)}"
            )
        if request.codec != (ours := self._here.manifest.gossip.codec):
            raise RemoteFault(f"final delta in codec {request.codec[:16]!r}; this run uses {ours}")
        due = self._next_round()
        if (peer, request.round) in self._merged:
            return Answer(wire.Reply(final_delta_taken=wire.FinalDeltaTaken(round=request.round)))
        if request.round != due:
            return Answer(wire.Reply(final_delta_taken=wire.FinalDeltaTaken(round=due, again=True)))
        self._check_giver(peer)
        kept = [
            final_delta for final_delta in self._kept if final_delta.peer != peer and final_delta.round_index == due
        ]
        if len(kept) >= KEPT_MAX:
            raise Busy(f"{KEPT_MAX} leavers gave theirs already", RETRY_S)
        self._kept = [*kept, _FinalDelta(peer, due, request.samples, call.tensors)]
        return Answer(wire.Reply(final_delta_taken=wire.FinalDeltaTaken(round=due)))

    def _check_giver(self, peer: PeerId) -> None:
        if peer in self._acceptance.left_out():
            raise Unavailable(f"{short(peer)} is not met: its packets broke the rules")
        if self._acceptance.packets_taken(peer) <= self._given.get(peer, 0 if self._acceptance.has_met else -1):
            raise Unavailable(f"no packet of {short(peer)} was taken here, or none since its last final delta")

    def take(self, round_index: int, samples: int) -> list[Packet]:
        """The packets that count in a round in which this replica trained `samples`; others are dropped and logged."""
        kept = self._kept
        self._kept = []
        if kept:
            self._merged = {
                (final_delta.peer, round_index) for final_delta in kept if final_delta.round_index == round_index
            }
        packets = []
        for final_delta in kept:
            good = final_delta.round_index == round_index
            self._here.telemetry.event(
                "final_delta.merged" if good else "final_delta.stale",
                level="info" if good else "warning",
                peer=final_delta.peer,
                round=round_index,
                made_for=final_delta.round_index,
                samples=final_delta.samples,
            )
            if good:
                peer = final_delta.peer
                weight = min(SHARE_MAX, final_delta.samples / max(1, samples))
                packet = Packet(weight, final_delta.samples, final_delta.tensors, final_delta=True, sender=peer)
                packets.append(packet)
                self._given[peer] = self._acceptance.packets_taken(peer)
        return packets


class OwnFinalDelta:
    """Makes a leaver's message, once a round: what it learned since the last round of each fragment of the weights."""

    def __init__(self, here: StageContext) -> None:
        self._here = here
        self._made: tuple[wire.FinalDelta, Sequence[WireTensor]] | None = None  # the last message

    async def of(self, round_index: int, samples: int) -> tuple[wire.FinalDelta, Sequence[WireTensor]]:
        """The message for a round, with the `samples` behind it. Gradients that wait for a step are stepped first."""
        codec = self._here.manifest.gossip.codec
        header = wire.FinalDelta(round=round_index, stage=self._here.stage, codec=codec, samples=samples)

        def make() -> tuple[wire.FinalDelta, Sequence[WireTensor]]:
            if self._made is None or self._made[0].round != round_index:
                if self._here.replica.accumulated:
                    self._here.replica.step(self._here.samples_total())
                self._made = header, self._here.replica.final_delta(round_index)
            return self._made

        return await self._here.compute.run(Priority.OUTER, 0, make)


async def send_final_delta(
    transport: Transport,
    run_id: RunId,
    successors: Sequence[PeerId],
    make: Make,
    telemetry: Telemetry,
    rng: random.Random,
    timeout_s: float,
    met: Callable[[PeerId], int] = lambda peer: 0,
) -> PeerId:
    """Give the message to the first of `successors` that takes it: those first that were `met` in a round, because only
    they do, else in a random order. `timeout_s`: of an exchange. Raises Unavailable if none does.

    Successors are asked TRIES times, since a round may begin there between the answer and the message made for it, and
    for as long as an exchange may take while one is still in a round that is over here. A successor whose answer was
    lost is asked again before another is, so that the message does not count twice.
    """
    reason = "no other replica of the stage is here"
    message, tensors = await make(None)
    attempts = waits = 0
    while attempts < TRIES and waits * PAUSE_S < timeout_s:
        if attempts or waits:
            await asyncio.sleep(PAUSE_S)
        behind = False
        for successor in sorted(rng.sample(sorted(successors), len(successors)), key=lambda peer: not met(peer)):
            for _ in range(TRIES):  # the first learns the round, the second is for it unless it has just begun
                call = Call(wire.Request(run_id=run_id, final_delta=message), tensors)
                try:
                    answer = await _ask(transport, successor, call, timeout_s)
                except SwarmnodeError as error:
                    reason = f"{short(successor)}: {error}"
                    break
                taken = answer.header.final_delta_taken
                if not taken.again:
                    telemetry.count(name.FINAL_DELTAS)
                    telemetry.event("final_delta.given", peer=successor, round=message.round, samples=message.samples)
                    return successor
                reason = f"{short(successor)}: its next round is {taken.round}, not {message.round}"
                try:
                    message, tensors = await make(taken.round)
                except Unavailable:
                    behind = True  # at the next attempt it may be in a later round
                    break
        attempts += not behind
        waits += behind
    raise Unavailable(reason)


async def _ask(transport: Transport, successor: PeerId, call: Call, timeout_s: float) -> Answer:
    """Call `successor`, and again where no answer arrived. Raises what the last call raised."""
    doubts = 0
    again_s = max(SMALL_CALL_S, timeout_s / TRIES)
    while True:
        try:
            return await transport.call(successor, call, timeout_s=timeout_s, reply_bytes_max=0)
        except Refused:
            raise
        except RemoteFault:
            doubts += 1
            timeout_s = again_s
            if doubts > TRIES:
                raise
        await asyncio.sleep(PAUSE_S)

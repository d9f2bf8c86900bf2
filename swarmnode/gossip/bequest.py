"""What a leaver learnt since its last round, given to one replica that stays: the leaver's last exchange.

A round would need both sides at a boundary; the leaver has no time for that. It marks a boundary of its own and sends
the message it would have sent at the next round. Who gets it averages it into its own next round as one more packet,
weighted by the samples behind it: as if the two had met then. It counts only in the round it was made for, so that no
stale tensors are averaged (design section 5); replicas of different strides have different next rounds, so whoever
gets it says for which one it is to be made.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from swarmnode.errors import Busy, Refused, RemoteFault, SwarmnodeError, Unavailable
from swarmnode.ids import PeerId, RunId, short
from swarmnode.manifest import Manifest
from swarmnode.metrics import name
from swarmnode.ports import Answer, Call, Packet, Telemetry, Transport, WireTensor
from swarmnode.wire import call_pb2 as wire

KEPT_MAX = 2  # guess: leavers one replica hears out in a round; others ask another
RETRY_S = 1.0
TIMEOUT_S = 20.0  # guess: as an exchange
ATTEMPTS_MAX = 8  # guess, with the pause: some seconds, which the notice may cut
BEHIND_MAX = 60  # guess: the same while somebody who would take it is still in a round that is over here: half a minute
PAUSE_S = 0.5
TRIES_AT_ONE = 3  # guess: the first tells the round, the second is for it unless it has just begun
DOUBTS_MAX = 3  # guess: how often one whose answer was lost is asked again before another is
DOUBT_TIMEOUT_S = 5.0  # guess: of each of these; it has the message if it got it
SHARE_MAX = 1.0  # a leaver counts at most as much as a replica that stays

Make = Callable[[int | None], Awaitable[tuple[wire.Bequest, Sequence[WireTensor]]]]
"""What a leaver learnt as a message of the round given, None: its own next one. Raises Unavailable for one that is over
for the leaver."""


@dataclass(slots=True)
class _Bequest:
    peer: PeerId
    round_index: int
    samples: int
    tensors: Sequence[WireTensor]


class Bequests:
    """What leavers gave this replica for its next round."""

    def __init__(
        self,
        manifest: Manifest,
        stage: int,
        next_round: Callable[[], int],
        telemetry: Telemetry,
    ) -> None:
        self._manifest = manifest
        self._stage = stage
        self._next_round = next_round
        self._telemetry = telemetry
        self._kept: list[_Bequest] = []
        self._merged: set[tuple[PeerId, int]] = set()  # of the last round that took any: leaver, the round it was for

    async def serve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "bequest". Answers with our next round when it was made for another; what has counted already is
        taken, for its answer was lost. Raises Busy when enough are kept."""
        asked = call.header.bequest
        if asked.stage != self._stage:
            raise RemoteFault(f"bequest for stage {asked.stage} sent to a replica of stage {self._stage}")
        if asked.codec != self._manifest.gossip.codec:
            raise RemoteFault(f"bequest in codec {asked.codec[:16]!r}; this run uses {self._manifest.gossip.codec}")
        due = self._next_round()
        if (peer, asked.round) in self._merged:
            return Answer(wire.Reply(bequeathed=wire.Bequeathed(round=asked.round)))
        if asked.round != due:
            return Answer(wire.Reply(bequeathed=wire.Bequeathed(round=due, again=True)))
        kept = [bequest for bequest in self._kept if bequest.peer != peer and bequest.round_index == due]
        if len(kept) >= KEPT_MAX:
            raise Busy(f"{KEPT_MAX} leavers gave theirs already", RETRY_S)
        self._kept = [*kept, _Bequest(peer, due, asked.samples, call.tensors)]
        return Answer(wire.Reply(bequeathed=wire.Bequeathed(round=due)))

    def take(self, round_index: int, samples: int) -> list[Packet]:
        """What counts in `round_index`, for a replica that trained `samples` in it; the rest is dropped, and said."""
        kept, self._kept = self._kept, []
        if kept:
            self._merged = {(bequest.peer, round_index) for bequest in kept if bequest.round_index == round_index}
        packets = []
        for bequest in kept:
            good = bequest.round_index == round_index
            self._telemetry.event(
                "bequest.merged" if good else "bequest.stale",
                level="info" if good else "warning",
                peer=bequest.peer,
                round=round_index,
                made_for=bequest.round_index,
                samples=bequest.samples,
            )
            if good:
                weight = min(SHARE_MAX, bequest.samples / max(1, samples))
                packets.append(Packet(weight, bequest.samples, bequest.tensors, bequest=True))
        return packets


async def bequeath(
    transport: Transport,
    run_id: RunId,
    heirs: Sequence[PeerId],
    make: Make,
    telemetry: Telemetry,
    rng: random.Random,
) -> PeerId:
    """Give what `make` makes to one of `heirs`, whoever takes it first in a random order. Raises Unavailable if nobody
    does.

    Asked again some times: a round may begin there between the answer and the bequest made for it. Who may have taken
    it without our hearing of it is asked again before another is, so that it does not count twice.
    """
    reason = "no other replica of the stage is here"
    message, tensors = await make(None)
    attempts = waits = 0
    while attempts < ATTEMPTS_MAX and waits < BEHIND_MAX:
        if attempts or waits:
            await asyncio.sleep(PAUSE_S)
        behind = False
        for heir in rng.sample(sorted(heirs), len(heirs)):
            for _ in range(TRIES_AT_ONE):
                call = Call(wire.Request(run_id=run_id, bequest=message), tensors)
                try:
                    answer = await _ask(transport, heir, call)
                except SwarmnodeError as error:
                    reason = f"{short(heir)}: {error}"
                    break
                given = answer.header.bequeathed
                if not given.again:
                    telemetry.count(name.BEQUESTS)
                    telemetry.event("bequest.given", peer=heir, round=message.round, samples=message.samples)
                    return heir
                reason = f"{short(heir)}: its next round is {given.round}, not {message.round}"
                try:
                    message, tensors = await make(given.round)
                except Unavailable:
                    behind = True  # it may have come on at the next attempt
                    break
        attempts, waits = attempts + (not behind), waits + behind
    raise Unavailable(reason)


async def _ask(transport: Transport, heir: PeerId, call: Call) -> Answer:
    """As `transport.call`; where the answer did not arrive, asked again. Raises what the last call raised."""
    doubts, timeout_s = 0, TIMEOUT_S
    while True:
        try:
            return await transport.call(heir, call, timeout_s=timeout_s, reply_bytes_max=0)
        except Refused:
            raise
        except RemoteFault:
            doubts, timeout_s = doubts + 1, DOUBT_TIMEOUT_S
            if doubts > DOUBTS_MAX:
                raise
        await asyncio.sleep(PAUSE_S)

"""Ask replicas for a free place before sending a microbatch, one after the other.

In a large swarm a router sends each replica one microbatch in minutes, and cannot know what others send there. By
chance some replicas queue while others are idle. So it asks the chosen replica, and the next one if work is queued
there, up to ASKED_MAX ("threshold" of Eager, Lazowska and Zahorjan, Adaptive load sharing in homogeneous distributed
systems, 1986). A replica that grants a place counts it as work at once. Otherwise all concurrent askers would find it
idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnode.ema import Ema
from swarmnode.errors import PeerTimeout, Refused
from swarmnode.ids import PeerId
from swarmnode.membership.liveness import SMALL_CALL_S
from swarmnode.metrics import name
from swarmnode.pipeline.route import Router
from swarmnode.ports import Answer, Call, Telemetry, Transport
from swarmnode.wire import call_pb2 as wire

READY_AHEAD = 1  # the piece in work
# Simulated: thousand, 20 minutes, seed 0; more microbatches than without asking: 2 asked 10 %, 3 19, 4 24, 8 32.
ASKED_MAX = 4
WORTH = 20.0  # guess: ask only if a microbatch takes so many times as long as asking
WORTH_MIN_S = 1.0  # guess: for shorter microbatches nobody is asked; routers learn enough from the answers
ASKING_S = 0.2  # guess: until the first answer
UNHEARD_AHEAD = 1 << 20  # for a replica that did not answer in time: chosen only if all others did not either
SLACK_S = 1.0  # guess: for what a time limit does not count; also so that we give up before the transport does
HOLD_FACTOR = 2.0  # guess: of the time from asking until the microbatch arrives
HOLD_MAX_S = 120.0  # guess


class Reservations:
    """A replica's reservations: announced work counts as queued."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        """`waiting`: pieces of work here, including the running one, and bulk messages queued on our uplink."""
        self._waiting = waiting
        self._until_s: dict[PeerId, float] = {}  # expiry of each caller's reservation, in loop time

    def serve(self, peer: PeerId, call: Call) -> Answer:
        """Handler of method "reserve"."""
        now_s = asyncio.get_running_loop().time()
        self._until_s = {other: until_s for other, until_s in self._until_s.items() if until_s > now_s}
        ahead = self._waiting() + len(self._until_s)
        granted = ahead <= READY_AHEAD
        if granted:
            self._until_s[peer] = now_s + min(HOLD_MAX_S, call.header.reserve.hold_ms / 1000.0)
        return Answer(wire.Reply(reserved=wire.Reserved(granted=granted, ahead=ahead)))

    def on_arrival(self, peer: PeerId) -> None:
        """Drop the reservation of `peer`: its microbatch has arrived and counts as ordinary work."""
        self._until_s.pop(peer, None)


class ReservationClient:
    """A sender's side of reservations: asks replicas whether they are idle."""

    def __init__(self, run_id: str, transport: Transport, telemetry: Telemetry) -> None:
        self._run_id = run_id
        self._transport = transport
        self._telemetry = telemetry
        self._asking = Ema()  # seconds until an answer
        self._coming = Ema()  # seconds from sending a microbatch until it arrives, our uplink's queue included

    def worth_it(self, router: Router, peer: PeerId, samples: int) -> bool:
        """Whether asking costs little compared with a microbatch of `samples`."""
        asking_s = self._asking.value if self._asking.known else ASKING_S
        return len(router) > 1 and router.seconds(peer, samples) >= max(WORTH_MIN_S, WORTH * asking_s)

    def record_transit(self, seconds: float) -> None:
        """Record the seconds between sending a microbatch and its arrival."""
        self._coming.add(seconds)

    async def ask(self, peer: PeerId, left_s: float) -> int | None:
        """Pieces of work ahead of our microbatch at `peer`; None if a place was granted. Waits at most SMALL_CALL_S and
        `left_s`. Raises RemoteFault if `peer` cannot be reached, Unavailable if it serves no microbatches."""
        loop = asyncio.get_running_loop()
        begun_s, timeout_s = loop.time(), max(0.0, min(SMALL_CALL_S, left_s))
        hold_s = min(HOLD_MAX_S, SLACK_S + HOLD_FACTOR * self._coming.value)
        request = wire.Request(run_id=self._run_id, reserve=wire.Reserve(hold_ms=int(1000.0 * hold_s)))
        try:
            answer = await self._transport.call(peer, Call(request), timeout_s=timeout_s, reply_bytes_max=0)
        except PeerTimeout:
            self._telemetry.count(name.RESERVATIONS, outcome="unheard")
            return UNHEARD_AHEAD
        except Refused:
            return None  # an older version that does not know the method
        self._asking.add(loop.time() - begun_s)
        reserved = answer.header.reserved
        self._telemetry.count(name.RESERVATIONS, outcome="granted" if reserved.granted else "full")
        return None if reserved.granted else reserved.ahead

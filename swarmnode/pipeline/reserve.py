"""A microbatch goes where nothing waits: replicas are asked before it is sent, one after the other.

A router of a large swarm sends each replica one microbatch in minutes, and knows nothing of what others send there: by
chance some queue up while others stand still. So it asks the replica whose turn it is, and the next if something waits
there, up to ASKED_MAX ("threshold" of Eager, Lazowska and Zahorjan, Adaptive load sharing in homogeneous distributed
systems, 1986). Who says yes counts it as work from then on: else all who ask at once would find it idle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnode.errors import PeerTimeout, Refused
from swarmnode.ids import PeerId
from swarmnode.metrics import name
from swarmnode.pipeline.route import Ema, Router
from swarmnode.ports import Answer, Call, Telemetry, Transport
from swarmnode.wire import call_pb2 as wire

READY_AHEAD = 1  # the piece of work it is at
# Simulated: thousand, 20 minutes, seed 0; more microbatches than without asking: 2 asked 10 %, 3 19, 4 24, 8 32.
ASKED_MAX = 4
WORTH = 20.0  # guess: a microbatch takes so many times as long as asking costs
WORTH_MIN_S = 1.0  # guess: what takes less is not asked for; routers see enough of it
ASKING_S = 0.2  # guess: until the first answer
TIMEOUT_S = 5.0  # guess: a line full of bulk holds a small message up for a second or two
UNHEARD_AHEAD = 1 << 20  # of one that does not answer in time: only where all are like it
HOLD_SLACK_S = 1.0  # guess
HOLD_FACTOR = 2.0  # guess: of the time it takes from the question until the microbatch is there
HOLD_MAX_S = 120.0  # guess


class Reservations:
    """Of one replica: work that is on its way here counts as if it were waiting."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        """`waiting`: pieces of work here, the one in work among them, and messages of bulk that wait for our line."""
        self._waiting = waiting
        self._until_s: dict[PeerId, float] = {}  # loop time at which each caller's reservation is over

    def serve(self, peer: PeerId, call: Call) -> Answer:
        """The answer to "reserve"."""
        now_s = asyncio.get_running_loop().time()
        self._until_s = {other: until_s for other, until_s in self._until_s.items() if until_s > now_s}
        ahead = self._waiting() + len(self._until_s)
        granted = ahead <= READY_AHEAD
        if granted:
            self._until_s[peer] = now_s + min(HOLD_MAX_S, call.header.reserve.hold_ms / 1000.0)
        return Answer(wire.Reply(reserved=wire.Reserved(granted=granted, ahead=ahead)))

    def came(self, peer: PeerId) -> None:
        """A microbatch of `peer` is here: now it is work like any other."""
        self._until_s.pop(peer, None)


class Reserving:
    """Of one sender: asks replicas whether they have nothing to do."""

    def __init__(self, run_id: str, transport: Transport, telemetry: Telemetry) -> None:
        self._run_id = run_id
        self._transport = transport
        self._telemetry = telemetry
        self._asking = Ema()  # seconds until an answer
        self._coming = Ema()  # seconds from sending a microbatch until it is there, the wait for our line included

    def worth_it(self, router: Router, peer: PeerId, samples: int) -> bool:
        """Whether asking costs little of what a microbatch of `samples` takes."""
        asking_s = self._asking.value if self._asking.known else ASKING_S
        return len(router) > 1 and router.seconds(peer, samples) >= max(WORTH_MIN_S, WORTH * asking_s)

    def came(self, seconds: float) -> None:
        """A microbatch was there so long after it was sent."""
        self._coming.add(seconds)

    async def ask(self, peer: PeerId, left_s: float) -> int | None:
        """Pieces of work ahead of a microbatch of ours at `peer`; None: it is granted. Waits for TIMEOUT_S and `left_s`
        at most. Raises RemoteFault when `peer` cannot be reached, Unavailable when it serves no microbatches."""
        loop = asyncio.get_running_loop()
        begun_s, timeout_s = loop.time(), max(0.0, min(TIMEOUT_S, left_s))
        hold_s = min(HOLD_MAX_S, HOLD_SLACK_S + HOLD_FACTOR * self._coming.value)
        request = wire.Request(run_id=self._run_id, reserve=wire.Reserve(hold_ms=int(1000.0 * hold_s)))
        try:
            answer = await self._transport.call(peer, Call(request), timeout_s=timeout_s, reply_bytes_max=0)
        except PeerTimeout:
            self._telemetry.count(name.RESERVATIONS, outcome="unheard")
            return UNHEARD_AHEAD
        except Refused:
            return None  # an older version, which does not know the question
        self._asking.add(loop.time() - begun_s)
        given = answer.header.reserved
        self._telemetry.count(name.RESERVATIONS, outcome="granted" if given.granted else "full")
        return None if given.granted else given.ahead

"""The first hop of a feeder that serves the first stage: its own replica, or one of that stage that reads no text.

A replica without text gets no microbatch unless a feeder gives it some, and a feeder at the first stage would else keep
all of its own. Both are given work in proportion to their speed, by virtual runtime as in route.py: whichever is
behind gets the next microbatch. Each feeder counts its part of the others' speed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from swarmnode.ema import Ema
from swarmnode.errors import MicrobatchLost, Unavailable
from swarmnode.identity import Identity
from swarmnode.ids import PeerId
from swarmnode.membership.swarm import Swarm
from swarmnode.pipeline.feeder import FirstHop
from swarmnode.pipeline.next_hop import MicrobatchResult, NextHop
from swarmnode.pipeline.route import Router
from swarmnode.pipeline.statement import sign_feed
from swarmnode.ports import WireTensor
from swarmnode.wire import call_pb2 as wire


class RemoteFirstHop:
    """feeder.FirstHop by replicas of stage 0 on other machines. `worked` is told each that answered."""

    boundary_digest = b""  # each replica names its own

    def __init__(self, next_hop: NextHop, identity: Identity, worked: Callable[[PeerId], object]) -> None:
        self._next_hop = next_hop
        self._identity = identity
        self._worked = worked

    async def run_microbatch(
        self,
        process: wire.Process,
        x: WireTensor,
        tokens: WireTensor,
        deadline: float,
        but: Collection[PeerId] | None = None,
    ) -> MicrobatchResult:
        """See feeder.FirstHop. With `but`, those replicas are not asked, and it raises Unavailable once all others are
        busy, banned or were tried."""
        sign_feed(process, tokens, self._next_hop.run_id, self._identity)
        outcome = await self._next_hop.send(process, x, tokens, deadline, but)
        if process.purpose == wire.PURPOSE_TRAIN and outcome.peer is not None:
            self._worked(outcome.peer)
        return outcome


@dataclass(eq=False)
class SharedFirstHop:
    """feeder.FirstHop by `own`, this node's replica, and by replicas of the first stage that do not feed. `router`
    knows the speed of the first stage's replicas; `speed` is this machine's, in samples/s."""

    me: PeerId
    own: FirstHop
    others: RemoteFirstHop
    router: Router
    swarm: Callable[[], Swarm]
    speed: Callable[[], float]

    def __post_init__(self) -> None:
        self._took = Ema()  # seconds of a sample in our own replica, with what it waits there
        self._seen: Swarm | None = None  # the view that `_idle` is of
        self._idle: list[PeerId] = []  # replicas of the first stage that do not feed
        self._own_s = self._others_s = 0.0  # virtual runtimes
        self._sharing = False

    @property
    def boundary_digest(self) -> bytes:
        """See feeder.FirstHop."""
        return self.own.boundary_digest

    async def run_microbatch(
        self, process: wire.Process, x: WireTensor, tokens: WireTensor, deadline: float
    ) -> MicrobatchResult:
        """See feeder.FirstHop. Held-out microbatches stay here."""
        if process.purpose == wire.PURPOSE_TRAIN and self._is_theirs(process.samples):
            digest = process.boundary_digest
            process.boundary_digest = self.others.boundary_digest
            try:
                return await self.others.run_microbatch(process, x, tokens, deadline, but=self._feeding())
            except MicrobatchLost:
                raise
            except Unavailable:  # they are busy or gone, and we are here
                process.boundary_digest = digest
        loop = asyncio.get_running_loop()
        begun = loop.time()
        outcome = await self.own.run_microbatch(process, x, tokens, deadline)
        if process.purpose == wire.PURPOSE_TRAIN:
            self._took.add(max(0.0, loop.time() - begun - outcome.onward_s - outcome.sent_s) / process.samples)
        return outcome

    def _feeding(self) -> tuple[PeerId, ...]:
        """This node and the other feeders, which have work of their own."""
        return (self.me, *self.swarm().feeders())

    def _without_text(self) -> Sequence[PeerId]:
        swarm = self.swarm()
        if swarm is not self._seen:
            feeding = set(self._feeding())
            self._seen, self._idle = swarm, [m.peer for m in swarm.serving(0) if m.peer not in feeding]
        able = self._idle and self.router.able(asyncio.get_running_loop().time(), set(self._feeding()))
        return self._idle if able else ()

    def _is_theirs(self, samples: int) -> bool:
        """Whether a microbatch of so many samples should go to a replica without text; charges whoever gets it."""
        others = [peer for peer in self._without_text() if peer in self.router]
        if not others:
            self._sharing = False
            return False
        if not self._sharing:  # whoever comes is neither flooded nor starved
            self._sharing, self._own_s, self._others_s = True, 0.0, 0.0
        own_s = samples * (self._took.value if self._took.known else 1.0 / self.speed())
        others_s = samples * max(1, len(self.swarm().feeders())) / self._rate(others, 1.0 / max(1e-9, own_s / samples))
        if self._others_s + others_s < self._own_s + own_s:
            self._others_s += others_s
            return True
        self._own_s += own_s
        return False

    def _rate(self, others: Sequence[PeerId], own: float) -> float:
        """Samples/s of `others`, where our own replica does `own`. Keys that never answered a microbatch count as long
        as most that were tried did answer; then all together for a share of what the others and we do."""
        known, unknown = 0.0, 0.0
        for peer in others:
            rate = 1.0 / max(1e-9, self.router.seconds(peer, 1))
            if self.router.expected_s(peer, 1) is None:
                unknown += rate
            else:
                known += rate
        share = self.router.unknown_share(1.0 / own)
        return known + (unknown if share == 1.0 else min(unknown, own + known) * share)

"""Examinations at one caller: a replica whose weights have just come gets the next microbatch, which these weights must
give again. No lie looks honest to the very weights that gave it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection

from swarmnode.base.ids import PeerId
from swarmnode.base.remembered import Remembered
from swarmnode.net.membership.judge import ASKED_S
from swarmnode.trust.audit import EXAMINED_S
from swarmnode.trust.statement import HopClaim

EXAMINED = 4  # guess: answers of a suspect that are asked for after each copy of its weights


class Examinations:
    """The replicas that are examined now, and the answer that each owes. Event loop times are `now_s`."""

    def __init__(self) -> None:
        self._answers = dict[PeerId, asyncio.Future[HopClaim] | None]()  # None until its weights came
        self._turns = dict[int, tuple[PeerId, int, float]]()  # by stage, who is to answer, how often, and from when
        self._copied_s = Remembered[PeerId, float]()  # when weights of those examined came

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._answers

    def begin(self, peer: PeerId) -> None:
        """`peer` is examined until `end`."""
        self._answers[peer] = None

    def end(self, peer: PeerId) -> None:
        del self._answers[peer]

    def turn(self, stage: int, peers: Collection[PeerId], now_s: float) -> PeerId | None:
        """The one of `peers` that alone gets the next microbatch for `stage`; None: anybody. It is not asked at once
        again: that would be the same microbatch."""
        if stage not in self._turns:
            return None
        peer, times, from_s = self._turns[stage]
        if peer not in peers or not times or now_s < from_s:
            return None
        self._turns[stage] = peer, times - 1, now_s + EXAMINED_S / (EXAMINED + 1)
        return peer

    async def next_of(self, peer: PeerId, stage: int) -> HopClaim:
        """The answer of `peer`, whose weights are here, to the next microbatch. Raises TimeoutError."""
        loop = asyncio.get_running_loop()
        self._turns[stage] = peer, EXAMINED, loop.time()
        self._copied_s[peer] = loop.time()
        answered: asyncio.Future[HopClaim] = loop.create_future()
        self._answers[peer] = answered
        async with asyncio.timeout(ASKED_S):
            return await answered

    def take(self, claim: HopClaim) -> bool:
        """Whether `claim` is an answer that was waited for; who waits gets it."""
        answered = self._answers.get(claim.server)
        if answered is None or answered.done():
            return False
        answered.set_result(claim)
        return True

    def lately(self, peer: PeerId, now_s: float) -> bool:
        """Whether the weights of `peer` came a moment ago."""
        return now_s < self._copied_s.get(peer, -math.inf) + EXAMINED_S

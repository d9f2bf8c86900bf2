"""Who is left of each stage: replicas that went silent are asked whether they live, and the dead are buried before
their records run out, so that routers, joiners and rebalancing see the gap at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence

from swarmnode.ids import PeerId
from swarmnode.manifest import Manifest
from swarmnode.node.presence import Presence
from swarmnode.pipeline.feeder import Feeder
from swarmnode.ports import Clock, Telemetry
from swarmnode.recovery.ladder import overdue, quiet

LOOK_SHARE = 0.5  # guess: of the announce period, between two looks
SMALL = 64  # guess: in larger swarms only whole stages are watched; one node more or less matters little there
SETTLED = 16  # guess: microbatches of a stage that is back, over which the loss is taken


class RollCall:
    """Watches every stage for one node, and says when one is lost and when it is back."""

    def __init__(
        self,
        manifest: Manifest,
        presence: Presence,
        answering: Callable[[Sequence[PeerId]], Awaitable[frozenset[PeerId]]],
        clock: Clock,
        telemetry: Telemetry,
        feeder: Callable[[], Feeder | None],
    ) -> None:
        """`answering` pings peers and returns those that live; `feeder` knows the loss, where this node feeds."""
        self._limits = manifest.limits
        self._stages = manifest.pipeline.stages
        self._presence = presence
        self._answering = answering
        self._clock = clock
        self._telemetry = telemetry
        self._feeder = feeder
        self._lost: dict[int, tuple[float, float | None]] = {}  # stage -> (since, loss then)
        self._returned: dict[int, tuple[float, int]] = {}  # stage -> (loss before, microbatches done when it was back)

    def lost(self) -> tuple[int, ...]:
        """Stages that have no replica alive, as far as known here, ascending."""
        return tuple(sorted(self._lost))

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SHARE * self._limits.announce_period_s)
            for stage in range(self._stages):
                members = self._presence.book.present(stage)
                if stage in self._lost or overdue(members, self._clock.unix_s(), self._limits):
                    await self._look(stage)
                if self._returned:
                    self._compare(stage)
            await self._call()

    async def _call(self) -> None:
        """Of a small swarm, those that went silent while others of their stage are heard of."""
        presence = self._presence
        if presence.book.size > SMALL:
            return
        if stages := self._quiet(range(self._stages)):
            await presence.look(stages)  # records of stages that we have little to do with come late
            asked = [peer for peers in self._quiet(stages).values() for peer in peers]
            answering = await self._answering(asked)
            if dead := [peer for peer in asked if peer not in answering]:
                presence.bury(dead)

    def _quiet(self, stages: Iterable[int]) -> dict[int, list[PeerId]]:
        """Replicas that went silent, by stage; this node is not among them. Not where all have: that is `_look`'s."""
        swarm, now_unix_s, me = self._presence.book.swarm(), self._clock.unix_s(), self._presence.me
        found = {}
        for stage in stages:
            serving = swarm.serving(stage)
            peers = quiet(serving, now_unix_s, self._limits)
            if len(peers) < len(serving) and (others := [peer for peer in peers if peer != me]):
                found[stage] = others
        return found

    async def _look(self, stage: int) -> None:
        """Whether `stage` is lost, or back."""
        presence, loop = self._presence, asyncio.get_running_loop()
        swarm = presence.book.swarm()
        feeder = self._feeder()
        if stage in self._lost:
            if swarm.serving(stage):
                since, loss = self._lost.pop(stage)
                self._telemetry.event("stage.back", of_stage=stage, seconds=round(loop.time() - since, 3))
                if feeder is not None and loss is not None:
                    self._returned[stage] = (loss, feeder.done)
            return
        await presence.look([stage])  # others' records come by calls only while we have to do with them
        members = presence.book.swarm().serving(stage)
        if not overdue(members, self._clock.unix_s(), self._limits):
            return
        if await self._answering([member.peer for member in members]):
            return
        presence.bury([member.peer for member in members])
        loss = feeder.loss.value if feeder is not None and feeder.loss.known else None
        self._lost[stage] = (loop.time(), loss)
        self._telemetry.event(
            "stage.lost", level="warning", of_stage=stage, replicas=len(members), loss=loss, reason="none answers"
        )

    def _compare(self, stage: int) -> None:
        """Once SETTLED microbatches have come through: the loss before and after."""
        feeder = self._feeder()
        if feeder is None or stage not in self._returned:
            return
        before, first = self._returned[stage]
        if feeder.done >= first + SETTLED:
            del self._returned[stage]
            losses = list(feeder.losses)[-(feeder.done - first) :]
            after = math.fsum(losses) / len(losses)
            self._telemetry.event("recovery.loss", of_stage=stage, loss_before=before, loss_after=after)

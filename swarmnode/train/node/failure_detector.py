"""Finds dead replicas. Silent replicas are pinged, and those that do not answer are marked dead before their records
expire, so that routers, joiners and rebalancing see the gap at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from swarmnode.base.ids import PeerId
from swarmnode.base.ports import Clock, Telemetry
from swarmnode.keep.recovery.recovery_source import overdue, quiet
from swarmnode.net.membership.liveness import LOOK_SHARE, PINGED_MAX, Pinger
from swarmnode.run.manifest import Manifest
from swarmnode.train.node.presence import Presence


class FailureDetector:
    """Watches all stages for one node, and reports when a stage is lost and when it is back."""

    def __init__(
        self, manifest: Manifest, presence: Presence, pinger: Pinger, clock: Clock, telemetry: Telemetry
    ) -> None:
        self._limits = manifest.limits
        self._stages = manifest.pipeline.stages
        self._presence = presence
        self._pinger = pinger
        self._clock = clock
        self._telemetry = telemetry
        self._lost: dict[int, float] = {}  # stage -> loop time since when

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SHARE * self._limits.announce_period_s)
            for stage in range(self._stages):
                members = self._presence.peer_table.present(stage)
                if stage in self._lost or overdue(members, self._clock.unix_s(), self._limits):
                    await self._look(stage)
            await self._call()

    async def _call(self) -> None:
        """In a small swarm: ping replicas that went silent while others of their stage did not."""
        presence = self._presence
        if presence.peer_table.size > PINGED_MAX:
            return
        if quiet_stages := self._quiet(range(self._stages)):
            await presence.look(quiet_stages)  # records of stages that we have little to do with come late
            targets = [peer for peers in self._quiet(quiet_stages).values() for peer in peers]
            answering = await self._pinger.answering(targets)
            if dead := [peer for peer in targets if peer not in answering]:
                presence.mark_dead(dead)

    def _quiet(self, stages: Iterable[int]) -> dict[int, list[PeerId]]:
        """Members that went silent, by stage; this node is not among them. No stage of which all have: that is
        `_look`'s."""
        swarm = self._presence.peer_table.swarm()
        now_unix_s = self._clock.unix_s()
        me = self._presence.me
        quiet_of = {}
        for stage in stages:
            serving = swarm.serving(stage)
            peers = quiet(serving, now_unix_s, self._limits)
            if len(peers) == len(serving):
                continue
            if others := [peer for peer in peers if peer != me]:
                quiet_of[stage] = others
        return quiet_of

    async def _look(self, stage: int) -> None:
        """Find out whether `stage` is lost, or back."""
        presence = self._presence
        loop = asyncio.get_running_loop()
        swarm = presence.peer_table.swarm()
        if stage in self._lost:
            if swarm.serving(stage):
                seconds = loop.time() - self._lost.pop(stage)
                self._telemetry.event("stage.back", of_stage=stage, seconds=round(seconds, 3))
            return
        await presence.look([stage])  # others' records come by calls only while we have to do with them
        members = presence.peer_table.swarm().serving(stage)
        if not overdue(members, self._clock.unix_s(), self._limits):
            return
        if await self._pinger.answering([member.peer for member in members]):
            return
        presence.mark_dead([member.peer for member in members])
        self._lost[stage] = loop.time()
        self._telemetry.event(
            "stage.lost", level="warning", of_stage=stage, replicas=len(members), reason="none answers"
        )

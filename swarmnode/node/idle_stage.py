"""Stages whose replicas announce themselves and do nothing.

Records cost nothing, and neither do answers to pings. A few keys at a stage with no replica that works would make it
look full: newcomers choose another one, nobody moves there, and no microbatch finds a way through, for as long as the
keys announce themselves. The neighbours see it: those before the stage by refusals, those behind it as nothing comes
any more. To them such a stage is empty, and one of their own stage's replicas goes there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnode.manifest import Manifest
from swarmnode.membership.swarm import COMING, SERVING
from swarmnode.node.presence import Presence
from swarmnode.pipeline.rebalance import StageMove

PATIENCE = 2.0  # guess: a microbatch taken within the first `microbatch_timeout_s` is answered within the second
# Guess: a stage refuses as well because it finds no one behind it, so the last stage is suspected first. At most:
LATER_MAX = 4.0


class IdleStages:
    """The idle stages as one node of a stage sees them."""

    def __init__(self, manifest: Manifest, presence: Presence, work_here: Callable[[], float]) -> None:
        """`work_here` grows with each microbatch that comes to this node."""
        self._patience_s = PATIENCE * manifest.limits.microbatch_timeout_s
        self._stages = manifest.pipeline.stages
        self._presence = presence
        self._work_here = work_here
        self._seen = 0.0, asyncio.get_running_loop().time()  # work done here, and the loop time of its last change

    def __contains__(self, stage: int) -> bool:
        """Whether nobody works at `stage`, and no node that was seen at work is on its way there."""
        presence, own = self._presence, self._presence.status.stage
        unfed = own is not None and stage == own - 1 and self._unfed(stage)
        idle = stage != own and (unfed or presence.idle(stage, self._patience(stage)))
        return idle and not self._someone_comes(stage)

    def move(self) -> tuple[StageMove, str] | None:
        """(the move of this node to an idle stage, the reason), or None if there is none that it could serve, or if no
        other replica of its own stage stays."""
        presence, own = self._presence, self._presence.status.stage
        if own is None or own >= self._stages:
            return None
        target = next((stage for stage in range(self._stages) if stage in self), None)
        if target is None or target in presence.status.unable:
            return None
        swarm = presence.peer_table.swarm()
        if not swarm.stages[target] or len(swarm.settled(own)) < 2:
            return None
        speed = presence.status.samples_per_second
        reason = f"nobody works at stage {target}, though {swarm.sizes[target]} replicas announce themselves"
        return StageMove(presence.me, own, target, 0.0, speed, speed), reason

    def _unfed(self, stage: int) -> bool:
        """Whether no microbatch has come for long from `stage`, the one before. Behind the second stage one must have
        come earlier: else a stage in front of `stage` may be the idle one."""
        work, now = self._work_here(), asyncio.get_running_loop().time()
        if work != self._seen[0] or self._presence.status.state != SERVING:
            self._seen = work, now  # nothing comes while this node pauses
        return (stage == 0 or work > 0.0) and now - self._seen[1] >= self._patience(stage)

    def _patience(self, stage: int) -> float:
        """Seconds until `stage` is taken to be idle."""
        return self._patience_s * min(LATER_MAX, float(self._stages - stage))

    def _someone_comes(self, stage: int) -> bool:
        """Whether a machine that was seen at work has said that it goes to `stage`, or is there."""
        presence = self._presence
        swarm, seen = presence.peer_table.swarm(), presence.run_progress.clock.observed.times
        return any(
            member.peer in seen and (member.moving_to == stage or (member.stage == stage and member.state in COMING))
            for member in swarm.members()
        )

"""Watches for one machine whether the block of stages that it serves should be another one.

Petals' servers moved all the time where each looked for itself and found the same need
(github.com/bigscience-workshop/petals/issues/389). Here a block moves when the slowest stage gains by the manifest's
ratio, the need is still there after a wait of random length, and the machine's own announcement is out by then: those
that wait longer count it where it goes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from swarmnode.base.ids import part_of
from swarmnode.base.wire import record_pb2
from swarmnode.model.split import costs
from swarmnode.train.node.node_ports import NodeContext
from swarmnode.train.node.stage_change import StageTransfer
from swarmnode.train.pipeline.rebalance import RebalanceRules, staying
from swarmnode.train.pipeline.span import move_block

EMPTY_PERIODS = 6  # guess: announce periods in which a machine of one stage would have gone to an empty one


class BlockRebalancer:
    """For the node of a machine's own stage; its parts go with it. `speed`: samples/s of this machine's block."""

    def __init__(self, context: NodeContext, rng: random.Random, speed: Callable[[], float]) -> None:
        pipeline = context.manifest.pipeline
        self._context = context
        self._presence = context.presence
        self._rng = rng
        self._speed = speed
        self._costs = costs(context.manifest)
        self._rules = RebalanceRules(pipeline.rebalance_ratio, pipeline.min_keep)
        self._period_s = pipeline.rebalance_period_s

    async def run(self) -> StageTransfer:
        """Wait until this machine should serve another block. For ever, for a part and where nobody moves."""
        if self._period_s <= 0.0 or self._context.block is None or part_of(self._context.me) is not None:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(self._wait_s())
            if self._look()[0] is None:
                continue
            await asyncio.sleep(self._wait_s() * self._rng.random())
            await self._presence.look(range(len(self._costs)))
            block, reason = self._look()
            if block is None:
                continue
            self._presence.own.going_to(block.start)
            await self._presence.announce()
            self._context.telemetry.event(
                "stage.moving", source=self._presence.status.stage, target=block.start, reason=reason
            )
            return StageTransfer(block.start, reason, 0.0, None)

    def _wait_s(self) -> float:
        """About a period; some announcements while a stage stands empty."""
        whole = all(self._presence.peer_table.swarm().coming(stage) for stage in range(len(self._costs)))
        soon_s = EMPTY_PERIODS * self._context.manifest.limits.announce_period_s
        return (self._period_s if whole else min(soon_s, self._period_s)) * (0.9 + 0.2 * self._rng.random())

    def _look(self) -> tuple[range | None, str]:
        presence = self._presence
        block = self._context.block
        if presence.status.state != record_pb2.NODE_STATE_TRAINING or block is None:
            return None, "not training"
        swarm = staying(presence.peer_table.swarm(), self._context.ports.clock.unix_s())
        choices = dict.fromkeys(
            block(stage) for stage in range(len(self._costs)) if stage not in presence.status.unable
        )
        return move_block(swarm, self._costs, self._rules, presence.status.span, self._speed(), choices)

"""The stage on this machine's disk: written again and again, and before the node leaves."""

from __future__ import annotations

import asyncio

from swarmnode.base.errors import LocalFault
from swarmnode.base.ids import seeded
from swarmnode.base.ports import Priority
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.renewal import RenewalTimer
from swarmnode.train.node.replica_donor import Trained
from swarmnode.train.node.stage_parts import StageParts

SAVE_BYTES_PER_S = 1e6  # derived: a disk that bears 300 TB lasts for ten years


class StageSaver:
    """Saves one served replica."""

    def __init__(self, parts: StageParts, trained: Trained) -> None:
        """`trained`: the run's progress that the replica has learned."""
        self._parts = parts
        self._context = parts.context
        self._trained = trained
        self._disk = asyncio.Lock()  # one writes the stage's state at a time

    async def save(self) -> None:
        """Write the stage to this machine's disk before its node leaves: its whole state and, for `swarmnode export`,
        its running mean. Raises LocalFault."""
        await self._write("info", left=True)

    async def run(self) -> None:
        """Save the stage again and again, about `min_keep` of its replicas each time: where all are killed at once, the
        run would begin anew, or from an archive. A disk that is full keeps no replica from training."""
        context = self._context
        presence = context.presence
        now_s = asyncio.get_running_loop().time
        spec = context.manifest.recovery
        period_s = context.manifest.limits.announce_period_s
        savers = context.manifest.pipeline.min_keep  # as one that is lost, one of them may not come back
        chance = seeded(
            context.manifest.seed, "saving", context.me, presence.own.incarnation, self._parts.served_before
        )
        timer = RenewalTimer(spec)
        while True:
            await asyncio.sleep(period_s * (0.5 + chance.random()))  # not all at once
            total = presence.samples_total()
            begun_s = now_s()
            if presence.status.state != record_pb2.NODE_STATE_TRAINING or not timer.due(begun_s, total)[0]:
                continue
            replicas = len(presence.peer_table.swarm().serving(self._parts.here.stage))
            nbytes = 0
            if chance.random() * replicas < savers:
                try:
                    nbytes = await self._write()
                except LocalFault as fault:
                    context.telemetry.event("state.unsaved", level="warning", reason=str(fault))
            least_s = max(nbytes / SAVE_BYTES_PER_S, (now_s() - begun_s) / spec.snapshot_share)
            timer.made(now_s(), total, least_s)

    async def _write(self, level: str = "debug", *, left: bool = False) -> int:
        """Write the stage's whole state to this machine's disk. Returns its bytes. Raises LocalFault."""
        context = self._context
        gossip = self._parts.gossip
        stage = self._parts.here.stage
        replica = self._parts.here.replica
        total = context.presence.samples_total
        async with self._disk:
            while True:
                done = gossip.done
                progress = self._trained()
                line = gossip.line
                state = await context.ports.compute.run(Priority.OUTER, 0, replica.snapshot_in_parts)
                mean = await context.ports.mean(replica) if left else None
                if (gossip.done, gossip.line) == (done, line):  # else an outer step came in between
                    break
            await context.restorer.saved.save(
                state,
                context.ports.saving.shapes(context.manifest, stage),
                stage=stage,
                round_index=done,
                peer=context.me,
                progress=progress,
                blocks=self._parts.finished_blocks(),
                line=line,
                left=left,
                mean=mean,
            )
        context.telemetry.event("state.saved", level=level, round=done, samples_total=total())
        return sum(section.nbytes for section in state.sections.values())

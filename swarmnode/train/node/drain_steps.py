"""The steps by which a node hands on everything it holds of a stage before it leaves (drain.py runs them)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from swarmnode.base.concurrency import gather_or_cancel
from swarmnode.base.errors import SwarmnodeError, Unavailable
from swarmnode.base.ids import PeerId, seeded, short, stage_name
from swarmnode.base.ports import Call
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.transfer.donor import StageDonor
from swarmnode.keep.transfer.snapshot import DOWNLOAD_RATE
from swarmnode.model.section import PACKED_ITEMSIZE, snapshot_nbytes
from swarmnode.net.membership.swarm import StageContext, Swarm
from swarmnode.train.gossip.exchange import Gossip
from swarmnode.train.gossip.final_delta import send_final_delta
from swarmnode.train.node.drain import DrainReport, DrainStep, DrainTask
from swarmnode.train.node.notice import NoticeKind
from swarmnode.train.pipeline.backlog import Backlog
from swarmnode.train.pipeline.feeder import Feeder

MARGIN = 2.0  # guess: held work, or an exchange, may take twice as long as usually
EXCHANGE_S = 1.0  # guess: at least, with its turn on a busy device; an exchange of a round itself may take 0.1 s
TURN_MAX_S = 10.0  # guess: saving waits so long at most for a microbatch that the device is at
SAVED_BYTES = 4  # of an element of the state, at most
SAVE_BYTES_PER_S = 1e8  # guess: less than an EBS gp3 disk (125 MiB/s): reckoned with too little, a stage is lost
GOODBYE_TIMES = 10.0  # guess: an archive that keeps a leaver waiting for so many times what its copy takes is given up
HANDOVER_MAX_S = 3600.0  # the longest that a call may have (header.py): the notice's own time is shorter


class HeldWork:
    """Counts, stops and finishes the microbatches of one stage."""

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._feeder: Feeder | None = None
        self._refusing: str | None = None

    def feed_by(self, feeder: Feeder) -> None:
        """Include the microbatches of `feeder` from now on."""
        self._feeder = feeder
        if self._refusing is not None:
            feeder.hold(True)

    @property
    def seconds(self) -> float:
        """Smoothed seconds that a microbatch takes from here, there and back."""
        return self._backlog.seconds

    @property
    def held(self) -> int:
        """Microbatches in work here."""
        return len(self._backlog) + (self._feeder.under_way if self._feeder is not None else 0)

    @property
    def finished(self) -> int:
        """Microbatches that came to their end here, ever."""
        return self._backlog.finished + (self._feeder.done if self._feeder is not None else 0)

    def refuse(self, reason: str) -> None:
        """Begin nothing new, for good."""
        self._refuse(reason)
        if self._feeder is not None:
            self._feeder.stop()

    def _refuse(self, reason: str | None) -> None:
        self._refusing = reason
        self._backlog.refuse(reason)

    def hold(self, reason: str | None) -> None:
        """Begin nothing new for `reason`; None: begin again."""
        self._refuse(reason)
        if self._feeder is not None:
            self._feeder.hold(reason is not None)

    def leave(self, report: DrainReport) -> DrainTask:
        """Begin nothing new; the step of leaving that finishes what is held, which `report` counts."""
        self.refuse("this node is leaving")
        report.expect(held=self.held)
        before = self.finished
        stopping = report.notice.kind is NoticeKind.STOP

        def count() -> str:
            return report.count_finished(self.finished - before)

        async def finish() -> None:
            # Where all leave at once, a microbatch that takes longer than usual waits for a stage that has left.
            try:
                async with asyncio.timeout(max(EXCHANGE_S, MARGIN * self.seconds) if stopping else None):
                    await self.finish()
            finally:
                count()

        return DrainTask(DrainStep.FINISH, MARGIN * self.seconds if report.held else 0.0, finish, count)

    async def finish(self) -> None:
        """After `refuse`: wait until nothing is held any more."""
        if self._feeder is not None:
            await self._feeder.drain()
        await self.emptied()

    async def emptied(self) -> None:
        """After `hold`: wait until nothing is held any more."""
        await self._backlog.empty()
        if self._feeder is not None:
            await self._feeder.idle.wait()


def mates(swarm: Swarm, stage: int, me: PeerId) -> list[PeerId]:
    """Replicas of `stage` that stay and can take the last local update of this one."""
    return [member.peer for member in swarm.serving(stage) if member.peer != me]


def successors(swarm: Swarm, stage: int, me: PeerId) -> tuple[list[PeerId], str]:
    """(nodes that may keep the state of `stage` for its next replica, best first; the reason). Empty when another
    replica stays.

    These are nodes of the stage before: there the next replica looks for it (keep/recovery/recovery_source.py). The
    least loaded ones come first.
    """
    if mates(swarm, stage, me):
        return [], "other replicas of the stage stay"
    before = (stage - 1) % len(swarm.stages)
    members = sorted(swarm.serving(before), key=lambda member: (member.queue, member.peer))
    able = [member.peer for member in members if member.peer != me]
    reason = f"this is the last replica of {stage_name(stage)}; {len(able)} nodes of {stage_name(before)} may keep it"
    return able, reason


@dataclass(eq=False)
class StageDrain:
    """The drain steps of one served stage. They fill in `report` as they go. `save` writes the stage to this machine's
    disk. `archives`: meeting points and others that may archive the run for its owner."""

    here: StageContext
    gossip: Gossip
    donor: StageDonor
    work: HeldWork
    save: Callable[[], Awaitable[None]]
    report: DrainReport
    archives: Sequence[PeerId] = ()

    def __post_init__(self) -> None:
        self._rng = seeded(self.here.manifest.seed, "leaving", self.here.me, self.gossip.done)

    def steps(self) -> list[DrainTask]:
        """Refuse new work, and return what is to be done, in order."""
        report = self.report
        gossip = self.gossip
        finish = self.work.leave(report)
        report.expect(unsent=gossip.unsent)
        exchange_s = max(EXCHANGE_S, MARGIN * gossip.pace.exchange_s) if report.unsent or report.held else 0.0
        steps = [
            finish,
            DrainTask(
                DrainStep.EXCHANGE, exchange_s, self._exchange, lambda: f"{report.unsent - report.sent} samples learnt"
            ),
        ]
        if not self._stopping and successors(self.here.swarm(), self.here.stage, self.here.me)[0]:
            due_s = snapshot_nbytes(self.here.replica.sizes_of(self.here.stage)) / DOWNLOAD_RATE
            undone = f"the state of {stage_name(self.here.stage)}"
            steps.append(DrainTask(DrainStep.HANDOVER, due_s, self._hand_over, lambda: undone))
        if self.archives and not self._stopping:
            undone = f"the run's last model of {stage_name(self.here.stage)}"
            steps.append(DrainTask(DrainStep.ARCHIVE, self._archive_s, self._give_archives, lambda: undone))
        save_s = min(self.work.seconds, TURN_MAX_S) if report.held else 0.0
        save_s += sum(self.here.replica.sizes_of(self.here.stage).values()) * SAVED_BYTES / SAVE_BYTES_PER_S
        return [*steps, DrainTask(DrainStep.SAVE, save_s, self.save, lambda: "the stage on disk")]

    @property
    def _stopping(self) -> bool:
        """True if the whole run stops: then no node needs this node's update or state."""
        return self.report.notice.kind is NoticeKind.STOP

    async def _exchange(self) -> None:
        """Give the update since the last round to another replica of the stage."""
        await self.gossip.rest()
        self.report.expect(unsent=self.gossip.unsent)
        staying = mates(self.here.swarm(), self.here.stage, self.here.me)
        if self._stopping or not self.report.unsent or not staying:
            return
        here = self.here
        gossip = self.gossip
        parting = gossip.parting
        met = gossip.acceptance.packets_taken
        limit_s = here.manifest.limits.exchange_timeout_s
        told = here.telemetry
        await send_final_delta(here.transport, here.run_id, staying, parting, told, self._rng, limit_s, met)
        self.report.all_sent()

    @property
    def _archive_s(self) -> float:
        sizes = self.here.replica.sizes_of(self.here.stage)
        return EXCHANGE_S + PACKED_ITEMSIZE["phi"] * sizes["phi"] / DOWNLOAD_RATE

    async def _give_archives(self) -> None:
        """Let the run's archives copy the slow weights of the last replica. Meeting points that keep no archive refuse,
        which costs nothing."""
        if mates(self.here.swarm(), self.here.stage, self.here.me):  # of several that leave at once the last ones give
            return
        self.donor.close()  # its snapshots may be of an earlier round

        stage = self.here.stage

        async def give(archive: PeerId) -> None:
            try:
                await self._ask_keeper(archive, GOODBYE_TIMES * self._archive_s)
            except SwarmnodeError as error:
                self.here.telemetry.event("handover.refused", peer=archive, stage=stage, reason=str(error))
            else:
                self.here.telemetry.event("handover.done", peer=archive, stage=stage, reason="the run's archive")

        await gather_or_cancel([partial(give, archive) for archive in self.archives])

    async def _ask_keeper(self, peer: PeerId, limit_s: float) -> None:
        """Have `peer` copy this stage; it answers when it has the copy."""
        request = wire.Request(run_id=self.here.run_id, handover=wire.Handover(stage=self.here.stage))
        await self.here.transport.call(peer, Call(request), timeout_s=limit_s, reply_bytes_max=0)

    async def _hand_over(self) -> None:
        """Give the state of the last replica to a node of the stage before. Raises Unavailable when none takes it."""
        self.donor.close()  # its snapshots were copied before the last inner step
        if mates(self.here.swarm(), self.here.stage, self.here.me):  # a replica came after this step was planned
            if self.report.sent < self.report.unsent:
                await self._exchange()
            return
        able, reason = successors(self.here.swarm(), self.here.stage, self.here.me)
        for successor in able:
            try:
                await self._ask_keeper(successor, HANDOVER_MAX_S)
            except SwarmnodeError as error:
                reason = f"{short(successor)}: {error}"
                continue
            self.report.all_sent(successor)
            self.here.telemetry.event("handover.done", peer=successor, stage=self.here.stage, reason=reason)
            return
        raise Unavailable(reason)

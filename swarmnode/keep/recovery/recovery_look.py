"""Look at the swarm for a node that needs the state of a stage: the sources, and what else the choice needs.

The choice is recovery_source.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from swarmnode.base.errors import DataError, LocalFault, Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.keep.recovery.neighbour_backup import to_keep
from swarmnode.keep.recovery.recovery_source import (
    CLAIM_WAIT_S,
    RecoveryClaims,
    RecoverySource,
    RecoveryView,
    SourceFailures,
    StateSource,
    donors_of,
    latest,
    silent,
    sleeper_text,
)
from swarmnode.keep.recovery.restore_context import RestoreContext, RestoreRequest
from swarmnode.keep.recovery.resumption import Resumption, newest_of
from swarmnode.keep.transfer.snapshot import WHOLE
from swarmnode.model.section import snapshot_nbytes
from swarmnode.net.membership.liveness import LOOK_SHARE, SAMPLE
from swarmnode.net.membership.swarm import PAUSED, Member, Swarm
from swarmnode.run.manifest import from_base

SAMPLE_UNBEGUN = 1  # of each stage, before the run has trained: no replica has a state to give


class RecoveryLook:
    """The looks for the state of `request`. What failed (`failures`) is left out of the next view."""

    def __init__(self, here: RestoreContext, request: RestoreRequest, failures: SourceFailures) -> None:
        self._here = here
        self.request = request
        self._replica = request.replica
        self._stage = request.stage
        self._failures = failures
        self._membership = here.membership
        self._size = here.manifest.gossip.round_samples
        self._time = asyncio.get_running_loop().time
        nbytes = snapshot_nbytes(request.replica.sizes_of(request.stage))
        self._claims = RecoveryClaims(here.manifest.limits, nbytes)
        self._disk: Resumption | None = None
        self._disk_searched = False
        self._returning: bool | None = None  # as seen at the first look
        self._claimed = 0  # the most samples that anybody claimed since the first look

    async def look(self, waited_s: float) -> RecoveryView:
        """Read the directory, ping the stage and its neighbours, and gather what the choice needs."""
        here = self._here
        stage = self._stage
        stages = here.manifest.pipeline.stages
        near = [(stage + step) % stages for step in (0, -1, 1)]
        swarm = self.swarm()  # all stages were looked up when this one was chosen
        await self._membership.look([at for at in range(stages) if at in near or not (waited_s or swarm.stages[at])])
        alive = await self._ping_near(near)
        swarm = self.swarm()  # answers carry records
        supposed = self._membership.run_progress.suppose(alive)
        total = supposed.middle
        if self._returning is None:
            self._returning = not all(swarm.serving(at) for at in range(stages) if at != stage)
        unanswered = await self._hear_claims(total, waited_s)
        donors = [peer for peer in donors_of(swarm, stage, self._membership.me) if peer in alive]
        paused = self._resting(swarm, alive)
        replicas = [StateSource(RecoverySource.REPLICA, float(total // self._size), peer) for peer in donors]
        disk = await self._on_disk() if total and not donors else []
        return RecoveryView(
            stage,
            stages,
            total,
            total // self._size,
            claimed=self._claimed,
            little=self._claimed < self._size,
            unanswered=unanswered,
            samples_least=supposed.least,
            sources=(*replicas, *self._kept(swarm, alive, paused), *disk, *self._named()),
            unsure=silent(swarm.stages[stage], alive, here.clock.unix_s(), here.manifest.limits),
            builder=self._claims.builder(swarm.stages[stage], alive, self._membership.me, self._time()),
            settled=waited_s >= LOOK_SHARE * here.manifest.limits.announce_period_s,
            asleep=next((sleeper_text(member) for member in paused if member.state == PAUSED), ""),
            ends=self._ends(swarm, alive, paused),
            below=stage > 0 and any(m.peer in alive for m in swarm.serving(stage - 1)),
            above=stage < stages - 1 and any(m.peer in alive for m in swarm.serving(stage + 1)),
            returning=self._returning and stages > 1,
            has_base=from_base(here.manifest),
            failed=frozenset(self._failures.kinds),
            waited_s=waited_s,
        )

    def swarm(self) -> Swarm:
        """The swarm as known now; of the stage itself only this node and those that are believed."""
        swarm = self._membership.peer_table.swarm()
        if self.request.believed is None:
            return swarm
        seen = {self._membership.me, *self.request.believed}
        stages = list(swarm.stages)
        stages[self._stage] = tuple([member for member in stages[self._stage] if member.peer in seen])
        return Swarm.frozen(stages)

    async def _hear_claims(self, total: int, waited_s: float) -> bool:
        """Note the most samples that anybody claims: a node that claimed them may leave before the next look, and to
        begin anew meanwhile would split the run. Returns whether nobody answered."""
        claimed = total
        unanswered = False
        if not total and waited_s <= CLAIM_WAIT_S:
            try:
                claimed = await self._membership.claimed()
            except Unavailable:
                unanswered = True
        self._claimed = max(self._claimed, claimed)
        return unanswered

    def _named(self) -> list[StateSource]:
        """States that are there whoever answers: this replica's own, those that this node was told of, and what members
        saved before the stages were cut anew."""
        here = self._here
        sources = list[StateSource]()
        if (own := self.request.own) is not None:
            sources.append(StateSource(RecoverySource.OWN, own.samples / self._size, own))
        if here.earlier is not None:
            sources.append(StateSource(RecoverySource.PIECES, here.earlier.until))
        if (resume := here.checkpoints.resume) is not None:
            sources.append(StateSource(RecoverySource.CHECKPOINT, resume.rounds(here.manifest), resume))
        sources.extend(StateSource(RecoverySource.ARCHIVE, 0.0, peer) for peer in here.checkpoints.archives)
        return sources

    def _kept(self, swarm: Swarm, alive: Collection[PeerId], paused: list[Member]) -> list[StateSource]:
        """Copies of the stage's state that nodes which answer keep or hold while they rest, the latest first."""
        recovery = self._here.manifest.recovery
        ends = self._replica.ends_of(self._stage)
        cut, _ = to_keep(recovery.snapshot_bytes_max, self._replica.sizes_of(self._stage), ends)
        kept = self._latest(paused, self._ring(swarm, alive) if cut == WHOLE else [])
        return [
            StateSource(RecoverySource.RING, at, peer) for at, peer in kept if (at, peer) not in self._failures.copies
        ]

    def _ends(self, swarm: Swarm, alive: Collection[PeerId], paused: list[Member]) -> tuple[PeerId, ...] | None:
        """Nodes that keep the stage's embedding or head, the latest copy first. None: it has neither."""
        if not self._replica.ends_of(self._stage)[1]:
            return None
        return tuple([peer for _, peer in self._latest(paused, self._ring(swarm, alive))])

    def _latest(self, paused: list[Member], ring: list[tuple[float, PeerId]]) -> list[tuple[float, PeerId]]:
        # Since its last round a replica has learned more than any snapshot of that round has.
        resting = [(float(m.round_index + m.round_stride), m.peer) for m in paused]
        return latest([*resting, *ring], self._membership.run_progress.rounds_max)

    def _ring(self, swarm: Swarm, alive: Collection[PeerId]) -> list[tuple[float, PeerId]]:
        """(round, keeper) of the copies at nodes of the stage before; paused ones give what they keep, too."""
        before = swarm.stages[(self._stage - 1) % self._here.manifest.pipeline.stages]
        ring = [(m.kept_samples / self._size, m.peer) for m in before if m.kept_round is not None and m.peer in alive]
        if self.request.backup is not None:
            ring.append((self.request.backup.samples / self._size, self._membership.me))
        return ring

    def _resting(self, swarm: Swarm, alive: Collection[PeerId]) -> list[Member]:
        """Replicas of the stage that take no work, have its state, and answer. Where this node has seen some of them at
        work, only those: a record costs nothing."""
        answering = [m for m in swarm.resting(self._stage) if m.peer in alive and m.peer != self._membership.me]
        seen = self._membership.run_progress.clock.history.times
        return [member for member in answering if member.peer in seen] or answering

    async def _ping_near(self, near: list[int]) -> frozenset[PeerId]:
        """Members of the stages `near` that are alive. Before the run has trained, one of each stage is enough."""
        run_progress = self._membership.run_progress
        pinger = self._here.pinger
        begun = run_progress.suppose(()).middle > 0
        alive = await pinger.answering_in(self.swarm(), near, SAMPLE if begun else SAMPLE_UNBEGUN)
        if not begun and run_progress.suppose(alive).middle > 0:
            alive = await pinger.answering_in(self.swarm(), near, SAMPLE)
        return alive

    async def _on_disk(self) -> list[StateSource]:
        """The newest state of this stage on this node's disk: saved in its home, or of a whole checkpoint of this run.
        Checkpoints are searched once."""
        here = self._here
        if here.checkpoints.store is not None and not self._disk_searched:
            self._disk_searched = True
            try:
                self._disk = await newest_of(here.checkpoints.store, here.run_id)
            except (DataError, LocalFault) as error:
                here.telemetry.event(
                    "recovery.source_failed", level="warning", method=RecoverySource.DISK, reason=str(error)
                )
        own = here.saved.newest(self._stage)
        if own is not None and (self._disk is None or self._disk.checkpoint.samples < own.checkpoint.samples):
            self._disk = own
        if self._disk is None:
            return []
        return [StateSource(RecoverySource.DISK, self._disk.checkpoint.samples / self._size, self._disk)]

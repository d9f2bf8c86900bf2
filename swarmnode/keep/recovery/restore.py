"""Restore the state of a stage in a replica: look at the swarm, choose a source, fetch from it, say what came.

recovery_look.py looks, recovery_source.py chooses, state_loader.py loads. A source that fails is left out of the next
choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, replace
from statistics import median_low

from swarmnode.base.errors import DataError, RemoteFault, SwarmnodeError, Unavailable
from swarmnode.base.ids import PeerId
from swarmnode.base.metrics import name
from swarmnode.base.ports import Replica
from swarmnode.keep.recovery.recovery_look import RecoveryLook
from swarmnode.keep.recovery.recovery_source import (
    AfterFailure,
    OwnState,
    RecoverySource,
    RecoveryView,
    SourceFailures,
    choose_source,
    donors_of,
)
from swarmnode.keep.recovery.restore_context import RestoreContext, RestoreRequest
from swarmnode.keep.recovery.state_loader import LoadedState, ServingDonor, StateLoader
from swarmnode.keep.transfer.snapshot import Snapshot
from swarmnode.net.membership.liveness import SOON_SHARE
from swarmnode.net.membership.state_line import UNBROKEN, StateLine
from swarmnode.net.membership.swarm import GOSSIPING

# During these a node elsewhere may have brought the stage back first.
CONTESTED = (
    RecoverySource.RING,
    RecoverySource.DISK,
    RecoverySource.PIECES,
    RecoverySource.ARCHIVE,
    RecoverySource.BASE,
    RecoverySource.CHECKFREE,
)


@dataclass(frozen=True, slots=True)
class RestoredState:
    """The source of a replica's restored state, and the round behind it."""

    source: RecoverySource
    reason: str
    round: int  # the last round behind the state
    newcomer: bool  # the first round is to be received at weight 0
    line: StateLine = UNBROKEN
    before: frozenset[PeerId] = frozenset()  # replicas that had served the stage and were silent then


@dataclass(frozen=True, slots=True)
class StateRestorer(RestoreContext):
    """Restores the state of any stage for one node, from whatever is left of it in the swarm."""

    async def restore(
        self,
        replica: Replica,
        stage: int,
        fetched: Snapshot | None = None,
        backup: Snapshot | None = None,
        round_min: int = 0,
        *,
        seen_only: bool = False,
        only: Collection[PeerId] = (),
        own: OwnState | None = None,
    ) -> RestoredState:
        """Load the state of `stage` into `replica`.

        `fetched` is a state that this node has already; it is used if the replica accepts it. `backup` is what
        this node kept of a stage while it served the one before. Living replicas are asked for a state of round
        `round_min` or later; with `seen_only`, only those that this node has seen at work; with `only`, only those.
        `own`: what `replica` has, which stays unless a newer state is found.
        Raises Unavailable when the state is nowhere to be had, LocalFault when the checkpoint that the whole run
        resumes from cannot be read, DataError when the base model does not fit the run.
        """
        await self.freeze(replica, stage)
        swarm = self.membership.peer_table.swarm()
        if not swarm.serving(stage) and swarm.resting(stage):
            fetched = None  # whoever gave it has paused since, and learned more until then
        if fetched is not None:
            try:
                await self.load(replica, fetched.state)
            except RemoteFault as fault:
                self.telemetry.event("state.failed", level="warning", stage=stage, lied=True, reason=str(fault))
                fetched = None  # as large as the replica itself
            else:
                self.merge(fetched.progress)
                return RestoredState(
                    RecoverySource.REPLICA, "fetched before", fetched.round_index, self.meets, fetched.line
                )
        seen = self.membership.run_progress.clock.history.times
        believed = seen if seen_only else only or None
        kept = backup if backup is not None and backup.stage == stage else None
        return await _Restoration(self, RestoreRequest(replica, stage, kept, round_min, believed, own)).run()


class _Restoration:
    """A single restore of one stage."""

    def __init__(self, restorer: StateRestorer, request: RestoreRequest) -> None:
        self._restorer = restorer
        self._stage = request.stage
        self._failures = SourceFailures()
        self._look = RecoveryLook(restorer, request, self._failures)
        self._manifest = restorer.manifest
        self._membership = restorer.membership
        self._telemetry = restorer.telemetry
        self._time = asyncio.get_running_loop().time
        self._waits_for = ""

    async def run(self) -> RestoredState:
        """Try one source after the other until the state is loaded. Raises Unavailable, LocalFault."""
        begun = self._time()
        while True:
            # Each try looks anew: replicas come back meanwhile, and any of them is better than any other source.
            view = await self._look.look(self._time() - begun)
            source, reason = choose_source(view, self._manifest.recovery)
            if source is RecoverySource.STOP or self._failures.over:
                self._telemetry.event("recovery.failed", level="error", reason=reason)
                raise Unavailable(f"{reason}; join again when one is back")
            if source is RecoverySource.WAIT:
                await self._wait(reason)
                continue
            # The first state of a run is no recovery, and a replica's copy is an ordinary join: neither is told as one.
            begins = source is RecoverySource.FRESH or (source is RecoverySource.BASE and not view.samples_total)
            if source not in (RecoverySource.REPLICA, RecoverySource.OWN) and not begins:
                method = self._method(source)
                self._telemetry.event("recovery.began", stage=self._stage, method=method, reason=reason)
            loader = StateLoader(self._restorer, self._look.request, view, self._look.swarm())
            try:
                loaded = await loader.load(source)
                if loaded.donor is not None:
                    restored = self._join_donor(loaded.donor, reason, view, loaded)
                else:
                    restored = self._bring_back(source, reason, view, loaded)
            except (Unavailable, RemoteFault, DataError) as error:
                await self._note_failure(source, error, view)
                continue
            # Two nodes may have rebuilt the stage at once; the later one takes the other's state, so it is one stage.
            if source in CONTESTED and not begins and await self._overtaken():
                continue
            if begins:  # nothing was lost: the stage starts here
                self._telemetry.event("state.fresh", reason=reason)
            elif source is not RecoverySource.OWN or restored.line.lost:
                self._say(restored, loaded.samples, loader.received, self._time() - begun)
            return restored

    async def _wait(self, reason: str) -> None:
        """Pause before the next look; each new reason is logged once."""
        if reason != self._waits_for:
            self._telemetry.event("recovery.waiting", stage=self._stage, reason=reason)
        self._waits_for = reason
        await asyncio.sleep(SOON_SHARE * self._manifest.limits.announce_period_s)

    async def _note_failure(self, source: RecoverySource, error: SwarmnodeError, view: RecoveryView) -> None:
        """Log that `source` failed, and leave it out of the next choice if it failed for good."""
        self._telemetry.event(
            "recovery.source_failed", level="warning", stage=self._stage, method=source, reason=str(error)
        )
        if source is RecoverySource.BASE and isinstance(error, DataError):
            raise error  # the base model is the same for everybody: another try would read the same fault
        match self._failures.record(source, view):
            case AfterFailure.LATER:
                await asyncio.sleep(self._manifest.limits.announce_period_s)
            case AfterFailure.OTHERS if self._look.request.believed is None:
                self._failures.tries = 0
                seen = self._membership.run_progress.clock.history.times
                self._look.request = replace(self._look.request, believed=seen)
            case _:
                pass

    async def _overtaken(self) -> bool:
        """Whether another node brought the stage back meanwhile: then its state counts, and this one is dropped."""
        await self._membership.look([self._stage])
        donors = donors_of(self._look.swarm(), self._stage, self._membership.me)
        return bool(await self._restorer.pinger.answering(donors))

    def _join_donor(self, donor: ServingDonor, reason: str, view: RecoveryView, loaded: LoadedState) -> RestoredState:
        """The place of a replica that has the state of `donor`, which serves."""
        # The median tolerates one liar about the run's count among the donor, the confirming peer and the pinged peers.
        middle = median_low([*donor.totals, view.samples_least])
        total = self._membership.run_progress.begin_at_most(middle)
        self._merge(loaded)
        done = min(donor.round, total // self._manifest.gossip.round_samples)
        return RestoredState(RecoverySource.REPLICA, reason, done, self._restorer.meets, loaded.line)

    def _bring_back(
        self, source: RecoverySource, reason: str, view: RecoveryView, loaded: LoadedState
    ) -> RestoredState:
        """The place of the first replica of a stage that nobody serves."""
        self._membership.run_progress.begin(view.samples_least)
        self._merge(loaded)
        total = self._membership.progress.total
        line = loaded.line.behind(loaded.samples, max(total, loaded.samples)) if view.samples_total else UNBROKEN
        done = total // self._manifest.gossip.round_samples
        return RestoredState(source, reason, done, newcomer=False, line=line, before=self._silent())

    def _merge(self, loaded: LoadedState) -> None:
        if loaded.told is not None:
            self._restorer.merge(loaded.told)

    def _silent(self) -> frozenset[PeerId]:
        """Replicas that served the stage, as far as this node knows, and are silent now."""
        return frozenset(m.peer for m in self._membership.peer_table.known(self._stage) if m.state in GOSSIPING)

    # ---- say

    def _method(self, source: RecoverySource) -> str:
        """The name of `source` in events; CheckFree's by how weights are combined."""
        return self._manifest.recovery.method if source is RecoverySource.CHECKFREE else str(source)

    def _say(self, restored: RestoredState, samples: int, nbytes: int, seconds: float) -> None:
        """Tell what was restored, with `samples` of the run behind it, from `nbytes`."""
        self._telemetry.count(name.RECOVERIES, method=str(restored.source))
        self._telemetry.event(
            "recovery.done",
            stage=self._stage,
            method=self._method(restored.source),
            seconds=round(seconds, 3),
            nbytes=nbytes,
            round=samples // self._manifest.gossip.round_samples,
            behind=max(0, self._membership.progress.total - samples),
            reason=restored.reason,
        )

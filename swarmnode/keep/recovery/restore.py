"""Restore the state of a stage in a replica: look at the swarm, choose a source, fetch from it, say what came.

recovery_look.py looks, recovery_source.py chooses, state_fetcher.py and former_cut.py fetch. A source that fails is
left out of the next choice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low

from swarmnode.base.errors import DataError, LocalFault, RemoteFault, SwarmnodeError, Unavailable
from swarmnode.base.ids import PeerId, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.ports import Neighbour, Priority, Replica, State
from swarmnode.keep.recovery.recovery_look import RecoveryLook
from swarmnode.keep.recovery.recovery_source import (
    AfterFailure,
    OwnState,
    RecoverySource,
    RecoveryView,
    SourceFailures,
    StateSource,
    choose_source,
    donors_of,
    neighbours_suffice,
)
from swarmnode.keep.recovery.restore_context import RestoreContext
from swarmnode.keep.recovery.resumption import Resumption
from swarmnode.keep.transfer.download import DownloadLimits
from swarmnode.keep.transfer.snapshot import SLOW, Snapshot, StateSlice
from swarmnode.model.adapter import has_adapters
from swarmnode.model.section import PACKED_ITEMSIZE, outer_sections
from swarmnode.net.membership.liveness import SOON_SHARE
from swarmnode.net.membership.state_line import UNBROKEN, StateLine
from swarmnode.net.membership.swarm import GOSSIPING

# A joiner of a stage that others serve leaves a third of its donor's uplink to training at any time [guess].
POLITE = DownloadLimits(rest=0.5)
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
        return await _Restoration(self, replica, stage, backup, round_min, believed, own).run()


@dataclass(frozen=True, slots=True)
class _Brought:
    """The outcome of a source: samples of the run behind the state now in the replica, and the line of that state."""

    samples: int = 0
    line: StateLine = UNBROKEN


class _Restoration:
    """A single restore of one stage."""

    def __init__(
        self,
        restorer: StateRestorer,
        replica: Replica,
        stage: int,
        backup: Snapshot | None,
        round_min: int,
        only: Collection[PeerId] | None,
        own: OwnState | None = None,
    ) -> None:
        self._restorer = restorer
        self._replica = replica
        self._stage = stage
        self._backup = backup if backup is not None and backup.stage == stage else None
        self._round_min = round_min
        self._failures = SourceFailures()
        self._look = RecoveryLook(restorer, replica, stage, self._backup, only, own, self._failures)
        self._manifest = restorer.manifest
        self._membership = restorer.membership
        self._telemetry = restorer.telemetry
        self._time = asyncio.get_running_loop().time
        self._fetcher = restorer.fetcher(replica)
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
            self._fetcher.received = 0
            try:
                restored, samples = await self._restore_from(source, reason, view)
            except (Unavailable, RemoteFault, DataError) as error:
                await self._note_failure(source, error, view)
                continue
            # Two nodes may have rebuilt the stage at once; the later one takes the other's state, so it is one stage.
            if source in CONTESTED and not begins and await self._overtaken():
                continue
            if begins:  # nothing was lost: the stage starts here
                self._telemetry.event("state.fresh", reason=reason)
            elif source is not RecoverySource.OWN or restored.line.lost:
                self._say(restored, samples, self._time() - begun)
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
            case AfterFailure.OTHERS if self._look.only is None:
                self._failures.tries = 0
                self._look.only = self._membership.run_progress.clock.history.times
            case _:
                pass

    async def _overtaken(self) -> bool:
        """Whether another node brought the stage back meanwhile: then its state counts, and this one is dropped."""
        await self._membership.look([self._stage])
        donors = donors_of(self._look.swarm(), self._stage, self._membership.me)
        return bool(await self._restorer.pinger.answering(donors))

    # ---- restore

    async def _restore_from(self, source: RecoverySource, reason: str, view: RecoveryView) -> tuple[RestoredState, int]:
        """(the state loaded from `source`, the samples of the run behind it). Raises Unavailable, RemoteFault,
        DataError when that fails."""
        if source is RecoverySource.REPLICA:
            return await self._from_replicas(reason, view), view.samples_total
        brought = await self._bring(source, view)
        self._membership.run_progress.begin(view.samples_least)
        total = self._membership.progress.total
        line = UNBROKEN
        if view.samples_total:
            line = brought.line.behind(brought.samples, max(total, brought.samples))
        done = total // self._manifest.gossip.round_samples
        restored = RestoredState(source, reason, done, newcomer=False, line=line, before=self._silent())
        return restored, brought.samples

    async def _bring(self, source: RecoverySource, view: RecoveryView) -> _Brought:
        """Have the state of `source` in the replica. Raises as `_restore_from`."""
        copies = view.of(source)
        place = copies[0].place if copies else None
        match source:
            case RecoverySource.OWN:
                assert isinstance(place, OwnState)
                return _Brought(place.samples, place.line)
            case RecoverySource.RING:
                return await self._from_keepers(view, copies)
            case RecoverySource.ARCHIVE:
                return await self._from_archive(view, copies)
            case RecoverySource.PIECES:
                assert self._restorer.earlier is not None
                from swarmnode.keep.recovery.former_cut import FormerCut  # few runs cut their stages anew

                former = FormerCut(self._restorer, self._restorer.earlier.manifest)
                saved = await former.gathered(self._fetcher, self._look.swarm(), self._stage)
                return await self._from_store(view, saved)
            case RecoverySource.CHECKPOINT | RecoverySource.DISK:
                assert isinstance(place, Resumption)
                return await self._from_store(
                    view, place, of_now=source is RecoverySource.CHECKPOINT and view.resumed_now
                )
            case RecoverySource.CHECKFREE:
                await self._rebuild(view)
                return _Brought()
            case RecoverySource.BASE:
                await self._begin_from_base()
                return _Brought()
            case RecoverySource.FRESH:
                if self._replica.undrawn:
                    await self._restorer.compute.run(Priority.OUTER, 0, self._replica.draw_weights)
                return _Brought(view.samples_total)
            case _:
                raise AssertionError(f"{source} is not a way to a state")

    async def _from_replicas(self, reason: str, view: RecoveryView) -> RestoredState:
        """Download from living replicas, checked by others of the stage."""
        alive = peers_of(view.of(RecoverySource.REPLICA))
        donors = self._fetcher.replicas(self._stage, alive) if self._look.only is None else lambda: alive
        judge = self._fetcher.judge(self._stage, donors, lambda: peers_of(view.of(RecoverySource.RING)))
        _, offer = await self._fetcher.of_replicas(
            self._stage, donors, judge, view.round_now, accept=self._load, limits=POLITE, round_min=self._round_min
        )
        # The median tolerates one liar about the run's count among the donor, the confirming peer and the pinged peers.
        totals = [offer.progress.total, view.samples_least, *([] if judge is None else judge.totals[:1])]
        total = self._membership.run_progress.begin_at_most(median_low(totals))
        self._restorer.merge(offer.progress)
        done = min(offer.round, total // self._manifest.gossip.round_samples)
        line = StateLine(offer.lost_samples, offer.lost_at_samples)
        return RestoredState(RecoverySource.REPLICA, reason, done, self._restorer.meets, line)

    def _silent(self) -> frozenset[PeerId]:
        """Replicas that served the stage, as far as this node knows, and are silent now."""
        return frozenset(m.peer for m in self._membership.peer_table.known(self._stage) if m.state in GOSSIPING)

    async def _from_keepers(self, view: RecoveryView, copies: Sequence[StateSource]) -> _Brought:
        """The first to be had of `copies` that nodes of the stage before keep, or replicas that rest."""
        keepers = peers_of(copies)
        own = self._backup if self._membership.me in keepers else None
        kept = await self._fetcher.of_keepers(self._stage, keepers, own, accept=self._load)
        self._membership.run_progress.begin(view.samples_least)
        self._restorer.merge(kept.progress)
        return _Brought(kept.samples, kept.line)

    async def _from_archive(self, view: RecoveryView, copies: Sequence[StateSource]) -> _Brought:
        """The slow weights that a bootstrap has in the owner's archive; fast ones equal them, and moments begin anew.

        Raises Unavailable when none has them, or only such as are older than a stage of this run may be while its
        neighbours could bring it back.
        """
        sizes = self._replica.sizes_of(self._stage)
        state, offer = await self._fetcher.of_archives(self._stage, peers_of(copies), self._restorer.warranted)
        age = view.round_now - offer.round
        if age > self._manifest.recovery.snapshot_rounds_max and neighbours_suffice(view)[0]:
            raise Unavailable(f"the archive's copy of {stage_name(self._stage)} is {age} rounds old")
        zeros = {
            name: memoryview(bytes(PACKED_ITEMSIZE[name] * sizes[name]))
            for name in outer_sections(sizes)
            if name != "phi"
        }
        await self._load(replace(state, sections={**state.sections, **zeros}, inner_steps=0, bump_steps=0))
        return _Brought(offer.progress.total)

    async def _from_store(self, view: RecoveryView, saved: Resumption, *, of_now: bool = False) -> _Brought:
        """The stage's state from a folder or bucket. `of_now`: all its replicas may go on from it in its own round.

        Raises LocalFault when it cannot be read and the whole run resumes from it. Raises Unavailable when the run has
        gone on since, because other sources may exist.
        """
        shapes = self._restorer.checkpoints.shapes(self._manifest, self._stage)
        try:
            state = await saved.load(shapes, self._telemetry, self._stage)
        except (DataError, LocalFault) as error:
            raise (LocalFault if of_now else Unavailable)(str(error)) from error
        self._fetcher.received += sum(section.nbytes for section in state.sections.values())
        await self._load(state)
        return _Brought(view.samples_total if of_now else saved.checkpoint.samples, saved.line(self._stage))

    async def _begin_from_base(self) -> None:
        """Begin the stage with the weights that the run began with: the base model's, or adapters that change
        nothing."""
        base = self._restorer.base
        if base is None or has_adapters(self._manifest):
            await self._restorer.compute.run(Priority.OUTER, 0, self._replica.restart)
        else:
            self._fetcher.received += await base.load(self._replica, self._stage)

    async def _rebuild(self, view: RecoveryView) -> None:
        """CheckFree: rebuild the stage from the neighbours' slow weights and the mirrored embedding or head."""
        neighbours = []
        for stage, serves in ((self._stage - 1, view.below), (self._stage + 1, view.above)):
            if serves:
                state, offer = await self._fetcher.slow_weights(stage)
                neighbours.append(Neighbour(stage, state.sections["phi"], offer.gradient_norm))
        mirrored = None
        if view.ends:
            cut = StateSlice(SLOW.sections, *self._replica.ends_of(self._stage))
            own = self._backup if self._membership.me in view.ends else None
            mirrored = (await self._fetcher.of_keepers(self._stage, view.ends, own, cut)).state.sections["phi"]
        rebuild = partial(self._replica.rebuild, self._manifest.recovery.method, neighbours, mirrored)
        await self._restorer.compute.run(Priority.OUTER, 0, rebuild)

    async def _load(self, state: State) -> None:
        await self._restorer.load(self._replica, state)

    # ---- say

    def _method(self, source: RecoverySource) -> str:
        """The name of `source` in events; CheckFree's by how weights are combined."""
        return self._manifest.recovery.method if source is RecoverySource.CHECKFREE else str(source)

    def _say(self, restored: RestoredState, samples: int, seconds: float) -> None:
        """Tell what was restored, with `samples` of the run behind it."""
        self._telemetry.count(name.RECOVERIES, method=str(restored.source))
        self._telemetry.event(
            "recovery.done",
            stage=self._stage,
            method=self._method(restored.source),
            seconds=round(seconds, 3),
            nbytes=self._fetcher.received,
            round=samples // self._manifest.gossip.round_samples,
            behind=max(0, self._membership.progress.total - samples),
            reason=restored.reason,
        )


def peers_of(copies: Sequence[StateSource]) -> list[PeerId]:
    """The peers that give `copies`, in their order."""
    return [copy.place for copy in copies if isinstance(copy.place, str)]

"""Load the state of a stage from one source into a replica, a method for each kind of source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from swarmnode.base.errors import DataError, LocalFault, Unavailable
from swarmnode.base.ids import PeerId, stage_name
from swarmnode.base.ports import Neighbour, Priority, State
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery.recovery_source import (
    OwnState,
    RecoverySource,
    RecoveryView,
    StateSource,
    neighbours_suffice,
)
from swarmnode.keep.recovery.restore_context import RestoreContext, RestoreRequest
from swarmnode.keep.recovery.resumption import Resumption
from swarmnode.keep.transfer.download import DownloadLimits
from swarmnode.keep.transfer.snapshot import SLOW, Snapshot, StateSlice
from swarmnode.model.adapter import has_adapters
from swarmnode.model.section import PACKED_ITEMSIZE, outer_sections
from swarmnode.net.membership.state_line import UNBROKEN, StateLine
from swarmnode.net.membership.swarm import Swarm

# A joiner of a stage that others serve leaves a third of its donor's uplink to training at any time [guess].
POLITE = DownloadLimits(rest=0.5)


@dataclass(frozen=True, slots=True)
class ServingDonor:
    """The last round of the replica that gave its state, and the run's samples by its word and by a peer that confirmed
    it."""

    round: int
    totals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadedState:
    """A state that is in the replica now: samples of the run behind it, its line, and the words of the peer that gave
    it. `donor` if that peer serves the stage."""

    samples: int = 0
    line: StateLine = UNBROKEN
    told: record_pb2.Progress | None = None
    donor: ServingDonor | None = None


class StateLoader:
    """One attempt at the state of `request`, with `view` and `swarm` as they were when its source was chosen."""

    def __init__(self, here: RestoreContext, request: RestoreRequest, view: RecoveryView, swarm: Swarm) -> None:
        self._here = here
        self._request = request
        self._replica = request.replica
        self._stage = request.stage
        self._view = view
        self._swarm = swarm
        self._fetcher = here.fetcher(request.replica)

    @property
    def received(self) -> int:
        """Bytes that came from peers and stores."""
        return self._fetcher.received

    async def load(self, source: RecoverySource) -> LoadedState:
        """Load the state of `source`. Raises Unavailable, RemoteFault, DataError when that fails, LocalFault when the
        checkpoint that the whole run resumes from cannot be read."""
        copies = self._view.of(source)
        place = copies[0].place if copies else None
        match source:
            case RecoverySource.REPLICA:
                return await self._of_replicas(copies)
            case RecoverySource.OWN:
                assert isinstance(place, OwnState)
                return LoadedState(place.samples, place.line)
            case RecoverySource.DISK:
                assert isinstance(place, Resumption)
                return await self._of_store(place)
            case RecoverySource.RING:
                return await self._of_keepers(copies)
            case RecoverySource.PIECES:
                return await self._of_store(await self._pieces())
            case RecoverySource.CHECKPOINT:
                assert isinstance(place, Resumption)
                return await self._of_store(place, of_now=self._view.resumed_now)
            case RecoverySource.ARCHIVE:
                return await self._of_archives(copies)
            case RecoverySource.BASE:
                return await self._of_base()
            case RecoverySource.CHECKFREE:
                return await self._of_neighbours()
            case RecoverySource.FRESH:
                return await self._of_seed()
            case RecoverySource.WAIT | RecoverySource.STOP:
                raise AssertionError(f"{source} is not a way to a state")

    # ---- states of peers

    async def _of_replicas(self, copies: list[StateSource]) -> LoadedState:
        """The state of a living replica, checked by others of the stage."""
        view = self._view
        alive = peers_of(copies)
        donors = self._fetcher.replicas(self._stage, alive) if self._request.believed is None else lambda: alive
        judge = self._fetcher.judge(self._stage, donors, lambda: peers_of(view.of(RecoverySource.RING)))
        _, offer = await self._fetcher.of_replicas(
            self._stage,
            donors,
            judge,
            view.round_now,
            accept=self._accept,
            limits=POLITE,
            round_min=self._request.round_min,
        )
        totals = (offer.progress.total, *([] if judge is None else judge.totals[:1]))
        line = StateLine(offer.lost_samples, offer.lost_at_samples)
        return LoadedState(view.samples_total, line, offer.progress, ServingDonor(offer.round, totals))

    async def _of_keepers(self, copies: list[StateSource]) -> LoadedState:
        """The first to be had of `copies` that nodes of the stage before keep, or replicas that rest."""
        keepers = peers_of(copies)
        kept = await self._fetcher.of_keepers(self._stage, keepers, self._backup_of(keepers), accept=self._accept)
        return LoadedState(kept.samples, kept.line, kept.progress)

    async def _of_archives(self, copies: list[StateSource]) -> LoadedState:
        """The slow weights that a bootstrap has in the owner's archive; fast ones equal them, and moments begin anew.

        Raises Unavailable when none has them, or only such as are older than a stage of this run may be while its
        neighbours could bring it back.
        """
        sizes = self._replica.sizes_of(self._stage)
        state, offer = await self._fetcher.of_archives(self._stage, peers_of(copies), self._here.warranted)
        age = self._view.round_now - offer.round
        if age > self._here.manifest.recovery.snapshot_rounds_max and neighbours_suffice(self._view)[0]:
            raise Unavailable(f"the archive's copy of {stage_name(self._stage)} is {age} rounds old")
        zeros = {
            name: memoryview(bytes(PACKED_ITEMSIZE[name] * sizes[name]))
            for name in outer_sections(sizes)
            if name != "phi"
        }
        await self._accept(replace(state, sections={**state.sections, **zeros}, inner_steps=0, bump_steps=0))
        return LoadedState(offer.progress.total)

    # ---- states of folders and buckets

    async def _pieces(self) -> Resumption:
        """The stages that members saved as they were cut before, fetched into this home. Raises Unavailable."""
        assert self._here.earlier is not None
        from swarmnode.keep.recovery.former_cut import FormerCut  # few runs cut their stages anew

        former = FormerCut(self._here, self._here.earlier.manifest)
        return await former.gathered(self._fetcher, self._swarm, self._stage)

    async def _of_store(self, saved: Resumption, *, of_now: bool = False) -> LoadedState:
        """A state saved in a folder or bucket. `of_now`: all replicas of the stage may go on from it in its own round.

        Raises LocalFault when it cannot be read and the whole run resumes from it. Raises Unavailable when the run has
        gone on since, because other sources may exist.
        """
        here = self._here
        shapes = here.checkpoints.shapes(here.manifest, self._stage)
        try:
            state = await saved.load(shapes, here.telemetry, self._stage)
        except (DataError, LocalFault) as error:
            raise (LocalFault if of_now else Unavailable)(str(error)) from error
        self._fetcher.received += sum(section.nbytes for section in state.sections.values())
        await self._accept(state)
        samples = self._view.samples_total if of_now else saved.checkpoint.samples
        return LoadedState(samples, saved.line(self._stage))

    # ---- states made anew

    async def _of_base(self) -> LoadedState:
        """The weights that the run began with: the base model's, or adapters that change nothing."""
        base = self._here.base
        if base is None or has_adapters(self._here.manifest):
            await self._here.compute.run(Priority.OUTER, 0, self._replica.restart)
        else:
            self._fetcher.received += await base.load(self._replica, self._stage)
        return LoadedState()

    async def _of_neighbours(self) -> LoadedState:
        """CheckFree: the neighbours' slow weights and the mirrored embedding or head."""
        neighbours = []
        for stage, serves in ((self._stage - 1, self._view.below), (self._stage + 1, self._view.above)):
            if serves:
                state, offer = await self._fetcher.slow_weights(stage)
                neighbours.append(Neighbour(stage, state.sections["phi"], offer.gradient_norm))
        mirrored = None
        if keepers := self._view.ends:
            cut = StateSlice(SLOW.sections, *self._replica.ends_of(self._stage))
            kept = await self._fetcher.of_keepers(self._stage, keepers, self._backup_of(keepers), cut)
            mirrored = kept.state.sections["phi"]
        rebuild = partial(self._replica.rebuild, self._here.manifest.recovery.method, neighbours, mirrored)
        await self._here.compute.run(Priority.OUTER, 0, rebuild)
        return LoadedState()

    async def _of_seed(self) -> LoadedState:
        """The weights that the manifest's seed draws."""
        if self._replica.undrawn:
            await self._here.compute.run(Priority.OUTER, 0, self._replica.draw_weights)
        return LoadedState(self._view.samples_total)

    def _backup_of(self, keepers: Sequence[PeerId]) -> Snapshot | None:
        """This node's copy, if it is one of `keepers`."""
        return self._request.backup if self._here.membership.me in keepers else None

    async def _accept(self, state: State) -> None:
        await self._here.load(self._replica, state)


def peers_of(copies: list[StateSource]) -> list[PeerId]:
    """The peers that give `copies`, in their order."""
    return [copy.place for copy in copies if isinstance(copy.place, str)]

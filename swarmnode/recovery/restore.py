"""Restore the state of a stage in a replica: look at the swarm, choose a source, fetch from it, say what came.

The choice is recovery/recovery_source.py's. A source that fails is left out of the next choice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low
from typing import NamedTuple, Protocol

from swarmnode.bounds import STAGES_MAX
from swarmnode.concurrency import gather_or_cancel
from swarmnode.errors import DataError, LocalFault, RemoteFault, SwarmnodeError, Unavailable
from swarmnode.ids import PeerId, RunId, stage_name
from swarmnode.manifest import Manifest, from_base
from swarmnode.manifest.gossip_compat import meets
from swarmnode.membership.liveness import LOOK_SHARE, SAMPLE, SOON_SHARE, TRIES, Pinger
from swarmnode.membership.progress import Progress
from swarmnode.membership.run_progress import SLACK_ROUNDS, MembershipView
from swarmnode.membership.state_line import UNBROKEN, StateLine
from swarmnode.membership.swarm import GOSSIPING, PAUSED, Member, Swarm
from swarmnode.metrics import name
from swarmnode.model.adapter import has_adapters
from swarmnode.model.section import PACKED_ITEMSIZE, Sizes, outer_sections, section_sizes, snapshot_nbytes
from swarmnode.model.split import stages_of
from swarmnode.ports import Clock, Compute, Neighbour, Priority, Replica, State, Telemetry, Transport
from swarmnode.recovery.neighbour_backup import to_keep
from swarmnode.recovery.recovery_source import (
    CLAIM_WAIT_S,
    LOST_WAIT_S,
    RecoveryClaims,
    RecoverySource,
    RecoveryView,
    choose_source,
    donors_of,
    latest,
    neighbours_suffice,
    silent,
    sleeper_text,
)
from swarmnode.recovery.resumption import CheckpointOptions, EarlierCut, Resumption, SavedStages, newest_of
from swarmnode.recovery.state_judge import StateJudge, state_judge
from swarmnode.transfer.download import Accept, DonorClient, DownloadLimits
from swarmnode.transfer.snapshot import SLOW, WHOLE, Snapshot, StateSlice, newcomer_part
from swarmnode.wire import access_pb2, record_pb2
from swarmnode.wire import call_pb2 as wire

SAMPLE_UNBEGUN = 1  # the same before the run has trained: no replica has a state to give
# A joiner of a stage that others serve leaves a third of its donor's uplink to training at any time [guess].
POLITE = DownloadLimits(rest=0.5)
FIRST_ROUNDS = SLACK_ROUNDS  # of the run, in which a replica may not have done its first
BACKUP_LIMITS = DownloadLimits(sources=1)  # backups of different keepers are of rounds far apart
TRIES_MAX = TRIES  # times that living replicas are asked for state before this process gives up

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
class OwnState:
    """The state that a replica has already: samples of the run in it, and its line."""

    samples: int
    line: StateLine


class BaseWeights(Protocol):
    """The pretrained model that the run starts from."""

    async def load(self, replica: Replica, stage: int) -> int:
        """Place the weights of `stage` in `replica`; the bytes read. Raises Unavailable when they are not to be had
        now, DataError when they do not fit the run's model."""
        ...


@dataclass(frozen=True, slots=True)
class StateRestorer:
    """Restores the state of any stage for one node, from whatever is left of it in the swarm."""

    manifest: Manifest
    run_id: RunId
    transport: Transport
    membership: MembershipView
    pinger: Pinger
    compute: Compute
    clock: Clock
    telemetry: Telemetry
    checkpoints: CheckpointOptions
    saved: SavedStages
    warranted: Callable[
        [PeerId, access_pb2.Warrant], tuple[bool, str]
    ]  # whether a peer archives for the owner, or why not
    base: BaseWeights | None  # of a run with base.index
    make: Callable[[Manifest, int], Replica]
    earlier: EarlierCut | None = None

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

    async def freeze(self, replica: Replica, stage: int) -> None:
        """Place the frozen weights of `stage` in a new `replica`, if the run trains adapters beside a base model: no
        state has them. Raises Unavailable, DataError."""
        if self.base is not None and has_adapters(self.manifest):
            await self.base.load(replica, stage)

    @property
    def meets(self) -> bool:
        """Whether replicas of a stage meet in rounds."""
        return meets(self.manifest.gossip)

    async def load(self, replica: Replica, state: State) -> None:
        """Load `state`. Raises RemoteFault for numbers that cannot be a state."""
        await self.compute.run(Priority.OUTER, 0, lambda: replica.load(state))

    async def give_piece(self, wired: int, known: Snapshot | None) -> Snapshot:
        """The newest saved state of a stage of the cut before, packed; `known` if it is that. Raises Unavailable."""
        assert self.earlier is not None
        earlier = self.earlier.manifest
        stage = wired - STAGES_MAX
        run = partial(self.compute.run, Priority.OUTER, 0)
        if (piece := self.saved.recut([stage])) is None:
            raise Unavailable(f"no {stage_name(stage)} as it was before is saved here")
        if known is not None and known.round_index == piece.checkpoint.round:
            return known
        replica = await run(partial(self.make, earlier, stage))
        try:
            await self.load(replica, await piece.load(self.checkpoints.shapes(earlier, stage), self.telemetry, stage))
        except (DataError, LocalFault, RemoteFault) as error:
            raise Unavailable(str(error)) from error
        state = await run(partial(replica.snapshot, packed=True))
        return Snapshot.of(state, wired, piece.checkpoint.round, piece.progress().to_wire())

    def merge(self, told: record_pb2.Progress) -> None:
        """Merge the progress that came with a state, within bounds. A donor may be wrong about the run's count."""
        with contextlib.suppress(RemoteFault):
            self.membership.progress.merge(Progress.from_wire(told))


class _Copies(NamedTuple):
    """The fields of the same names of a RecoveryView."""

    kept: tuple[tuple[float, PeerId], ...]
    ends: tuple[PeerId, ...] | None
    asleep: str


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
        self._only = only  # replicas of the stage that are believed; None: all
        self._own = own
        self._manifest = restorer.manifest
        self._membership = restorer.membership
        self._telemetry = restorer.telemetry
        self._pinger = restorer.pinger
        self._checkpoints = restorer.checkpoints
        self._earlier = restorer.earlier
        self._time = asyncio.get_running_loop().time
        self._claims = RecoveryClaims(restorer.manifest.limits, snapshot_nbytes(replica.sizes_of(stage)))
        self._failed: set[RecoverySource] = set()
        self._vain: set[tuple[float, PeerId]] = set()  # (round, keeper) of snapshots that could not be had
        self._vain_times = 0
        self._tries = 0  # in vain
        self._tried_at = -1  # the run's samples at the last of them
        self._waits_for = ""
        self._disk: Resumption | None = None
        self._disk_searched = False
        self._returning: bool | None = None  # as seen at the first look
        self._samples = 0  # of the run, as far as the state restored goes
        self._line = UNBROKEN  # of that state
        self._claimed = 0  # the most samples that anybody claimed since this attempt began
        self._nbytes = 0  # that this attempt received

    async def run(self) -> RestoredState:
        """Try one source after the other until the state is loaded. Raises Unavailable, LocalFault."""
        begun = self._time()
        while True:
            # Each try looks anew: replicas come back meanwhile, and any of them is better than any other source.
            view = await self._look(self._time() - begun)
            source, reason = choose_source(view, self._manifest.recovery)
            if source is RecoverySource.STOP or self._tries >= TRIES_MAX:
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
            try:
                restored = await self._restore_from(source, reason, view)
            except (Unavailable, RemoteFault, DataError) as error:
                await self._note_failure(source, error, view)
                continue
            # Two nodes may have rebuilt the stage at once; the later one takes the other's state, so it is one stage.
            if source in CONTESTED and not begins and await self._overtaken():
                continue
            if source is not RecoverySource.OWN or restored.line.lost:
                self._say(restored, self._time() - begun, begins=begins)
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
        if source is RecoverySource.RING and self._vain_times < TRIES_MAX:
            self._vain_times += 1
            self._vain.update(view.kept)  # a later snapshot may come: of one that leaves, or with a renewal
        elif source is RecoverySource.REPLICA or view.round_now == 0:
            # A replica is one of several and may answer the next time; before the first round there is nothing but the
            # beginning to go to.
            self._count_try(source, view.samples_total)
        elif source is RecoverySource.PIECES and view.waited_s < LOST_WAIT_S:  # their holders are on the way
            await asyncio.sleep(self._manifest.limits.announce_period_s)
        else:
            self._failed.add(source)

    def _count_try(self, source: RecoverySource, samples_total: int) -> None:
        """Count a try in vain. If the run stood still meanwhile, its replicas are keys that do nothing: others count
        from now on."""
        self._tries += 1
        stands = source is RecoverySource.REPLICA and samples_total == self._tried_at
        if self._tries == TRIES_MAX and stands and self._only is None:
            self._tries = 0
            self._only = self._membership.run_progress.clock.history.times
        self._tried_at = samples_total

    # ---- look

    async def _look(self, waited_s: float) -> RecoveryView:
        """Read the directory, ping the stage and its neighbours, and gather what the choice needs."""
        stage = self._stage
        stages = self._manifest.pipeline.stages
        size = self._manifest.gossip.round_samples
        near = [(stage + step) % stages for step in (0, -1, 1)]
        swarm = self._swarm()  # all stages were looked up when this one was chosen
        await self._membership.look([at for at in range(stages) if at in near or not (waited_s or swarm.stages[at])])
        alive = await self._ping_near(near)
        swarm = self._swarm()  # answers carry records
        supposed = self._membership.run_progress.suppose(alive)
        total = self._samples = supposed.middle
        if self._returning is None:
            self._returning = not all(swarm.serving(at) for at in range(stages) if at != stage)
        unanswered = await self._hear_claims(total, waited_s)
        copies = self._copies(swarm, alive)
        donors = tuple(peer for peer in donors_of(swarm, stage, self._membership.me) if peer in alive)
        return RecoveryView(
            stage,
            stages,
            total,
            total // size,
            claimed=self._claimed,
            little=self._claimed < size,
            unanswered=unanswered,
            samples_least=supposed.least,
            donors=donors,
            unsure=silent(swarm.stages[stage], alive, self._restorer.clock.unix_s(), self._manifest.limits),
            builder=self._claims.builder(swarm.stages[stage], alive, self._membership.me, self._time()),
            settled=waited_s >= LOOK_SHARE * self._manifest.limits.announce_period_s,
            kept=copies.kept,
            asleep=copies.asleep,
            own_round=None if self._own is None else self._own.samples / size,
            ends=copies.ends,
            below=stage > 0 and any(m.peer in alive for m in swarm.serving(stage - 1)),
            above=stage < stages - 1 and any(m.peer in alive for m in swarm.serving(stage + 1)),
            disk_round=await self._disk_round() if total and not donors else None,
            saved_round=None if self._checkpoints.resume is None else self._checkpoints.resume.rounds(self._manifest),
            returning=self._returning and stages > 1,
            recut_round=None if self._earlier is None else self._earlier.until,
            archived=bool(self._checkpoints.archives),
            has_base=from_base(self._manifest),
            failed=frozenset(self._failed),
            waited_s=waited_s,
        )

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

    def _copies(self, swarm: Swarm, alive: Collection[PeerId]) -> _Copies:
        """Copies of the stage's state that nodes which answer keep or hold while they rest."""
        recovery = self._manifest.recovery
        size = self._manifest.gossip.round_samples
        rounds_max = self._membership.run_progress.rounds_max
        before = swarm.stages[
            (self._stage - 1) % self._manifest.pipeline.stages
        ]  # paused ones give what they keep, too
        ends = self._replica.ends_of(self._stage)
        cut, _ = to_keep(recovery.snapshot_bytes_max, self._replica.sizes_of(self._stage), ends)
        ring = [(m.kept_samples / size, m.peer) for m in before if m.kept_round is not None and m.peer in alive]
        if self._backup is not None:
            ring.append((self._backup.samples / size, self._membership.me))
        paused = self._resting(swarm, alive)
        # Since its last round a replica has learned more than any snapshot of that round has.
        resting = [(float(m.round_index + m.round_stride), m.peer) for m in paused]
        kept = latest([*resting, *ring] if cut == WHOLE else resting, rounds_max)
        return _Copies(
            kept=tuple([one for one in kept if one not in self._vain]),
            ends=tuple(peer for _, peer in latest([*resting, *ring], rounds_max)) if ends[1] else None,
            asleep=next((sleeper_text(member) for member in paused if member.state == PAUSED), ""),
        )

    def _resting(self, swarm: Swarm, alive: Collection[PeerId]) -> list[Member]:
        """Replicas of the stage that take no work, have its state, and answer. Where this node has seen some of them at
        work, only those: a record costs nothing."""
        answering = [m for m in swarm.resting(self._stage) if m.peer in alive and m.peer != self._membership.me]
        seen = self._membership.run_progress.clock.history.times
        return [member for member in answering if member.peer in seen] or answering

    async def _ping_near(self, near: list[int]) -> frozenset[PeerId]:
        """Members of the stages `near` that are alive. Before the run has trained, one of each stage is enough."""
        run_progress = self._membership.run_progress
        begun = run_progress.suppose(()).middle > 0
        alive = await self._pinger.answering_in(self._swarm(), near, SAMPLE if begun else SAMPLE_UNBEGUN)
        if not begun and run_progress.suppose(alive).middle > 0:
            alive = await self._pinger.answering_in(self._swarm(), near, SAMPLE)
        return alive

    async def _disk_round(self) -> float | None:
        """The round of the newest state of this stage on this node's disk: saved in its home, or of a whole
        checkpoint of this run. Searched for once."""
        store = self._checkpoints.store
        if store is not None and not self._disk_searched:
            self._disk_searched = True
            try:
                self._disk = await newest_of(store, self._restorer.run_id)
            except (DataError, LocalFault) as error:
                self._telemetry.event(
                    "recovery.source_failed", level="warning", method=RecoverySource.DISK, reason=str(error)
                )
        own = self._restorer.saved.newest(self._stage)
        if own is not None and (self._disk is None or self._disk.checkpoint.samples < own.checkpoint.samples):
            self._disk = own
        return None if self._disk is None else self._disk.checkpoint.samples / self._manifest.gossip.round_samples

    async def _overtaken(self) -> bool:
        """Whether another node brought the stage back meanwhile: then its state counts, and this one is dropped."""
        await self._membership.look([self._stage])
        donors = donors_of(self._swarm(), self._stage, self._membership.me)
        return bool(await self._pinger.answering(donors))

    # ---- restore

    async def _restore_from(self, source: RecoverySource, reason: str, view: RecoveryView) -> RestoredState:
        """Load the state from `source`. Raises Unavailable, RemoteFault, DataError when that fails."""
        self._nbytes = 0
        match source:
            case RecoverySource.REPLICA:
                return await self._from_replicas(reason, view)
            case RecoverySource.OWN:
                assert self._own is not None
                self._samples = self._own.samples
                self._line = self._own.line
            case RecoverySource.RING:
                keepers = [peer for _, peer in view.kept]
                check = self._check(view.stage, keepers=lambda: keepers)
                kept = await self._from_backups(view.stage, keepers, WHOLE, check, self._load)
                self._samples = kept.samples
                self._line = kept.line
                self._membership.run_progress.begin(view.samples_least)
                self._restorer.merge(kept.progress)
            case RecoverySource.ARCHIVE:
                await self._from_archive(view)
            case RecoverySource.CHECKPOINT | RecoverySource.DISK | RecoverySource.PIECES:
                pieces = await self._pieces() if source is RecoverySource.PIECES else None
                saved = pieces or (self._checkpoints.resume if source is RecoverySource.CHECKPOINT else self._disk)
                assert saved is not None
                state = await self._read_checkpoint(view, saved)
                # All replicas of the stage may go on from the checkpoint in its own round.
                here = source is RecoverySource.CHECKPOINT and view.saved_round == view.round_now
                self._samples = view.samples_total if here else saved.checkpoint.samples
                self._line = saved.line(view.stage)
                self._nbytes += sum(section.nbytes for section in state.sections.values())
                await self._load(state)
            case RecoverySource.CHECKFREE:
                self._samples = 0
                await self._rebuild(view)
            case RecoverySource.BASE:
                self._samples = 0
                await self._begin_from_base(view.stage)
            case RecoverySource.FRESH:
                if self._replica.undrawn:
                    await self._restorer.compute.run(Priority.OUTER, 0, self._replica.draw_weights)
            case _:
                raise AssertionError(f"{source} is not a way to a state")
        self._membership.run_progress.begin(view.samples_least)
        total = self._membership.progress.total
        line = self._line.behind(self._samples, max(total, self._samples)) if view.samples_total else UNBROKEN
        done = total // self._manifest.gossip.round_samples
        return RestoredState(source, reason, done, newcomer=False, line=line, before=self._silent())

    async def _from_replicas(self, reason: str, view: RecoveryView) -> RestoredState:
        """Download from living replicas, checked by others of the stage."""
        every = partial(self._donors, frozenset(view.donors), view.stage)
        keepers = [p for _, p in view.kept]
        donors = every if self._only is None else lambda: view.donors
        check = self._check(view.stage, donors, lambda: keepers)
        whole = self._client(view.stage, POLITE, self._round_min)
        cut = newcomer_part(self._manifest.gossip, self._replica.sizes_of(view.stage)) if view.round_now else WHOLE
        _, offer = await self._download(replace(whole, cut=cut), donors, check, self._load)
        if cut != WHOLE and not offer.round and view.round_now <= FIRST_ROUNDS:
            # Before its first round the fast weights hold all that was learned.
            _, offer = await self._download(whole, donors, check, self._load)
        # The median tolerates one liar about the run's count among the donor, the confirming peer and the pinged peers.
        totals = [offer.progress.total, view.samples_least, *([] if check is None else check.totals[:1])]
        total = self._membership.run_progress.begin_at_most(median_low(totals))
        self._restorer.merge(offer.progress)
        done = min(offer.round, total // self._manifest.gossip.round_samples)
        line = StateLine(offer.lost_samples, offer.lost_at_samples)
        return RestoredState(RecoverySource.REPLICA, reason, done, self._restorer.meets, line)

    def _silent(self) -> frozenset[PeerId]:
        """Replicas that served the stage, as far as this node knows, and are silent now."""
        return frozenset(m.peer for m in self._membership.peer_table.known(self._stage) if m.state in GOSSIPING)

    async def _from_archive(self, view: RecoveryView) -> None:
        """The slow weights that a bootstrap has in the owner's archive; fast ones equal them, and moments begin anew.

        Raises Unavailable when none has them, or only such as are older than a stage of this run may be while its
        neighbours could bring it back.
        """
        archives = await self._archives(view.stage)
        sizes = self._replica.sizes_of(view.stage)
        state, offer = await self._download(self._client(view.stage, cut=SLOW), lambda: archives)
        age = view.round_now - offer.round
        if age > self._manifest.recovery.snapshot_rounds_max and neighbours_suffice(view)[0]:
            raise Unavailable(f"the archive's copy of {stage_name(view.stage)} is {age} rounds old")
        zeros = {
            name: memoryview(bytes(PACKED_ITEMSIZE[name] * sizes[name]))
            for name in outer_sections(sizes)
            if name != "phi"
        }
        await self._load(replace(state, sections={**state.sections, **zeros}, inner_steps=0, bump_steps=0))
        self._samples = offer.progress.total

    async def _pieces(self) -> Resumption:
        """The stages of the earlier cut that this one has layers of, fetched into this home where members have later
        ones. Raises Unavailable while one is nowhere to be had."""
        assert self._earlier is not None
        shapes = self._checkpoints.shapes
        before = self._earlier.manifest
        mine = shapes(self._manifest, self._stage)["theta"].keys()
        needed = [s for s in range(before.pipeline.stages) if mine & shapes(before, s)["theta"].keys()]
        for stage in needed:
            await self._fetch_piece(before, stage)
        if (pieces := self._restorer.saved.recut(needed)) is None:
            raise Unavailable("a stage as it was before that was saved here is gone")
        return pieces

    async def _fetch_piece(self, before: Manifest, stage: int) -> None:
        """Have the newest state of `stage` of `before` in this home. Raises Unavailable."""
        here = self._restorer
        own = self._restorer.saved.recut([stage])
        wired = STAGES_MAX + stage
        run = partial(here.compute.run, Priority.OUTER, 0)
        members = [m.peer for m in self._swarm().members() if m.peer != self._membership.me]
        offers = await self._offers(wired, WHOLE, members)
        if own is not None and own.checkpoint.round >= max((offer.round for _, offer in offers), default=0):
            return
        if not offers:
            raise Unavailable(f"{stage_name(stage)} as it was before is saved at no member that is here yet")
        keepers = [peer for peer, _ in offers]
        check = self._check(wired, keepers=lambda: keepers)
        replica = await run(partial(here.make, before, stage))
        accept = partial(here.load, replica)
        _, offer = await self._download(self._client(wired), lambda: keepers, check, accept)
        state = await run(replica.snapshot)
        shapes = self._checkpoints.shapes(before, stage)
        me = self._membership.me
        told = offer.progress
        await here.saved.save(state, shapes, stage=stage, round_index=offer.round, peer=me, progress=told, piece=True)

    async def _archives(self, stage: int) -> list[PeerId]:
        """The bootstraps that show the owner's warrant and have `stage` archived, the latest round first."""
        offers = await self._offers(stage, SLOW, self._checkpoints.archives)
        warranted = self._restorer.warranted
        return [peer for peer, offer in offers if warranted(peer, offer.warrant)[0]]

    async def _offers(self, stage: int, cut: StateSlice, peers: Sequence[PeerId]) -> list[tuple[PeerId, wire.Snapshot]]:
        """The offers of `stage` that some of `peers` make, the latest round first."""
        client = self._client(stage, cut=cut)
        offers = list[tuple[PeerId, wire.Snapshot]]()

        async def ask(peer: PeerId) -> None:
            with contextlib.suppress(Unavailable, RemoteFault):  # most have none
                offers.append((peer, await client.offer(peer)))

        await gather_or_cancel([partial(ask, peer) for peer in peers])
        return sorted(offers, key=lambda one: (one[1].round, one[0]), reverse=True)

    def _sizes(self, stage: int) -> Sizes:
        """Elements of each section of `stage`, which may be one of the cut before."""
        if self._earlier is None or stage < STAGES_MAX:
            return self._replica.sizes_of(stage)
        return section_sizes(self._earlier.manifest, stages_of(self._earlier.manifest)[stage - STAGES_MAX])

    async def _read_checkpoint(self, view: RecoveryView, saved: Resumption) -> State:
        """The stage's state from `saved`.

        Raises LocalFault when the checkpoint cannot be read and the whole run resumes from it. Raises Unavailable when
        the run has gone on since, because other sources may exist.
        """
        try:
            return await saved.load(self._checkpoints.shapes(self._manifest, view.stage), self._telemetry, view.stage)
        except (DataError, LocalFault) as error:
            raise (LocalFault if view.saved_round == view.round_now else Unavailable)(str(error)) from error

    async def _begin_from_base(self, stage: int) -> None:
        """Begin `stage` with the weights that the run began with: the base model's, or adapters that change nothing."""
        base = self._restorer.base
        if base is None or has_adapters(self._manifest):
            await self._restorer.compute.run(Priority.OUTER, 0, self._replica.restart)
        else:
            self._nbytes += await base.load(self._replica, stage)

    async def _rebuild(self, view: RecoveryView) -> None:
        """CheckFree: rebuild the stage from the neighbours' slow weights and the mirrored embedding or head."""
        neighbours = []
        method = self._manifest.recovery.method
        for stage, serves in ((view.stage - 1, view.below), (view.stage + 1, view.above)):
            if serves:
                donors = partial(self._donors, frozenset(), stage)
                check = self._check(stage, donors)
                state, offer = await self._download(self._client(stage, cut=SLOW), donors, check)
                neighbours.append(Neighbour(stage, state.sections["phi"], offer.gradient_norm))
        mirrored = None
        if view.ends:
            cut = StateSlice(SLOW.sections, *self._replica.ends_of(view.stage))
            ends = view.ends
            check = self._check(view.stage, keepers=lambda: ends, within=cut)
            mirrored = (await self._from_backups(view.stage, ends, cut, check)).state.sections["phi"]
        rebuild = partial(self._replica.rebuild, method, neighbours, mirrored)
        await self._restorer.compute.run(Priority.OUTER, 0, rebuild)

    async def _load(self, state: State) -> None:
        await self._restorer.load(self._replica, state)

    def _swarm(self) -> Swarm:
        """The swarm as known now; of the stage itself only this node and those that are believed."""
        swarm = self._membership.peer_table.swarm()
        if self._only is None:
            return swarm
        seen = {self._membership.me, *self._only}
        stages = list(swarm.stages)
        stages[self._stage] = tuple([member for member in stages[self._stage] if member.peer in seen])
        return Swarm.frozen(stages)

    # ---- fetch

    def _check(
        self,
        stage: int,
        others: Callable[[], Sequence[PeerId]] = tuple,
        keepers: Callable[[], Sequence[PeerId]] = tuple,
        within: StateSlice = SLOW,
    ) -> StateJudge | None:
        """A check of a state of `stage` by replicas, `others`, and by `keepers`, as `state_judge` has it."""
        ask = self._client(stage)
        return state_judge(self._manifest, ask, others, self._replica.apart, keepers=keepers, within=within)

    async def _from_backups(
        self,
        stage: int,
        keepers: Sequence[PeerId],
        cut: StateSlice,
        check: StateJudge | None = None,
        accept: Accept | None = None,
    ) -> Snapshot:
        """The part `cut` of the first snapshot to be had of those that `keepers`, latest first, keep of `stage`.

        This node's own backup needs no download, and serves when the other keepers fail. Raises Unavailable.
        """
        own = self._backup if self._membership.me in keepers else None
        if own is None or keepers[0] != self._membership.me:
            try:
                client = self._client(stage, BACKUP_LIMITS, cut=cut)
                state, offer = await self._download(client, lambda: keepers, check, accept)
                return Snapshot.of_offer(offer, state, cut.first)
            except Unavailable:
                if own is None:
                    raise
        assert own is not None
        whole = own.sizes == self._replica.sizes_of(stage)
        part = own.part(cut) if whole else own
        if accept is not None:
            await accept(part.state)
        return part

    def _client(
        self, stage: int, limits: DownloadLimits | None = None, round_min: int = 0, cut: StateSlice = WHOLE
    ) -> DonorClient:
        """Asks peers for the part `cut` of the state of `stage`, of round `round_min` or later."""
        here = self._restorer.transport, self._restorer.run_id, stage, self._sizes(stage), self._telemetry
        progress = self._membership.run_progress
        return DonorClient(*here, lambda: progress.rounds_max, limits or DownloadLimits(), cut, round_min)

    async def _download(
        self,
        client: DonorClient,
        donors: Callable[[], Sequence[PeerId]],
        check: StateJudge | None = None,
        accept: Accept | None = None,
    ) -> tuple[State, wire.Snapshot]:
        """DonorClient.download; counts the bytes. Raises Unavailable."""
        state, offer = await client.download(donors, compare=None if check is None else check.compare, accept=accept)
        self._nbytes += offer.nbytes
        return state, offer

    def _donors(self, seen: frozenset[PeerId], stage: int) -> Sequence[PeerId]:
        """Donors of `stage` as they are known now. Those in `seen`, which answered a moment ago, come first."""
        now = donors_of(self._membership.peer_table.swarm(), stage, self._membership.me)
        return [peer for peer in now if peer in seen] + [peer for peer in now if peer not in seen]

    # ---- say

    def _method(self, source: RecoverySource) -> str:
        """The name of `source` in events; CheckFree's by how weights are combined."""
        return self._manifest.recovery.method if source is RecoverySource.CHECKFREE else str(source)

    def _say(self, restored: RestoredState, seconds: float, *, begins: bool) -> None:
        """Tell what was restored; `begins`: nothing was lost, the stage starts here."""
        if begins:
            self._telemetry.event("state.fresh", reason=restored.reason)
            return
        self._telemetry.count(name.RECOVERIES, method=str(restored.source))
        self._telemetry.event(
            "recovery.done",
            stage=self._stage,
            method=self._method(restored.source),
            seconds=round(seconds, 3),
            nbytes=self._nbytes,
            round=self._samples // self._manifest.gossip.round_samples,
            behind=max(0, self._membership.progress.total - self._samples),
            reason=restored.reason,
        )

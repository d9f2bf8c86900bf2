"""Checkpoints as a node's task: at each round that is due one replica of the stage saves it, in everybody's view the
same one, while training goes on. Off the training thread but for one copy of the state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from swarmnode.errors import DataError, LocalFault, SwarmnodeError
from swarmnode.gossip.exchange import Gossip
from swarmnode.ids import PeerId, RunId
from swarmnode.manifest import Manifest
from swarmnode.membership.progress import Progress
from swarmnode.membership.swarm import GOSSIPING, Swarm
from swarmnode.metrics import name
from swarmnode.model.section import section_shapes, snapshot_nbytes
from swarmnode.model.split import split
from swarmnode.node.presence import Presence
from swarmnode.pipeline.feeder import Feeder
from swarmnode.ports import Compute, Priority, Replica, State, Store, Telemetry
from swarmnode.recovery import checkpoint as form
from swarmnode.recovery import saving
from swarmnode.recovery.checkpoint import Checkpoint, Origin
from swarmnode.recovery.saving import Holding, Shapes
from swarmnode.wire import record_pb2

PATIENCE_S = 20.0  # guess: until the next replica saves what the one before it has not
BOUNDARY_WAIT_S = 5.0  # guess: an outer step takes a second or two
PATIENCE_RATE = 2e7  # guess: bytes a second of a slow disk or bucket, for large states
RESUMED = PeerId("checkpoint")  # in whose name the blocks finished before are remembered


@dataclass(frozen=True, slots=True)
class Resumption:
    """The checkpoint this node starts from: its files are `base` + name in `store`."""

    store: Store
    base: str
    checkpoint: Checkpoint

    @property
    def where(self) -> str:
        """The folder or URL of this checkpoint alone."""
        return f"{self.store}/{self.base}".rstrip("/")

    def progress(self) -> Progress:
        """Samples of the run when it was saved."""
        return saving.progress_of(self.checkpoint)

    def blocks(self, manifest: Manifest) -> record_pb2.Blocks:
        """Blocks finished when it was saved, in blocks of `manifest`."""
        return saving.blocks_of(self.checkpoint, manifest.data.block_samples)


@dataclass(frozen=True, slots=True)
class Saving:
    """What a node is told about checkpoints. `store` None: it saves none. `layout` gives names and shapes of what each
    section of a stage's state holds, in its order; None: the manifest's own."""

    store: Store | None = None
    resume: Resumption | None = None
    signed: str = ""  # the signed manifest, base64
    layout: Callable[[int], Shapes] | None = None
    shard_nbytes: int = form.SHARD_NBYTES
    written: Callable[[int], None] = field(default=lambda nbytes: None)

    def begin(self, presence: Presence, manifest: Manifest) -> None:
        """Before anything else: what the checkpoint to resume knows of the run, and whether we save."""
        presence.self.saves_checkpoints = self.store is not None
        if self.resume is not None:
            presence.beliefs.trust(self.resume.progress())
            presence.blocks_heard[RESUMED] = self.resume.blocks(manifest)

    def shapes(self, manifest: Manifest, stage: int) -> Shapes:
        if self.layout is not None:
            return self.layout(stage)
        return section_shapes(manifest, split(manifest.model, manifest.pipeline.stages)[stage])


@dataclass(frozen=True, slots=True)
class Subject:
    """The replica that is saved, and what is known around it."""

    stage: int
    replica: Replica
    gossip: Gossip
    progress: Progress
    feeder: Callable[[], Feeder | None]


class Saver:
    """Saves one replica's stage when it is due and this replica's turn. `run` never raises for what a store does."""

    def __init__(
        self,
        manifest: Manifest,
        run_id: RunId,
        me: PeerId,
        saving_: Saving,
        subject: Subject,
        compute: Compute,
        swarm: Callable[[], Swarm],
        telemetry: Telemetry,
    ) -> None:
        assert saving_.store is not None
        self._manifest = manifest
        self._run_id = run_id
        self._me = me
        self._saving = saving_
        self._store = saving_.store
        self._subject = subject
        self._compute = compute
        self._swarm = swarm
        self._telemetry = telemetry
        self._origin = Origin.of(manifest, run_id, saving_.signed)
        self._shapes = saving_.shapes(manifest, subject.stage)
        self._wake = asyncio.Event()
        self._time = asyncio.get_running_loop().time
        self._patience_s = PATIENCE_S + snapshot_nbytes(subject.replica.sizes_of(subject.stage)) / PATIENCE_RATE

    def progressed(self) -> None:
        """The run's sample count grew: look whether a checkpoint is due."""
        self._wake.set()

    async def run(self) -> None:
        """Checkpoint after checkpoint until cancelled."""
        saved = self._round()
        while True:
            self._wake.clear()
            due = self._due(saved)
            if due is None:
                await self._wake.wait()
                continue
            saved = due
            await self.save(form.label(due), due)

    async def save(self, label: str, due: int | None = None) -> None:
        """Save `label` when it is this replica's turn; without the round `due`, now. A store that refuses is said,
        not raised."""
        try:
            reason = "asked for" if due is None else await self._turn(label, due)
            if reason is not None:
                await self._save(label, reason)
        except (LocalFault, DataError) as error:
            self._failed(label, error)

    def _round(self) -> int:
        """The run's round, which everybody sees alike; replicas may take only every second or fourth of their own."""
        return self._subject.progress.total // self._manifest.gossip.round_samples

    def _due(self, saved: int) -> int | None:
        return form.due(self._round(), saved, self._manifest.checkpoint.every_rounds)

    async def _turn(self, label: str, due: int) -> str | None:
        """Why this replica saves; None once another did, or when the next checkpoint is due."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        stage = self._subject.stage
        able = [member.peer for member in self._swarm().stages[stage] if member.saves and member.state in GOSSIPING]
        order = form.order(self._run_id, stage, label, {*able, self._me})
        while self._due(due) is None:
            alive = [member.peer for member in self._swarm().serving(stage)]
            mine, reason = form.turn(order, self._me, alive, loop.time() - begun, self._patience_s)
            if mine:
                part = await self._store.read(f"{self._place(label)}/{form.part_name(stage)}")
                if part is None:
                    await self._boundary(due)
                return reason if part is None else None
            await asyncio.sleep(self._manifest.limits.announce_period_s)
        return None

    async def _boundary(self, due: int) -> None:
        """Wait for this replica's own end of the round, a moment at most."""
        try:
            async with asyncio.timeout(BOUNDARY_WAIT_S):
                await self._subject.gossip.beyond(due - 1)
        except TimeoutError:
            pass

    async def _save(self, label: str, reason: str) -> None:
        loop = asyncio.get_running_loop()
        subject, begun = self._subject, loop.time()
        round_index = subject.gossip.done
        state, pause_s = await self._compute.run(Priority.OUTER, 0, self._copy)
        feeder = subject.feeder()
        holding = Holding(
            stage=subject.stage,
            round=round_index,
            peer=self._me,
            progress=subject.progress.to_wire(),
            blocks=record_pb2.Blocks() if feeder is None else feeder.finished(),
        )
        place = self._place(label)
        part = await saving.save_stage(
            self._store, place, state, self._shapes, holding, shard_nbytes=self._saving.shard_nbytes
        )
        seconds, nbytes = loop.time() - begun, sum(file.nbytes for file in part.files)
        self._telemetry.count(name.CHECKPOINTS, outcome="saved")
        self._telemetry.gauge(name.CHECKPOINT_SECONDS, seconds)
        self._telemetry.gauge(name.CHECKPOINT_PAUSE_SECONDS, pause_s)
        self._telemetry.event(
            "checkpoint.saved",
            label=label,
            stage=subject.stage,
            round=round_index,
            nbytes=nbytes,
            seconds=round(seconds, 4),
            pause_s=round(pause_s, 6),
            reason=reason,
        )
        await self._complete(label)

    def _copy(self) -> tuple[State, float]:
        """On the compute thread: the state, and the seconds for which training stood still."""
        begun = self._time()
        state = self._subject.replica.snapshot()
        return state, self._time() - begun

    async def _complete(self, label: str) -> None:
        made = await saving.complete(self._store, self._origin, label)
        if made is None:
            return
        self._telemetry.count(name.CHECKPOINTS, outcome="complete")
        self._telemetry.event(
            "checkpoint.complete", label=label, round=made.round, samples_total=made.samples, nbytes=made.nbytes
        )
        gone = await saving.prune(self._store, self._run_id, self._manifest.checkpoint.keep)
        if gone:
            self._telemetry.event("checkpoint.pruned", labels=gone, keep=self._manifest.checkpoint.keep)

    def _failed(self, label: str, error: SwarmnodeError) -> None:
        self._telemetry.count(name.CHECKPOINTS, outcome="failed")
        self._telemetry.event(
            "checkpoint.failed", level="error", label=label, stage=self._subject.stage, reason=str(error)
        )

    def _place(self, label: str) -> str:
        return form.place(self._run_id, label)


async def resume(resumption: Resumption, shapes: Shapes, telemetry: Telemetry, stage: int) -> State:
    """The stage's state from the checkpoint. Raises DataError, LocalFault."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    state = await saving.load_stage(resumption.store, resumption.base, resumption.checkpoint, shapes)
    telemetry.event(
        "checkpoint.loaded",
        label=resumption.checkpoint.label,
        stage=stage,
        samples_total=resumption.checkpoint.samples,
        anew=sorted(form.anew(resumption.checkpoint, shapes)),
        nbytes=sum(section.nbytes for section in state.sections.values()),
        seconds=round(loop.time() - begun, 4),
    )
    return state

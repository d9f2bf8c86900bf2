"""Checkpoints as a task of a node. At each round that is due one replica of the stage saves it; all replicas agree on
which one. Training goes on meanwhile: only the copy of the state is made on the compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarmnode.base.errors import DataError, LocalFault, SwarmnodeError
from swarmnode.base.metrics import name
from swarmnode.base.parted_work import Parts, timed
from swarmnode.base.ports import Priority, State, Store
from swarmnode.base.wire import record_pb2
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery import checkpoint_io
from swarmnode.keep.recovery.checkpoint import Origin
from swarmnode.keep.recovery.checkpoint_io import ReplicaHoldings
from swarmnode.keep.transfer.snapshot import DOWNLOAD_RATE
from swarmnode.model.section import snapshot_nbytes
from swarmnode.net.membership.swarm import GOSSIPING, StageContext
from swarmnode.train.gossip.exchange import Gossip
from swarmnode.train.node.node_ports import NodeContext

PATIENCE_S = 20.0  # guess: until the next replica saves what the one before it has not


class Checkpointer:
    """Saves one replica's stage when a checkpoint is due and it is this replica's turn. `run` reports the errors of a
    store; it never raises them."""

    def __init__(
        self,
        context: NodeContext,
        here: StageContext,
        store: Store,
        gossip: Gossip,
        finished_blocks: Callable[[], record_pb2.Blocks],
    ) -> None:
        """The replica is saved in `store`, with the run's progress and the data blocks finished by then."""
        self._here = here
        self._options = context.ports.saving
        self._store = store
        self._gossip = gossip
        self._progress = context.presence.progress
        self._finished_blocks = finished_blocks
        self._origin = Origin.of(here.manifest, here.run_id, self._options.signed)
        self._shapes = self._options.shapes(here.manifest, here.stage)
        self._wake = asyncio.Event()
        self._time = asyncio.get_running_loop().time
        nbytes = snapshot_nbytes(here.replica.sizes_of(here.stage))
        self._patience_s = PATIENCE_S + nbytes / DOWNLOAD_RATE  # a bucket is behind the same uplink

    def on_progress(self) -> None:
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
        """Save `label` when it is this replica's turn; without the round `due`, now. Errors of the store are reported,
        not raised."""
        try:
            reason = "asked for" if due is None else await self._turn(label, due)
            if reason is not None:
                await self._save(label, reason)
        except (LocalFault, DataError) as error:
            self._failed(label, error)

    def _round(self) -> int:
        """The run's round, the same for all replicas. A replica may itself take part in every second or fourth only."""
        return self._progress.total // self._here.manifest.gossip.round_samples

    def _due(self, saved: int) -> int | None:
        return form.due(self._round(), saved, self._here.manifest.checkpoint.every_rounds)

    async def _turn(self, label: str, due: int) -> str | None:
        """The reason why this replica saves; None once another one has, or when the next checkpoint is due."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        stage = self._here.stage
        able = [
            member.peer for member in self._here.swarm().stages[stage] if member.saves and member.state in GOSSIPING
        ]
        order = form.order(self._here.run_id, stage, label, {*able, self._here.me})
        while self._due(due) is None:
            alive = [member.peer for member in self._here.swarm().serving(stage)]
            mine, reason = form.turn(order, self._here.me, alive, loop.time() - begun, self._patience_s)
            if mine:
                part = await self._store.read(f"{self._place(label)}/{form.part_name(stage)}")
                if part is None:
                    await self._boundary(due)
                return reason if part is None else None
            await asyncio.sleep(self._here.manifest.limits.announce_period_s)
        return None

    async def _boundary(self, due: int) -> None:
        """Wait for this replica's own end of the round, as long as for an exchange at most."""
        try:
            async with asyncio.timeout(self._here.manifest.limits.exchange_timeout_s):
                await self._gossip.beyond(due - 1)
        except TimeoutError:
            pass

    async def _save(self, label: str, reason: str) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        round_index = self._gossip.done
        state, pause_s = await self._here.compute.run(Priority.OUTER, 0, self._copy)
        holding = ReplicaHoldings(
            stage=self._here.stage,
            round=round_index,
            peer=self._here.me,
            progress=self._progress.to_wire(),
            blocks=self._finished_blocks(),
            line=self._gossip.line,
        )
        place = self._place(label)
        part = await checkpoint_io.save_stage(
            self._store, place, state, self._shapes, holding, shard_nbytes=self._options.shard_nbytes
        )
        seconds = loop.time() - begun
        nbytes = sum(file.nbytes for file in part.files)
        self._here.telemetry.count(name.CHECKPOINTS, outcome="saved")
        self._here.telemetry.gauge(name.CHECKPOINT_SECONDS, seconds)
        self._here.telemetry.gauge(name.CHECKPOINT_PAUSE_SECONDS, pause_s)
        self._here.telemetry.event(
            "checkpoint.saved",
            label=label,
            stage=self._here.stage,
            round=round_index,
            nbytes=nbytes,
            seconds=round(seconds, 4),
            pause_s=round(pause_s, 6),
            reason=reason,
        )
        await self._complete(label)

    def _copy(self) -> tuple[State, float] | Parts[tuple[State, float]]:
        """On the compute thread: the state, and the seconds for which training stood still."""
        begun = self._time()
        state = self._here.replica.snapshot_in_parts()
        return (state, self._time() - begun) if isinstance(state, State) else timed(state, self._time)

    async def _complete(self, label: str) -> None:
        saved = await checkpoint_io.complete(self._store, self._origin, label)
        if saved is None:
            return
        self._here.telemetry.count(name.CHECKPOINTS, outcome="complete")
        self._here.telemetry.event(
            "checkpoint.complete", label=label, round=saved.round, samples_total=saved.samples, nbytes=saved.nbytes
        )
        gone = await checkpoint_io.prune(self._store, self._here.run_id, self._here.manifest.checkpoint.keep)
        if gone:
            self._here.telemetry.event("checkpoint.pruned", labels=gone, keep=self._here.manifest.checkpoint.keep)

    def _failed(self, label: str, error: SwarmnodeError) -> None:
        self._here.telemetry.count(name.CHECKPOINTS, outcome="failed")
        self._here.telemetry.event(
            "checkpoint.failed", level="error", label=label, stage=self._here.stage, reason=str(error)
        )

    def _place(self, label: str) -> str:
        return form.place(self._here.run_id, label)

"""A run's archive: complete checkpoints of the swarm's progress, pulled from replicas that hold no keys.

    RUN/round-000000012/phi-00000.stage-0.k3VxA9Qp.safetensors    slow weights by the whole model's names
                        stage-0.json                              written when the stage's files are safe
                        config.json, model.safetensors.index.json ...   make the folder a Hugging Face model
                        checkpoint.json                           written when all of that is there
                        archive.json                              last: agreeing replicas, hashes; then the loss, too

The model can be used from then on, and is measured meanwhile. A killed process leaves files without checkpoint.json,
which the next one deletes, or a checkpoint without archive.json, which it completes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swarmnode.app.machine.archive_catalog import ArchiveCatalog
from swarmnode.app.machine.archive_push import ArchivePush
from swarmnode.app.machine.archive_sources import ArchiveSources, RunCopy, TakenCopy
from swarmnode.app.machine.checkup import DISK_MIN_NBYTES
from swarmnode.app.machine.folder_store import FolderStore
from swarmnode.app.machine.slow_copy import saved_elements
from swarmnode.base.atomic_file import check_free
from swarmnode.base.errors import RemoteFault, SwarmnodeError, Unavailable
from swarmnode.base.ids import PeerId, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.ports import Answer, Call, Store, Telemetry
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery import checkpoint_io
from swarmnode.keep.recovery.archive import (
    EARLY_S,
    NO_SCORES,
    UNMEASURED,
    ArchiveEntry,
    Deserted,
    Scores,
    needed_nbytes,
    next_copy_s,
)
from swarmnode.keep.recovery.checkpoint import Checkpoint, CopyAgreement, Origin
from swarmnode.keep.recovery.checkpoint_io import ReplicaHoldings
from swarmnode.keep.recovery.run_store import RunStore
from swarmnode.keep.transfer.donor import ArchiveBudget
from swarmnode.keep.transfer.snapshot import CHUNK_NBYTES
from swarmnode.model.section import PACKED_ITEMSIZE, section_shapes
from swarmnode.model.split import stages_of
from swarmnode.run.manifest import Manifest

RETRY_S = 1.5 * ArchiveBudget().rest_s  # longer than donors rest after a snapshot that was not pulled
RETRY_MAX_S = 600.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A checkpoint's validation loss or None, its origin ("archive", "swarm", ""), and what [evaluation] of the
    manifest lists."""

    loss: float | None
    origin: str
    scores: Scores = NO_SCORES


Evaluate = Callable[[Path, int], Awaitable[Measured]]
"""Measures the model in a folder, at so many samples of the run."""

ModelFiles = Callable[[Mapping[str, str], int, Mapping[str, object]], Mapping[str, bytes]]
"""The other files of a Hugging Face model, from the file of each parameter, their total bytes, and facts."""


@dataclass(frozen=True, slots=True)
class ArchivePlan:
    """The folder where an archive keeps a run, how often it copies it, how many checkpoints it keeps, and where it
    pushes them."""

    folder: Path
    every_s: float
    keep: int
    push: Store | None = None
    hub: str = ""  # and a repository of the Hugging Face Hub, which gets the newest
    shard_nbytes: int = form.SHARD_NBYTES


class CopyRequests:
    """Wakes an archive that waits for its next copy."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._given = False  # a stage's last replica has left its copy here since the last attempt

    def ask(self) -> None:
        """Somebody wants a newer copy."""
        self._asked.set()

    def give(self) -> None:
        """A stage's last replica has given its copy."""
        self._given = True
        self._asked.set()

    def begin(self) -> None:
        """An attempt begins, with what was given until now."""
        self._given = False

    async def wait(self, wait_s: float, least_s: float) -> None:
        """Wait for `wait_s`, or until a copy is asked for, though for `least_s`, unless a stage's last replica has
        given its copy."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        if not self._given:
            self._asked.clear()
        while (left_s := wait_s - (loop.time() - begun_s)) > 0.0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._asked.wait()
            if self._given:
                return
            if self._asked.is_set():
                self._asked.clear()
                wait_s = least_s


@dataclass(eq=False)
class Archive:
    """Copies the run repeatedly and when asked (`ask`) until cancelled (`run`), or once (`once`)."""

    manifest: Manifest
    origin: Origin
    plan: ArchivePlan
    sources: ArchiveSources
    evaluate: Evaluate
    model_files: ModelFiles
    telemetry: Telemetry

    def __post_init__(self) -> None:
        self._store = RunStore(
            FolderStore(self.plan.folder, "free space or choose another --archive"), self.origin.run_id
        )
        self.catalog = ArchiveCatalog(self._store, self.plan.folder / self._store.place(""), self.telemetry)
        self.push = ArchivePush(self._store, self.plan.push, self.plan.hub, self.telemetry, self._say)
        self.status = "starting"
        """A sentence for the user: what the archive does or waits for."""
        self._current_s = -math.inf  # by the loop's clock: the swarm had nothing newer than the newest entry then
        self._requests = CopyRequests()
        self._taking = [asyncio.Lock() for _ in range(self.manifest.pipeline.stages)]
        self._books = asyncio.Lock()  # one writes what is known of checkpoints
        self._unmeasured = asyncio.Event()

    def _say(self, status: str) -> None:
        self.status = status

    def ask(self, older_s: float) -> bool:
        """Whether the swarm had nothing newer than the newest entry within the last `older_s`. If it may have, `run`
        copies it as soon as donors give it."""
        current = asyncio.get_running_loop().time() - self._current_s <= older_s
        if not current:
            self._requests.ask()
        return current

    async def serve_handover(self, peer: PeerId, call: Call) -> Answer:
        """Handler of "handover": keep the slow weights of `peer`, the last replica of its stage, which leaves, and make
        a checkpoint of them and the other stages as soon as it is answered. Raises as ArchiveSources.take_over, and
        RemoteFault for another run or stage."""
        stage = call.header.handover.stage
        if call.header.run_id != self.sources.run_id or stage >= len(self._taking):
            raise RemoteFault(
                f"handover of {stage_name(stage)} of run {call.header.run_id[:8]!r} to another run's archive"
            )
        nbytes = PACKED_ITEMSIZE["phi"] * self.sources.sizes[stage]["phi"]
        async with self._taking[stage]:
            check_free(self.plan.folder, nbytes + DISK_MIN_NBYTES, "the copy of a stage that is left")
            round_index = await self.sources.take_over(peer, stage)
        self.telemetry.event("archive.handed", peer=peer, stage=stage, round=round_index)
        self._requests.give()
        return Answer(wire.Reply(handed=wire.Handed(round=round_index)))

    async def run(self) -> None:
        """Copy the run after EARLY_S of its training, then every period, when asked, and when a stage's last replica
        leaves; measure the copies beside that. Failures of donors, disk or bucket are logged and retried, never
        raised."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._measuring())
            await self._copying()

    async def _copying(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        began_s = math.inf
        copied_s = 0.0
        while True:
            least_s = 0.0
            try:
                if began_s > loop.time():
                    began_s, copied_s = await self._begin()
                    took_s = 0.0
                else:
                    begun_s = loop.time()
                    self._requests.begin()
                    await self.once()
                    copied_s = loop.time() - began_s
                    took_s = loop.time() - begun_s
                failures = 0
                wait_s = began_s + next_copy_s(copied_s, self.plan.every_s, took_s) - loop.time()
            except (SwarmnodeError, OSError) as error:
                failures += began_s <= loop.time()
                least_s = max(RETRY_S, error.retry_after_s if isinstance(error, Unavailable) else 0.0)
                wait_s = max(least_s, min(RETRY_MAX_S, RETRY_S * 1.5 ** min(failures - 1, 20)))
            await self._requests.wait(wait_s, least_s)

    async def _measuring(self) -> None:
        while True:
            self._unmeasured.clear()
            await self.measure()
            await self._unmeasured.wait()

    async def measure(self) -> None:
        """Measure every checkpoint that is not yet, the newest first, note it in its folder, the bucket and on the
        hub."""
        while labels := [label for label, entry in self.catalog.entries.items() if entry.notes.measured == UNMEASURED]:
            entry = self.catalog.entries[max(labels)]
            if idle := self.status == "ready":
                self.status = f"measures {entry.label}"
            try:
                measured = await self.evaluate(self.catalog.folder_of(entry), entry.checkpoint.samples)
            except (SwarmnodeError, OSError) as error:
                self.telemetry.event("archive.unmeasured", reason=str(error))
                measured = Measured(None, "")
            if idle and self.status == f"measures {entry.label}":
                self.status = "ready"
            async with self._books:
                await self._note(entry.label, measured)

    async def _note(self, label: str, measured: Measured) -> None:
        """Note what was `measured` of a checkpoint, unless it was deleted meanwhile."""
        entry = await self.catalog.measured(label, measured.loss, measured.origin, measured.scores)
        if entry is None:
            return
        for score in measured.scores.scores:
            self.telemetry.gauge(name.ARCHIVE_SCORE, score.value, score=score.name)
        self.telemetry.event("archive.measured", label=label, loss=measured.loss, measured=measured.origin)
        self.push.measured.add(label)
        await self.push.to_store(self.catalog.entries)
        if entry is self.catalog.newest:
            await self.push.to_hub(entry, self.catalog.folder_of(entry))

    async def _begin(self) -> tuple[float, float]:
        """(time at which the run began to train, by the loop's clock, as far as its checkpoints here tell; seconds from
        then to the newest of them). Raises Unavailable if it does not train."""
        try:
            async with self._books:
                await self._tidy()
            now_s = asyncio.get_running_loop().time()
            unix_s = self.sources.clock.unix_s()
            ages_s = [max(0.0, unix_s - entry.notes.unix_s) for entry in self.catalog.entries.values()]
            self._current_s = now_s - min(ages_s, default=math.inf)
            await self.sources.trains()
            self.status = "ready"
        except (SwarmnodeError, OSError) as error:
            self.status = f"waits: {error}"
            raise
        known_s = max(ages_s) + EARLY_S[0] if ages_s else 0.0
        return now_s - known_s, known_s - min(ages_s, default=known_s)

    async def once(self) -> ArchiveEntry:
        """The newest checkpoint of the run, made now unless the run has not advanced since the last one.

        Raises Unavailable, RemoteFault if the swarm gives none, DiskFull and LocalFault if the disk fails.
        """
        begun_s = asyncio.get_running_loop().time()
        try:
            async with self._books:
                await self._tidy()
            copy_run = await self._copy_run(self.catalog.newest)
            entry = self.catalog.newest if copy_run is None else await self._keep(copy_run)
            assert entry is not None, "only a run that has not advanced is not copied"
        except (SwarmnodeError, OSError) as error:
            if isinstance(error, Deserted) and self.catalog.newest is not None:
                self._current_s = begun_s
            waits = isinstance(error, Unavailable | RemoteFault)
            self.status = f"{'waits' if waits else 'cannot write'}: {error}"
            self.telemetry.count(name.ARCHIVES, outcome="failed")
            self.telemetry.event("archive.failed", level="warning" if waits else "error", reason=str(error))
            raise
        self._current_s = begun_s
        async with self._books:
            await self.catalog.prune(self.plan.keep)
            await self.push.to_store(self.catalog.entries)
        self.status = "ready"
        self._unmeasured.set()
        return entry

    async def _tidy(self) -> None:
        """Delete the leftovers of a killed archive, and read what is there."""
        await asyncio.to_thread(shutil.rmtree, self.sources.scratch, ignore_errors=True)
        await self.catalog.read()

    async def _copy_run(self, before: ArchiveEntry | None) -> RunCopy | None:
        sizes = [PACKED_ITEMSIZE["phi"] * of["phi"] for of in self.sources.sizes]
        check_free(self.plan.folder, needed_nbytes(sizes, CHUNK_NBYTES) + DISK_MIN_NBYTES, "the next checkpoint")
        self.sources.scratch.mkdir(parents=True, exist_ok=True)
        self.status = "copies the run"
        if before is None:
            return await self.sources.copy_run()
        checkpoint = before.checkpoint
        same = checkpoint.origin.stages == self.origin.stages  # cut otherwise, parameters have another order
        last = partial(saved_elements, self.catalog.folder_of(before), checkpoint) if same else None
        return await self.sources.copy_run(last, checkpoint.round)

    async def _keep(self, copy_run: RunCopy) -> ArchiveEntry:
        """Write `copy_run` as a complete checkpoint."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        label = form.label(copy_run.round_index)
        copied_unix_s = self.sources.clock.unix_s()
        if label in self.catalog.entries:
            return self.catalog.entries[label]
        for stage, taken in enumerate(copy_run.stages):
            await self._save_stage(label, stage, taken, copy_run)
            self.sources.release(taken.copy)
        checkpoint = await checkpoint_io.assembled(self._store.store, self.origin, label)
        assert checkpoint is not None, "every stage was saved"
        for file, data in self._files(checkpoint).items():
            await self._store.write(label, file, data)
        await checkpoint_io.complete(self._store.store, self.origin, label)
        entry = await self.catalog.add(label, copied_unix_s)
        self.telemetry.count(name.ARCHIVES, outcome="saved")
        self.telemetry.gauge(name.ARCHIVE_SAMPLES, float(entry.checkpoint.samples))
        self.telemetry.event(
            "archive.saved",
            label=label,
            round=entry.checkpoint.round,
            samples_total=entry.checkpoint.samples,
            nbytes=entry.nbytes,
            seconds=round(loop.time() - begun, 3),
        )
        return entry

    async def _save_stage(self, label: str, stage: int, taken: TakenCopy, copy_run: RunCopy) -> None:
        part = stages_of(self.manifest)[stage]
        shapes = {"phi": section_shapes(self.manifest, part)["phi"]}
        verdict = taken.verdict
        holding = ReplicaHoldings(
            stage,
            taken.copy.offer.round,
            taken.copy.peer,
            copy_run.progress,
            copy_run.blocks,
            run_id=self.origin.run_id,
            agreement=CopyAgreement(verdict.agree, verdict.liars, verdict.reason),
        )
        await checkpoint_io.save_stage(
            self._store.store,
            self._store.place(label),
            taken.copy.state(),
            shapes,
            holding,
            shard_nbytes=self.plan.shard_nbytes,
        )

    def _files(self, checkpoint: Checkpoint) -> Mapping[str, bytes]:
        where = {tensor: file.name for file in checkpoint.files for tensor in file.tensors}
        about = {"run_id": self.origin.run_id, "run_name": self.origin.run_name}
        about |= {"kind": f"archive {checkpoint.label}"}
        numbers = {"round": checkpoint.round, "samples": checkpoint.samples, "replicas": 1}
        return self.model_files(where, checkpoint.nbytes, {**about, **numbers})

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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from swarmnode.app.machine.archive_entries import entry_of, record
from swarmnode.app.machine.archive_push import ArchivePush
from swarmnode.app.machine.archive_sources import ArchiveSources, RunCopy, TakenCopy
from swarmnode.app.machine.checkup import DISK_MIN_NBYTES
from swarmnode.app.machine.folder_store import FolderStore
from swarmnode.app.machine.slow_copy import saved_elements
from swarmnode.base.atomic_file import TEMPORARY, check_free
from swarmnode.base.errors import DataError, LocalFault, RemoteFault, SwarmnodeError, Unavailable
from swarmnode.base.ids import PeerId, stage_name
from swarmnode.base.metrics import name
from swarmnode.base.ports import Answer, Call, Store, Telemetry
from swarmnode.base.wire import call_pb2 as wire
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery import checkpoint_io
from swarmnode.keep.recovery.archive import (
    ABOUT,
    EARLY_S,
    NO_SCORES,
    UNMEASURED,
    ArchiveEntry,
    Deserted,
    Scores,
    labels_to_keep,
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
        self.push = ArchivePush(self._store, self.plan.push, self.plan.hub, self.telemetry, self._say)
        self.entries: dict[str, ArchiveEntry] = {}
        """Complete checkpoints by label."""
        self.status = "starting"
        """A sentence for the user: what the archive does or waits for."""
        self._current_s = -math.inf  # by the loop's clock: the swarm had nothing newer than `newest` then
        self._asked = asyncio.Event()
        self._given = False  # a stage's last replica has left its copy here since the last attempt
        self._taking = [asyncio.Lock() for _ in range(self.manifest.pipeline.stages)]
        self._books = asyncio.Lock()  # one writes what is known of checkpoints
        self._unmeasured = asyncio.Event()

    @property
    def folder(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.plan.folder / self._store.place("")

    @property
    def newest(self) -> ArchiveEntry | None:
        """The entry of the latest round."""
        return self.entries[max(self.entries)] if self.entries else None

    @property
    def best(self) -> ArchiveEntry | None:
        """The entry with the lowest validation loss, of those measured here: what nodes report, one of them may have
        made up."""
        measured = [entry for entry in self.entries.values() if entry.loss is not None and entry.measured == "archive"]
        return min(measured, key=lambda entry: (entry.loss, entry.label), default=None)

    def folder_of(self, entry: ArchiveEntry) -> Path:
        """The folder of an entry's files."""
        return self.folder / entry.label

    def _say(self, status: str) -> None:
        self.status = status

    def ask(self, older_s: float) -> bool:
        """Whether the swarm had nothing newer than `newest` within the last `older_s`. If it may have, `run` copies it
        as soon as donors give it."""
        current = asyncio.get_running_loop().time() - self._current_s <= older_s
        if not current:
            self._asked.set()
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
        self._given = True
        self._asked.set()
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
                    self._given = False
                    await self.once()
                    copied_s = loop.time() - began_s
                    took_s = loop.time() - begun_s
                failures = 0
                wait_s = began_s + next_copy_s(copied_s, self.plan.every_s, took_s) - loop.time()
            except (SwarmnodeError, OSError) as error:
                failures += began_s <= loop.time()
                least_s = max(RETRY_S, error.retry_after_s if isinstance(error, Unavailable) else 0.0)
                wait_s = max(least_s, min(RETRY_MAX_S, RETRY_S * 1.5 ** min(failures - 1, 20)))
            await self._wait(wait_s, least_s)

    async def _wait(self, wait_s: float, least_s: float) -> None:
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

    async def _measuring(self) -> None:
        while True:
            self._unmeasured.clear()
            await self.measure()
            await self._unmeasured.wait()

    async def measure(self) -> None:
        """Measure every checkpoint that is not yet, the newest first, note it in its folder, the bucket and on the
        hub."""
        while labels := [label for label, entry in self.entries.items() if entry.measured == UNMEASURED]:
            entry = self.entries[max(labels)]
            if idle := self.status == "ready":
                self.status = f"measures {entry.label}"
            try:
                measured = await self.evaluate(self.folder_of(entry), entry.samples)
            except (SwarmnodeError, OSError) as error:
                self.telemetry.event("archive.unmeasured", reason=str(error))
                measured = Measured(None, "")
            if idle and self.status == f"measures {entry.label}":
                self.status = "ready"
            async with self._books:
                await self._note(entry, measured)

    async def _note(self, entry: ArchiveEntry, measured: Measured) -> None:
        """Write what was `measured` of a checkpoint, unless it was deleted meanwhile."""
        if entry.label not in self.entries:
            return
        found = replace(entry, loss=measured.loss, measured=measured.origin, scores=measured.scores)
        self.entries[entry.label] = found
        try:
            await self._store.write(entry.label, ABOUT, found.to_text())
        except (LocalFault, DataError) as error:  # the next process measures it again
            self.telemetry.event("archive.failed", level="error", label=entry.label, reason=str(error))
        for score in measured.scores.scores:
            self.telemetry.gauge(name.ARCHIVE_SCORE, score.value, score=score.name)
        self.telemetry.event("archive.measured", label=entry.label, loss=measured.loss, measured=measured.origin)
        self.push.measured.add(entry.label)
        await self.push.to_store(self.entries)
        if found is self.newest:
            await self.push.to_hub(found, self.folder_of(found))

    async def _begin(self) -> tuple[float, float]:
        """(time at which the run began to train, by the loop's clock, as far as its checkpoints here tell; seconds from
        then to the newest of them). Raises Unavailable if it does not train."""
        try:
            async with self._books:
                await self._tidy()
            now_s = asyncio.get_running_loop().time()
            unix_s = self.sources.clock.unix_s()
            ages_s = [max(0.0, unix_s - entry.unix_s) for entry in self.entries.values()]
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
            copy_run = await self._copy_run(self.newest)
            entry = self.newest if copy_run is None else await self._keep(copy_run)
            assert entry is not None, "only a run that has not advanced is not copied"
        except (SwarmnodeError, OSError) as error:
            if isinstance(error, Deserted) and self.newest is not None:
                self._current_s = begun_s
            waits = isinstance(error, Unavailable | RemoteFault)
            self.status = f"{'waits' if waits else 'cannot write'}: {error}"
            self.telemetry.count(name.ARCHIVES, outcome="failed")
            self.telemetry.event("archive.failed", level="warning" if waits else "error", reason=str(error))
            raise
        self._current_s = begun_s
        async with self._books:
            await self._prune()
            await self.push.to_store(self.entries)
        self.status = "ready"
        self._unmeasured.set()
        return entry

    async def _tidy(self) -> None:
        """Delete the leftovers of a killed archive, and complete its almost finished checkpoints."""
        await asyncio.to_thread(shutil.rmtree, self.sources.scratch, ignore_errors=True)
        for folder in await asyncio.to_thread(_incomplete, self.folder):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            self.telemetry.event("archive.pruned", labels=[folder.name], reason="it was not complete")
        entries = dict[str, ArchiveEntry]()  # the page shows those of before meanwhile
        for label in await self._store.labels():
            try:
                root = self.folder / label / form.ROOT  # written last: an archive that ended measured it no more
                entries[label] = await entry_of(self._store, label) or await record(
                    self._store, label, root.stat().st_mtime
                )
            except DataError as error:  # left to its owner: it is neither offered nor deleted
                self.telemetry.event("archive.failed", level="error", label=label, reason=str(error))
        self.entries = entries

    async def _copy_run(self, before: ArchiveEntry | None) -> RunCopy | None:
        sizes = [PACKED_ITEMSIZE["phi"] * of["phi"] for of in self.sources.sizes]
        check_free(self.plan.folder, needed_nbytes(sizes, CHUNK_NBYTES) + DISK_MIN_NBYTES, "the next checkpoint")
        self.sources.scratch.mkdir(parents=True, exist_ok=True)
        self.status = "copies the run"
        if before is None:
            return await self.sources.copy_run()
        checkpoint = form.checkpoint_of(await self._store.read(before.label, form.ROOT), before.label)
        same = checkpoint.origin.stages == self.origin.stages  # cut otherwise, parameters have another order
        last = partial(saved_elements, self.folder_of(before), checkpoint) if same else None
        return await self.sources.copy_run(last, before.round)

    async def _keep(self, copy_run: RunCopy) -> ArchiveEntry:
        """Write `copy_run` as a complete checkpoint."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        label = form.label(copy_run.round_index)
        copied_unix_s = self.sources.clock.unix_s()
        if label in self.entries:
            return self.entries[label]
        for stage, taken in enumerate(copy_run.stages):
            await self._save_stage(label, stage, taken, copy_run)
            self.sources.release(taken.copy)
        checkpoint = await checkpoint_io.assembled(self._store.store, self.origin, label)
        assert checkpoint is not None, "every stage was saved"
        for file, data in self._files(checkpoint).items():
            await self._store.write(label, file, data)
        await checkpoint_io.complete(self._store.store, self.origin, label)
        entry = self.entries[label] = await record(self._store, label, copied_unix_s)
        self.telemetry.count(name.ARCHIVES, outcome="saved")
        self.telemetry.gauge(name.ARCHIVE_SAMPLES, float(entry.samples))
        self.telemetry.event(
            "archive.saved",
            label=label,
            round=entry.round,
            samples_total=entry.samples,
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

    async def _prune(self) -> None:
        stay = labels_to_keep({label: entry.loss for label, entry in self.entries.items()}, self.plan.keep)
        gone = sorted(self.entries.keys() - stay)
        for label in gone:
            del self.entries[label]
            await self._store.delete(label)
        if gone:
            self.telemetry.event("archive.pruned", labels=gone, keep=self.plan.keep)


def _incomplete(folder: Path) -> list[Path]:
    """Incomplete checkpoints below `folder`. Partial files of the others are deleted."""
    if not folder.is_dir():
        return []
    for part in folder.glob(f"*/*{TEMPORARY}"):
        part.unlink(missing_ok=True)
    return [each for each in sorted(folder.iterdir()) if each.is_dir() and not (each / form.ROOT).is_file()]

"""The complete checkpoints in an archive's folder, and what is noted of each."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

from swarmnode.base.atomic_file import TEMPORARY
from swarmnode.base.errors import DataError, LocalFault
from swarmnode.base.ports import Telemetry
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery.archive import ABOUT, ArchiveEntry, ArchiveNotes, Scores, labels_to_keep
from swarmnode.keep.recovery.checkpoint import Checkpoint
from swarmnode.keep.recovery.run_store import RunStore


class ArchiveCatalog:
    """The checkpoints of one run below `folder`, which `store` writes."""

    def __init__(self, store: RunStore, folder: Path, telemetry: Telemetry) -> None:
        self._store = store
        self.folder = folder
        self._telemetry = telemetry
        self.entries: dict[str, ArchiveEntry] = {}
        """By label."""

    @property
    def newest(self) -> ArchiveEntry | None:
        """The entry of the latest round."""
        return self.entries[max(self.entries)] if self.entries else None

    @property
    def best(self) -> ArchiveEntry | None:
        """The entry with the lowest validation loss, of those measured here: what nodes report, one of them may have
        made up."""
        measured = [
            (entry.notes.loss, label, entry)
            for label, entry in self.entries.items()
            if entry.notes.loss is not None and entry.notes.measured == "archive"
        ]
        return min(measured)[2] if measured else None

    def folder_of(self, entry: ArchiveEntry) -> Path:
        """The folder of an entry's files."""
        return self.folder / entry.label

    async def read(self) -> None:
        """Read the folder. What a killed archive left is deleted; what it had almost finished is noted."""
        for folder in await asyncio.to_thread(_incomplete, self.folder):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            self._telemetry.event("archive.pruned", labels=[folder.name], reason="it was not complete")
        entries = dict[str, ArchiveEntry]()  # the page shows those of before meanwhile
        for label in await self._store.labels():
            try:
                entries[label] = await self._read(label)
            except DataError as error:  # left to its owner: it is neither offered nor deleted
                self._telemetry.event("archive.failed", level="error", label=label, reason=str(error))
        self.entries = entries

    async def _read(self, label: str) -> ArchiveEntry:
        """A complete checkpoint; notes that are missing or damaged are made. Raises DataError."""
        checkpoint = await self.checkpoint(label)
        with contextlib.suppress(DataError):
            raw = await self._store.read(label, ABOUT)
            return ArchiveEntry(checkpoint, ArchiveNotes.of_text(raw, f"{self._store.place(label)}/{ABOUT}"))
        root = self.folder / label / form.ROOT  # written last: an archive that ended measured it no more
        return await self._noted(checkpoint, root.stat().st_mtime)

    async def checkpoint(self, label: str) -> Checkpoint:
        """The index of a complete checkpoint. Raises DataError where it is damaged."""
        return form.checkpoint_of(await self._store.read(label, form.ROOT), f"{self._store.place(label)}/{form.ROOT}")

    async def add(self, label: str, copied_unix_s: float) -> ArchiveEntry:
        """Note the complete checkpoint `label`, copied then, which is still to be measured. Raises DataError,
        LocalFault."""
        entry = self.entries[label] = await self._noted(await self.checkpoint(label), copied_unix_s)
        return entry

    async def _noted(self, checkpoint: Checkpoint, copied_unix_s: float) -> ArchiveEntry:
        label = checkpoint.label
        listed = {ABOUT, *(file.name for file in checkpoint.files)}
        files = []
        for file, nbytes in (await self._store.labels())[label].items():
            if file not in listed:
                files.append((file, nbytes, hashlib.sha256(await self._store.read(label, file)).hexdigest()))
        notes = ArchiveNotes(copied_unix_s, files=tuple(files))
        await self._store.write(label, ABOUT, notes.to_text())
        return ArchiveEntry(checkpoint, notes)

    async def measured(self, label: str, loss: float | None, origin: str, scores: Scores) -> ArchiveEntry | None:
        """Note what was measured of `label`; None if it was deleted meanwhile."""
        if (entry := self.entries.get(label)) is None:
            return None
        notes = replace(entry.notes, loss=loss, measured=origin, scores=scores)
        entry = self.entries[label] = replace(entry, notes=notes)
        try:
            await self._store.write(label, ABOUT, notes.to_text())
        except (LocalFault, DataError) as error:  # the next process measures it again
            self._telemetry.event("archive.failed", level="error", label=label, reason=str(error))
        return entry

    async def prune(self, keep: int) -> None:
        """Delete all but the newest `keep` and the best."""
        stay = labels_to_keep({label: entry.notes.loss for label, entry in self.entries.items()}, keep)
        gone = sorted(self.entries.keys() - stay)
        for label in gone:
            del self.entries[label]
            await self._store.delete(label)
        if gone:
            self._telemetry.event("archive.pruned", labels=gone, keep=keep)


def _incomplete(folder: Path) -> list[Path]:
    """Incomplete checkpoints below `folder`. Partial files of the others are deleted."""
    if not folder.is_dir():
        return []
    for part in folder.glob(f"*/*{TEMPORARY}"):
        part.unlink(missing_ok=True)
    return [each for each in sorted(folder.iterdir()) if each.is_dir() and not (each / form.ROOT).is_file()]

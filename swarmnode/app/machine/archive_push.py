"""An archive's checkpoints elsewhere: a bucket or folder that holds the same, and a repository that holds the newest.

A failure is logged and retried the next time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from swarmnode.app.machine.hub import push_folder
from swarmnode.base.errors import DataError, LocalFault, SwarmnodeError
from swarmnode.base.ports import Store, Telemetry
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery.archive import ABOUT, ArchiveEntry
from swarmnode.keep.recovery.run_store import RunStore


class ArchivePush:
    """Pushes the checkpoints in `here` to a `store` and to the repository `hub`, if there are such."""

    def __init__(
        self, here: RunStore, store: Store | None, hub: str, telemetry: Telemetry, say: Callable[[str], None]
    ) -> None:
        """`say` is told what is done, in a sentence for the user."""
        self._here = here
        self._there = None if store is None else here.at(store)
        self._hub = hub
        self._telemetry = telemetry
        self._say = say
        self.measured = set[str]()
        """Labels of checkpoints that were measured, whose numbers the store does not have yet."""
        self._on_hub = ""  # the label that the hub's repository has

    async def to_store(self, entries: Mapping[str, ArchiveEntry]) -> None:
        """Make the store hold the checkpoints `entries`, and no others."""
        if self._there is None:
            return
        try:
            await self._synchronise(self._there, entries)
        except (LocalFault, DataError) as error:
            self._failed(str(self._there.store), error)

    async def _synchronise(self, there: RunStore, entries: Mapping[str, ArchiveEntry]) -> None:
        labels = await there.labels()
        for label in sorted(entries.keys() - {at for at, names in labels.items() if ABOUT in names}):
            self._say(f"pushes {label} to {there.store}")
            names = (await self._here.labels())[label]
            for each in sorted(names, key=lambda each: (each == ABOUT, each == form.ROOT, each)):
                await there.write(label, each, await self._here.read(label, each))
            self._telemetry.event("archive.pushed", label=label, where=str(there.store))
            self.measured.discard(label)
        for label in sorted(self.measured & entries.keys()):
            await there.write(label, ABOUT, entries[label].notes.to_text())
        self.measured.clear()
        for label in labels.keys() - entries.keys():
            await there.delete(label)

    async def to_hub(self, entry: ArchiveEntry, folder: Path) -> None:
        """Make the hub's repository hold `entry`, whose files are in `folder`, once."""
        if not self._hub or entry.label == self._on_hub:
            return
        self._say(f"pushes {entry.label} to {self._hub}")
        told = "" if entry.notes.loss is None else f", held-out loss {entry.notes.loss:.4f}"
        message = f"round {entry.checkpoint.round}, {entry.checkpoint.samples:,} samples{told}"
        try:
            where = await asyncio.to_thread(push_folder, folder, self._hub, entry.label, message)
        except SwarmnodeError as error:
            self._failed(self._hub, error)
        else:
            self._on_hub = entry.label
            self._telemetry.event("archive.pushed", label=entry.label, where=where)

    def _failed(self, where: str, error: SwarmnodeError) -> None:
        self._telemetry.event("archive.push_failed", level="error", where=where, reason=str(error))

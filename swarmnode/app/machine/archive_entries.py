"""The records that an archive keeps in the folders of its checkpoints."""

from __future__ import annotations

import contextlib
import hashlib

from swarmnode.base.errors import DataError
from swarmnode.keep.recovery import checkpoint as form
from swarmnode.keep.recovery.archive import ABOUT, UNMEASURED, ArchiveEntry, StageProvenance, read_entry
from swarmnode.keep.recovery.run_store import RunStore


async def entry_of(store: RunStore, label: str) -> ArchiveEntry | None:
    """The record of a complete checkpoint; None if it is missing or damaged."""
    with contextlib.suppress(DataError):
        return read_entry(await store.read(label, ABOUT), f"{store.place(label)}/{ABOUT}")
    return None


async def record(store: RunStore, label: str, copied_unix_s: float) -> ArchiveEntry:
    """Record what is known of the complete checkpoint `label`, copied then, which is still to be measured. Raises
    DataError where it is damaged."""
    place = store.place(label)
    checkpoint = form.checkpoint_of(await store.read(label, form.ROOT), f"{place}/{form.ROOT}")
    provenance = tuple([StageProvenance.of(part) for part in checkpoint.parts])
    hashes = {file.name: file.sha256 for file in checkpoint.files}
    files = []
    for file, nbytes in (await store.labels())[label].items():
        if file not in (ABOUT, *hashes):
            hashes[file] = hashlib.sha256(await store.read(label, file)).hexdigest()
        if file != ABOUT:
            files.append((file, nbytes, hashes[file]))
    numbers = checkpoint.round, checkpoint.samples, copied_unix_s
    entry = ArchiveEntry(label, *numbers, None, UNMEASURED, provenance, tuple(files))
    await store.write(label, ABOUT, entry.to_text())
    return entry

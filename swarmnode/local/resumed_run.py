"""`swarmnode up --resume`: choose the checkpoint, and make the folder of the session that resumes from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.errors import UsageError
from swarmnode.local.model_source import manifest_in
from swarmnode.local.run_folder import RunFolder, prepare, prepare_given
from swarmnode.machine import checkup
from swarmnode.machine.bucket_store import open_store
from swarmnode.manifest import verify
from swarmnode.recovery.resumption import Resumption


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """A session that resumes from `where`, a folder or URL that each of its nodes can read."""

    prepared: RunFolder
    where: str
    resumption: Resumption


def resume(
    text: str,
    run: Path | None,
    nodes: int,
    stages: int | None,
    stamp: str,
    note: Callable[[str], None],
    data_root: Path | None = None,
) -> ResumedRun:
    """The newest intact checkpoint at `text` (every byte is read), and a session of `run` that resumes from it. With
    `run` None it uses the checkpoint's own manifest, and needs a `data_root` if that reads files. Raises UsageError,
    DataError, ManifestError."""
    resumption = asyncio.run(_choose(text, note))
    origin = resumption.checkpoint.origin
    where = resumption.where
    if run is None:
        signed = manifest_in(resumption)
        if verify(signed, None)[0].data.names_files and data_root is None:
            raise UsageError(
                f"--resume {text}: run {origin.run_name!r} reads files: give RUN, or --data-root with their folder"
            )
        prepared = replace(prepare_given(signed, nodes, stages, stamp), data_root=data_root)
    else:
        prepared = prepare(run, nodes, stages, stamp, data_root)
    checkup.check(resumption, prepared.manifest, prepared.run_id, other=True, where=where)
    if prepared.run_id != origin.run_id:
        note(f"resumes from run {origin.run_id[:16]} ({origin.run_name}, {origin.stages} stages) as a new run")
    return ResumedRun(prepared, where, resumption)


def check_store(where: str) -> None:
    """Raises UsageError, LocalFault if checkpoints cannot be kept at `where`; called before anything is started."""
    asyncio.run(open_store(where).names())


async def _choose(text: str, note: Callable[[str], None]) -> Resumption:
    return await checkup.intact(await checkup.find_resumptions(text, None, note), note)

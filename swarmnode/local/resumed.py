"""`swarmnode up --resume`: which checkpoint, and the folder of the session that goes on from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.errors import UsageError
from swarmnode.local.folder import RunFolder, prepare, prepare_given
from swarmnode.local.gathered import manifest_in
from swarmnode.manifest import verify
from swarmnode.node import resuming
from swarmnode.node.bucket import open_store
from swarmnode.node.saver import Resumption


@dataclass(frozen=True, slots=True)
class Resumed:
    """A session that goes on from `where`, a folder or URL that every node of it can read."""

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
) -> Resumed:
    """The newest intact checkpoint at `text` (every byte is read), and a session of `run` to go on from it: of the
    checkpoint's own manifest when `run` is None, which then needs a `data_root` if it reads files. Raises UsageError,
    DataError, ManifestError.
    """
    resumption = asyncio.run(_choose(text, note))
    origin = resumption.checkpoint.origin
    where = resumption.where
    if run is None:
        signed = manifest_in(resumption)
        if verify(signed, None)[0].data.names_files and data_root is None:
            raise UsageError(
                f"--resume {text}: run {origin.run_name!r} reads files: give RUN, or --data-root FOLDER where they lie"
            )
        prepared = replace(prepare_given(signed, nodes, stages, stamp), data_root=data_root)
    else:
        prepared = prepare(run, nodes, stages, stamp, data_root)
    resuming.check(resumption, prepared.manifest, prepared.run_id, other=True, where=where)
    if prepared.run_id != origin.run_id:
        note(f"goes on from run {origin.run_id[:16]} ({origin.run_name}, {origin.stages} stages) as a new run")
    return Resumed(prepared, where, resumption)


def check_store(where: str) -> None:
    """Raises UsageError, LocalFault when checkpoints cannot be kept at `where`: before anything is started."""
    asyncio.run(open_store(where).names())


async def _choose(text: str, note: Callable[[str], None]) -> Resumption:
    return await resuming.intact(await resuming.find_resumptions(text, None, note), note)

"""Find the checkpoint for `--resume`, and check whether this run can resume from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from swarmnode.errors import DataError, RemoteFault, UsageError
from swarmnode.ids import RunId
from swarmnode.machine.bucket_store import is_url, open_store
from swarmnode.manifest import Manifest
from swarmnode.recovery import checkpoint as form
from swarmnode.recovery import checkpoint_io
from swarmnode.recovery.resumption import Resumption

Note = Callable[[str], None]

FOLDER = "checkpoints"  # in a session folder of `up`, beside its nodes' homes


async def find_resumptions(text: str, run_id: RunId | None, note: Note = lambda text: None) -> list[Resumption]:
    """Checkpoints at `text`, newest first, at least one: `text` is a checkpoint's folder, a folder or URL of several,
    or the folder of an `up` session. `note` is called for newer torn ones.

    Raises UsageError, DataError, LocalFault.
    """
    if not is_url(text):
        path = Path(text).expanduser()  # noqa: ASYNC240  once, before anything else
        if not path.is_dir():
            raise UsageError(f"--resume {text}: no such folder")
        if (path / FOLDER).is_dir() and not (path / form.ROOT).is_file():
            path /= FOLDER
        text = str(path.resolve())
    store = open_store(text)
    found = await checkpoint_io.find(store)
    good = checkpoint_io.usable(found, text, run_id)
    for each in found[::-1]:
        if each.fault is None:
            break
        note(f"{each.name} cannot be used: {each.fault}")
    for base, checkpoint in good:
        try:
            checkpoint_io.progress_of(checkpoint)
        except RemoteFault as fault:
            raise DataError(f"{text}/{base}{form.ROOT}: {fault}") from None
    return [Resumption(store, base, checkpoint) for base, checkpoint in good]


async def intact(candidates: list[Resumption], note: Note) -> Resumption:
    """The newest of `candidates` with every byte intact. Raises DataError if there is none."""
    last: DataError | None = None
    for resumption in candidates:
        try:
            await checkpoint_io.verify(resumption.store, resumption.base, resumption.checkpoint)
        except DataError as failure:
            note(f"{resumption.checkpoint.label} cannot be used: {failure}")
            last = failure
        else:
            return resumption
    assert last is not None, "no candidates"
    raise last


def check(resumption: Resumption, manifest: Manifest, run_id: RunId, *, other: bool, where: str) -> None:
    """Raises DataError unless `manifest`, run `run_id`, can resume from it; another run's only if `other`."""
    form.check_fits(resumption.checkpoint, manifest, where)
    theirs = resumption.checkpoint.origin
    if theirs.run_id != run_id and not other:
        raise DataError(
            f"{where}: a checkpoint of run {theirs.run_id[:16]} ({theirs.run_name}), not of {run_id[:16]}; use"
            " --resume-other to resume from it in this run"
        )

"""What `export`, `eval` and `generate` are given: a session's folder, a checkpoint, or an exported model."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from swarmnode.errors import DataError, SwarmnodeError, UsageError
from swarmnode.manifest import MANIFEST_FILE, SIGNED_FILE, Manifest, read_manifest, read_signed, verify
from swarmnode.node import resuming
from swarmnode.node.bucket import is_url
from swarmnode.node.saver import Resumption
from swarmnode.recovery import saving
from swarmnode.recovery.checkpoint import ROOT
from swarmnode.wire.record_pb2 import SignedManifest

if TYPE_CHECKING:
    from swarmnode.model.gather import Gathered

ABOUT = "swarmnode.json"

Note = Callable[[str], None]
Moved = Callable[[int, int], None]
"""Told of bytes read so far, and of all there are."""


def gather(source: str, kind: str, note: Note, moved: Moved = lambda done, of: None) -> tuple[Gathered, Path]:
    """All copies of stages at `source`, and the folder at which the manifest's relative paths begin.

    `kind` "stages": what nodes saved when they left; "checkpoint": the newest intact one; "auto": the first of exported
    model, stages, checkpoint that makes a whole model. Raises UsageError, DataError, LocalFault.
    """
    folder = Path(source).expanduser()
    if is_url(source):
        return _of_checkpoint(source, note, moved), Path.cwd()
    if not folder.is_dir():
        raise UsageError(f"{source}: no such folder; give a run's or a session's folder, a checkpoint or an export")
    from swarmnode.model import gather as models

    if kind == "auto" and (folder / "model.safetensors").is_file():
        return models.of_export(folder, manifest_of(folder), models.read_about(folder)), folder
    failure: SwarmnodeError | None = None
    if kind != "checkpoint":
        files = _stage_files(folder)
        if files:
            try:
                return models.of_stage_files(files, manifest_of(folder)), data_folder(folder)
            except DataError as error:
                failure = error
                note(f"{error}; looking for a checkpoint instead") if kind == "auto" else None
        elif kind == "stages":
            raise UsageError(f"no saved stage (stage-*.safetensors) below {folder}: nodes save theirs when they leave")
    if failure is not None and kind == "stages":
        raise failure
    try:
        return _of_checkpoint(source, note, moved), data_folder(folder)
    except (DataError, UsageError):
        if failure is not None:
            raise failure from None
        if any(folder.rglob(ROOT)):
            raise  # there is a checkpoint, and it says what is wrong with it
        raise UsageError(
            f"no saved stage (stage-*.safetensors), no checkpoint and no exported model in {source}"
        ) from None


def _stage_files(folder: Path) -> list[Path]:
    """What nodes saved when they left; of several sessions of a run that of the last one."""
    sessions = sorted({path.parents[1] for path in folder.glob("up-*/*/stage-*.safetensors")})
    return sorted((sessions[-1] if sessions else folder).rglob("stage-*.safetensors"))


def manifest_of(folder: Path) -> Manifest:
    """Of a session's or an exported model's folder. Raises UsageError when there is none."""
    if (folder / SIGNED_FILE).is_file():
        return read_signed(folder / SIGNED_FILE)[1]
    if (folder / MANIFEST_FILE).is_file():
        return read_manifest(folder / MANIFEST_FILE)
    raise UsageError(f"{folder} has neither {SIGNED_FILE} nor {MANIFEST_FILE}: is it the folder of a run?")


def data_folder(folder: Path) -> Path:
    """Where relative paths of the manifest begin: the run's folder, which is above a session's."""
    return folder.parent if (folder.parent / MANIFEST_FILE).is_file() else folder


def manifest_in(resumption: Resumption) -> SignedManifest:
    """The signed manifest in a checkpoint. Raises DataError, ManifestError."""
    try:
        signed = SignedManifest.FromString(base64.b64decode(resumption.checkpoint.origin.manifest, validate=True))
    except (binascii.Error, DecodeError):
        raise DataError(f"{resumption.where}: its manifest cannot be read; give RUN, the folder of the run") from None
    verify(signed, None)
    return signed


def _of_checkpoint(source: str, note: Note, moved: Moved) -> Gathered:
    from swarmnode.model import gather as models

    resumption, tensors = asyncio.run(_read(source, note, moved))
    checkpoint = resumption.checkpoint
    manifest, run_id = verify(manifest_in(resumption), None)
    peers = " ".join(part.peer[-8:] for part in checkpoint.parts)
    empty = models.Gathered(
        manifest, run_id, checkpoint.round, checkpoint.samples, (), f"checkpoint {checkpoint.label}"
    )
    return models.of_buffers([(peers, tensors)], empty, resumption.where)


async def _read(source: str, note: Note, moved: Moved) -> tuple[Resumption, saving.Tensors]:
    """The newest checkpoint whose parameters are all as they were saved."""
    failure: DataError | None = None
    for resumption in await resuming.find_resumptions(source, None, note):
        whole = sum(file.nbytes for file in resumption.checkpoint.files if file.section == "theta")
        seen = 0

        def count(nbytes: int, whole: int = whole) -> None:
            nonlocal seen
            seen += nbytes
            moved(seen, whole)

        try:
            return resumption, await saving.load_tensors(
                resumption.store, resumption.base, resumption.checkpoint, "theta", moved=count
            )
        except DataError as error:
            failure = error
            note(f"{resumption.checkpoint.label} cannot be used: {failure}")
    assert failure is not None
    raise failure

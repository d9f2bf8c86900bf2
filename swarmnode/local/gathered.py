"""What `export`, `eval` and `generate` are given: a session's folder, a checkpoint, or an exported model."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True)
class Weights:
    """Which weights of a run are taken: of replicas that left their running mean, or with `last` their last weights; of
    checkpoints the mean of the newest `checkpoints` (WSM, arXiv 2507.17634)."""

    last: bool = False
    checkpoints: int = 1


NEWEST = Weights()


def gather(
    source: str, kind: str, note: Note, moved: Moved = lambda done, of: None, weights: Weights = NEWEST
) -> tuple[Gathered, Path | None]:
    """All copies of stages at `source`, and the folder that the manifest's paths lie below; None for a bucket.

    `kind` "stages": what nodes saved when they left; "checkpoint": the newest intact one; "auto": the first of exported
    model, stages, checkpoint that makes a whole model; checkpoints alone where `weights` asks for several. Raises
    UsageError, DataError, LocalFault.
    """
    folder = Path(source).expanduser()
    if weights.checkpoints > 1:
        if kind == "stages":
            raise UsageError("--average is of checkpoints: give --from checkpoint, or leave it out")
        kind = "checkpoint"
    if is_url(source):
        return _of_checkpoint(source, note, moved, weights.checkpoints), None
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
                found = models.of_stage_files(files, manifest_of(folder), last=weights.last)
                return found, data_folder(folder)
            except DataError as error:
                failure = error
                note(f"{error}; looking for a checkpoint instead") if kind == "auto" else None
        elif kind == "stages":
            raise UsageError(f"no saved stage (stage-*.safetensors) below {folder}: nodes save theirs when they leave")
    if failure is not None and kind == "stages":
        raise failure
    try:
        return _of_checkpoint(source, note, moved, weights.checkpoints), data_folder(folder)
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
    """What the manifest's paths lie below: the run's folder, which is above a session's."""
    above = folder.parent
    return above if (above / MANIFEST_FILE).is_file() or (above / SIGNED_FILE).is_file() else folder


def manifest_in(resumption: Resumption) -> SignedManifest:
    """The signed manifest in a checkpoint. Raises DataError, ManifestError."""
    try:
        signed = SignedManifest.FromString(base64.b64decode(resumption.checkpoint.origin.manifest, validate=True))
    except (binascii.Error, DecodeError):
        raise DataError(f"{resumption.where}: its manifest cannot be read; give RUN, the folder of the run") from None
    verify(signed, None)
    return signed


def _of_checkpoint(source: str, note: Note, moved: Moved, newest: int) -> Gathered:
    """The newest checkpoint, or the mean of the `newest` ones of its run."""
    from swarmnode.model import gather as models

    read = asyncio.run(_read(source, note, moved, newest))
    if len(read) < newest:
        note(f"{len(read)} checkpoints are averaged: there are no {newest} that can be used")
    resumption, _ = read[0]
    checkpoint = resumption.checkpoint
    manifest, run_id = verify(manifest_in(resumption), None)
    peers = " ".join(part.peer[-8:] for part in checkpoint.parts)
    kind = f"checkpoint {checkpoint.label}" + (f" averaged with {len(read) - 1} before it" if len(read) > 1 else "")
    empty = models.Gathered(manifest, run_id, checkpoint.round, checkpoint.samples, (), kind)
    found = models.of_buffers([(peers, tensors) for _, tensors in read], empty, resumption.where)
    if len(read) == 1:
        return found
    return replace(found, copies=(models.Copy(peers, models.merged(found), resumption.where),))


async def _read(source: str, note: Note, moved: Moved, newest: int) -> list[tuple[Resumption, saving.Tensors]]:
    """The `newest` checkpoints, or as many as there are, whose parameters are all as they were saved. Raises DataError
    when none is."""
    failure: DataError | None = None
    candidates = await resuming.find_resumptions(source, None, note)
    sizes = [sum(f.nbytes for f in each.checkpoint.files if f.section == "theta") for each in candidates[:newest]]
    seen = 0

    def count(nbytes: int) -> None:
        nonlocal seen
        seen += nbytes
        moved(min(seen, sum(sizes)), sum(sizes))

    read: list[tuple[Resumption, saving.Tensors]] = []
    for resumption in candidates:
        try:
            tensors = await saving.load_tensors(
                resumption.store, resumption.base, resumption.checkpoint, "theta", moved=count
            )
        except DataError as error:
            failure = error
            note(f"{resumption.checkpoint.label} cannot be used: {failure}")
            continue
        read.append((resumption, tensors))
        if len(read) == newest:
            break
    if not read:
        assert failure is not None
        raise failure
    return read

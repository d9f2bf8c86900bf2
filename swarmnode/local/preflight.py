"""Checks of `swarmnode up` before anything is signed or started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from swarmnode.atomic_file import check_free, check_writable
from swarmnode.data.base_folder import FOLDER as BASE_FOLDER
from swarmnode.data.base_folder import local_base
from swarmnode.data.indexed import open_text
from swarmnode.errors import DataError
from swarmnode.local.run_folder import RUNS
from swarmnode.machine.bucket_store import is_url
from swarmnode.manifest import PRESETS, Manifest, manifest_at
from swarmnode.model.section import section_sizes, state_nbytes
from swarmnode.model.split import stages_of


def check_run(run: Path | None, stages: int | None, data_root: Path | None, cache: Path, checkpoints: str) -> None:
    """Open the text and the tokenizer of the run that `up` was given, look for its base model, and see that checkpoints
    fit on the disk.

    Raises DataError, NotPermitted for the data and the base model, DiskFull for too little space, LocalFault for a
    folder that cannot be written, ManifestError for a manifest that is wrong. Whatever else is wrong with `run` is left
    for `prepare` to say.
    """
    if (current := _manifest_of(run)) is None:
        return
    manifest, folder = current
    if stages is not None and 1 <= stages <= manifest.model.layers:
        manifest = replace(manifest, pipeline=replace(manifest.pipeline, stages=stages))
    root = data_root or folder
    if root is None and manifest.data.names_files:
        return  # `prepare` says what to give
    check_writable(cache, "free space there, or choose another --cache")
    _check_base(manifest, folder)
    open_text(manifest, root, cache)
    if not is_url(checkpoints):
        parts = stages_of(manifest)
        whole = sum(state_nbytes(section_sizes(manifest, part)) for part in parts)
        where = Path(checkpoints).expanduser() if checkpoints else (folder or RUNS)
        advice = "free space there, or save elsewhere (--checkpoints)"
        check_free(where, (manifest.checkpoint.keep + 1) * whole, "the checkpoints of this session", advice)


def _check_base(manifest: Manifest, folder: Path | None) -> None:
    """Raises DataError when the base model of the run in `folder` is not there, or a file of it is cut off."""
    if not manifest.base.index:
        return
    place = None if folder is None else folder / BASE_FOLDER
    if local_base(place, bytes.fromhex(manifest.base.index)) is None and not manifest.base.locations:
        where = "no folder of the run is given" if place is None else f"{place} does not hold it"
        raise DataError(
            f"the run starts from base model {manifest.base.index[:16]}..., and {where}: `swarmnode init --from` makes"
            " such a folder"
        )


def _manifest_of(run: Path | None) -> tuple[Manifest, Path | None] | None:
    """The manifest of `run` and the folder that its paths lie below; None where there is neither."""
    if run is None:
        return PRESETS["demo"], None
    if not run.exists():
        return None
    return manifest_at(run), run if run.is_dir() else None

"""The folder of one `swarmnode up`: the signed manifest, and the nodes' homes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode.app.local.model_source import manifest_in
from swarmnode.app.machine import checkup
from swarmnode.app.machine.folder_store import is_url, open_store
from swarmnode.base.atomic_file import check_free, check_writable, write_errors
from swarmnode.base.errors import DataError, NotPermitted, UsageError
from swarmnode.base.ids import RunId
from swarmnode.base.wire.record_pb2 import SignedManifest
from swarmnode.data.base_index import FOLDER as BASE_FOLDER
from swarmnode.data.base_index import local_base
from swarmnode.data.indexed import open_text
from swarmnode.keep.recovery.resumption import Resumption
from swarmnode.model.section import section_sizes, state_nbytes
from swarmnode.model.split import stages_of
from swarmnode.run import manifest as manifests
from swarmnode.run import owner
from swarmnode.run.admission.amendment import Amendments
from swarmnode.run.manifest import Manifest, verify
from swarmnode.run.manifest.folder import (
    MANIFEST_FILE,
    SIGNED_FILE,
    init,
    manifest_at,
    read_manifest,
    sign_folder,
    write_signed,
)
from swarmnode.run.manifest.recipe import PRESETS

RUNS = Path("runs")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`signed` is given to nodes; `folder` is this session's. The run's data set or tokenizer is below `data_root`, the
    folder given to `up`, or None."""

    manifest: Manifest
    run_id: RunId
    signed: Path
    folder: Path
    data_root: Path | None = None


def prepare(run: Path | None, nodes: int, stages: int | None, stamp: str, data_root: Path | None = None) -> RunFolder:
    """Prepare what `up` was given: a folder of `swarmnode init`, a signed manifest, or None (the demo's manifest).

    `stages` replaces the manifest's own value, which makes another run, so it is not allowed for a signed one. `stamp`
    names the session's folder. Files named by the manifest are below `data_root`, else below `run` if that is a folder.
    Raises ManifestError and UsageError (for example too few `nodes`) before anything is made, NotPermitted if that
    fails.
    """
    if run is None:
        return _prepare_new(PRESETS["demo"], nodes, stages, stamp)
    if (run / MANIFEST_FILE).exists():
        return replace(_prepare_folder(run, nodes, stages, stamp), data_root=data_root or run)
    if (run / SIGNED_FILE).exists():
        return _prepare_signed(run / SIGNED_FILE, nodes, stages, run, f"up-{stamp}", data_root or run)
    if run.is_dir():
        manifest_at(run)  # says what is missing
    return _prepare_signed(run, nodes, stages, RUNS, stamp, data_root)


def prepare_given(
    signed: SignedManifest, nodes: int, stages: int | None, stamp: str, round_index: int = 0
) -> RunFolder:
    """`prepare` for a signed manifest without a folder, whose amendments are in force as after `round_index`; with
    other `stages` it is signed again, as a new run."""
    manifest, run_id = manifests.verify(signed, None)
    amendments = Amendments.of(signed, manifest, run_id)
    now = amendments.after(amendments.cut(round_index))
    if _with_stages(now, stages) != now:
        return _prepare_new(amendments.at(round_index), nodes, stages, stamp)
    folder = _fresh(RUNS, f"{_checked(now, nodes).name}-{stamp}")
    write_signed(folder / SIGNED_FILE, signed)
    return RunFolder(now, run_id, folder / SIGNED_FILE, folder)


def _prepare_new(given: Manifest, nodes: int, stages: int | None, stamp: str) -> RunFolder:
    manifest = _checked(_with_stages(given, stages), nodes)
    folder = _fresh(RUNS, f"{manifest.name}-{stamp}")
    init(folder, manifest)
    signed = sign_folder(folder)
    return RunFolder(manifest, manifests.verify(signed, None)[1], folder / SIGNED_FILE, folder)


def _prepare_folder(run: Path, nodes: int, stages: int | None, stamp: str) -> RunFolder:
    given = read_manifest(run / MANIFEST_FILE)
    manifest = _checked(_with_stages(given, stages), nodes)
    if manifest == given:
        signed = sign_folder(run)
        path = run / SIGNED_FILE
    else:
        signed = manifests.sign(manifest, owner.load_owner(run / owner.FILE_NAME))
        path = run / f"manifest-{stages}-stages.signed"
        write_signed(path, signed)
    return _session(manifest, signed, path, run, f"up-{stamp}")


def _prepare_signed(
    path: Path, nodes: int, stages: int | None, where: Path, name: str, data_root: Path | None
) -> RunFolder:
    signed, manifest = manifests.read_signed(path)
    if manifest.data.names_files and data_root is None:
        raise UsageError(f"{path}: the run reads a tokenizer: give its folder (--data-root), or the run's as RUN")
    if stages is not None and stages != manifest.pipeline.stages:
        raise UsageError(
            f"--stages {stages}: {path} is signed for {manifest.pipeline.stages} stages; leave --stages out, "
            "or give the folder with manifest.toml and owner.key"
        )
    _checked(manifest, nodes)
    session = _session(manifest, signed, path, where, f"{manifest.name}-{name}" if where == RUNS else name)
    return replace(session, data_root=data_root)


def _session(manifest: Manifest, signed: SignedManifest, path: Path, where: Path, name: str) -> RunFolder:
    folder = _fresh(where, name)
    write_signed(folder / SIGNED_FILE, signed)  # so that `export` finds it beside the nodes' homes
    return RunFolder(manifest, manifests.verify(signed, None)[1], path, folder)


def _with_stages(manifest: Manifest, stages: int | None) -> Manifest:
    if stages is None:
        return manifest
    return dataclasses.replace(manifest, pipeline=dataclasses.replace(manifest.pipeline, stages=stages))


def _checked(manifest: Manifest, nodes: int) -> Manifest:
    """`manifest`, if it is valid and `nodes` can serve every stage."""
    manifests.parse(manifests.template(manifest), "with --stages")
    stages = manifest.pipeline.stages
    if nodes < stages:
        raise UsageError(f"--nodes {nodes} cannot serve {stages} stages: give at least {stages}")
    return manifest


def _fresh(where: Path, name: str) -> Path:
    """A new folder `where`/`name`, with a number appended if that name is taken."""
    with write_errors(where / name, kind=NotPermitted, what=f"{where / name} cannot be made"):
        where.mkdir(parents=True, exist_ok=True)
        for serial in range(1, 1000):
            folder = where / (name if serial == 1 else f"{name}-{serial}")
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    raise NotPermitted(f"{where / name} and its successors exist: clear {where}")


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
    """The manifest of `run` and the folder that its files lie below; None where there is neither."""
    if run is None:
        return PRESETS["demo"], None
    if not run.exists():
        return None
    return manifest_at(run), run if run.is_dir() else None


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
    samples: int | None = None,
) -> ResumedRun:
    """The newest intact checkpoint at `text` (every byte is read), and a session of `run` that resumes from it. With
    `run` None it uses the checkpoint's own manifest, and needs a `data_root` if that names a file. `samples`:
    where it is to end. Raises UsageError, DataError, ManifestError."""
    resumption = asyncio.run(_choose(text, note))
    if samples is not None and samples <= (trained := resumption.checkpoint.samples):
        raise UsageError(f"--samples {samples}: {resumption.checkpoint.label} has {trained:,} already; give more")
    origin = resumption.checkpoint.origin
    where = resumption.where
    if run is None:
        signed = manifest_in(resumption)
        if verify(signed, None)[0].data.names_files and data_root is None:
            raise UsageError(
                f"--resume {text}: run {origin.run_name!r} reads a tokenizer: give RUN, or --data-root with its folder"
            )
        prepared = replace(
            prepare_given(signed, nodes, stages, stamp, resumption.checkpoint.round), data_root=data_root
        )
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

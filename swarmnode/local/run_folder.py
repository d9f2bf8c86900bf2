"""The folder of one `swarmnode up`: the signed manifest, and the nodes' homes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path

from swarmnode import manifest as manifests
from swarmnode import owner
from swarmnode.atomic_file import raise_if_full
from swarmnode.errors import NotPermitted, UsageError
from swarmnode.ids import RunId
from swarmnode.manifest import MANIFEST_FILE, PRESETS, SIGNED_FILE, Manifest
from swarmnode.wire.record_pb2 import SignedManifest

RUNS = Path("runs")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`signed` is given to nodes; `folder` is this session's. The manifest's paths are below `data_root`, the folder
    given to `up`, or None."""

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
        manifests.manifest_at(run)  # says what is missing
    return _prepare_signed(run, nodes, stages, RUNS, stamp, data_root)


def prepare_given(signed: SignedManifest, nodes: int, stages: int | None, stamp: str) -> RunFolder:
    """`prepare` for a signed manifest without a folder; with other `stages` it is signed again, as a new run."""
    manifest, _ = manifests.verify(signed, None)
    if _with_stages(manifest, stages) != manifest:
        return _prepare_new(manifest, nodes, stages, stamp)
    folder = _fresh(RUNS, f"{_checked(manifest, nodes).name}-{stamp}")
    manifests.write_signed(folder / SIGNED_FILE, signed)
    return RunFolder(manifest, manifests.verify(signed, None)[1], folder / SIGNED_FILE, folder)


def _prepare_new(given: Manifest, nodes: int, stages: int | None, stamp: str) -> RunFolder:
    manifest = _checked(_with_stages(given, stages), nodes)
    folder = _fresh(RUNS, f"{manifest.name}-{stamp}")
    manifests.init(folder, manifest)
    signed = manifests.sign_folder(folder)
    return RunFolder(manifest, manifests.verify(signed, None)[1], folder / SIGNED_FILE, folder)


def _prepare_folder(run: Path, nodes: int, stages: int | None, stamp: str) -> RunFolder:
    given = manifests.read_manifest(run / MANIFEST_FILE)
    manifest = _checked(_with_stages(given, stages), nodes)
    if manifest == given:
        signed, path = manifests.sign_folder(run), run / SIGNED_FILE
    else:
        signed = manifests.sign(manifest, owner.load_owner(run / owner.FILE_NAME))
        path = run / f"manifest-{stages}-stages.signed"
        manifests.write_signed(path, signed)
    return _session(manifest, signed, path, run, f"up-{stamp}")


def _prepare_signed(
    path: Path, nodes: int, stages: int | None, where: Path, name: str, data_root: Path | None
) -> RunFolder:
    signed, manifest = manifests.read_signed(path)
    if manifest.data.names_files and data_root is None:
        raise UsageError(f"{path}: the run reads files: give their folder with --data-root, or the run's folder as RUN")
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
    manifests.write_signed(folder / SIGNED_FILE, signed)  # so that `export` finds it beside the nodes' homes
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
    try:
        where.mkdir(parents=True, exist_ok=True)
        for serial in range(1, 1000):
            folder = where / (name if serial == 1 else f"{name}-{serial}")
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise_if_full(where / name, error)
        raise NotPermitted(f"{where / name} cannot be made: {error.strerror}") from None
    raise NotPermitted(f"{where / name} and its successors exist: clear {where}")

"""A run's folder: the editable manifest.toml, the signing key owner.key, and manifest.signed for nodes."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Mapping

from swarmnode.base.atomic_file import write_whole
from swarmnode.base.errors import ManifestError, NotPermitted, UsageError, cause_of, os_errors
from swarmnode.base.text_file import decoded
from swarmnode.base.wire import record_pb2
from swarmnode.run import owner as owner_key
from swarmnode.run.manifest.signed import read_signed, sign
from swarmnode.run.manifest.spec import Manifest
from swarmnode.run.manifest.text import MANIFEST_BYTES_MAX, SCHEMA_FILE, brief, difference, parse, schema

MANIFEST_FILE = "manifest.toml"
SIGNED_FILE = "manifest.signed"


def init(
    folder: pathlib.Path,
    manifest: Manifest | None = None,
    origins: Mapping[str, str] | None = None,
    *,
    recovery: bool = False,
) -> tuple[pathlib.Path, pathlib.Path]:
    """Create a run in `folder`: manifest.toml (the values of `manifest` or the defaults, with the `origins` of some),
    its schema for editors, owner.key, and with `recovery` recovery.key, whose public half the manifest names.

    Returns the paths of manifest and owner's key. Raises UsageError if one exists already, NotPermitted if they cannot
    be written.
    """
    manifest_path = folder / MANIFEST_FILE
    key_path = folder / owner_key.FILE_NAME
    made = manifest or Manifest()
    paths = (manifest_path, key_path, *([folder / owner_key.RECOVERY_FILE] if recovery else []))
    for path in paths:
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} exists and is not overwritten; choose another folder, or move it away")
    with os_errors(NotPermitted, f"{folder} cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    owner_key.create_owner(key_path)
    if recovery:
        public = owner_key.public_bytes(owner_key.create_owner(folder / owner_key.RECOVERY_FILE)).hex()
        made = dataclasses.replace(made, access=dataclasses.replace(made.access, recovery=public))
    write_whole(manifest_path, brief(made, origins or {}).encode())
    (folder / SCHEMA_FILE).write_text(schema(), encoding="utf-8")
    return manifest_path, key_path


def read_manifest(path: pathlib.Path) -> Manifest:
    """The manifest in a TOML file. Raises ManifestError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MANIFEST_BYTES_MAX + 1)
    except OSError as error:
        hint = "; `swarmnode init` makes one" if isinstance(error, FileNotFoundError) else ""
        raise ManifestError(f"{path}: cannot be read: {cause_of(error)}{hint}") from error
    try:
        return parse(decoded(raw), str(path))
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: not UTF-8 at byte {error.start}") from None


def manifest_at(path: pathlib.Path, *, signed_first: bool = False) -> Manifest:
    """The manifest in `path`: a TOML file, a signed one, or a run's folder. Raises ManifestError, and UsageError
    if the folder has none."""
    if path.is_dir():
        names = (SIGNED_FILE, MANIFEST_FILE) if signed_first else (MANIFEST_FILE, SIGNED_FILE)
        file = next((path / name for name in names if (path / name).is_file()), None)
        if file is None:
            raise UsageError(
                f"{path} has neither {MANIFEST_FILE} nor {SIGNED_FILE}: `swarmnode init {path}` makes a run"
            )
        path = file
    return read_manifest(path) if path.suffix == ".toml" else read_signed(path)[1]


def sign_folder(folder: pathlib.Path) -> record_pb2.SignedManifest:
    """The folder's signed manifest; signed now with the folder's key, and written, if it has none.

    Raises ManifestError with the difference if manifest.toml is not what manifest.signed says: another manifest is
    another run, and this one's invites and history must not end without a word.
    """
    given = read_manifest(folder / MANIFEST_FILE)
    path = folder / SIGNED_FILE
    if not path.exists():
        signed = sign(given, owner_key.load_owner(folder / owner_key.FILE_NAME))
        write_signed(path, signed)
        return signed
    ways_out = f"or `swarmnode init {folder} --new-run` begins another run; the signed manifest of this one is kept"
    try:
        signed, before = read_signed(path)
    except ManifestError as error:
        raise type(error)(f"{error}; use the version of swarmnode that signed it, {ways_out}") from None
    if changes := difference(before, given):
        lines = "\n".join(f"  {change}" for change in changes)
        raise ManifestError(
            f"{folder / MANIFEST_FILE} is not the manifest that this run was signed with:\n{lines}\n"
            f"Undo the change and say `swarmnode amend {folder} FIELD=VALUE`: the run goes on; {ways_out}."
        )
    return signed


def put_aside(folder: pathlib.Path) -> pathlib.Path | None:
    """Rename the folder's signed manifest and access list, so that the next signature begins another run. Returns the
    manifest's new path, None if there was none. Raises NotPermitted."""
    path = folder / SIGNED_FILE
    if not path.exists():
        return None
    label = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    with os_errors(NotPermitted, f"{path} cannot be renamed"):
        for old in (folder / "access.signed", path):
            if old.exists():
                kept = old.rename(old.with_name(f"{old.stem}-{label}{old.suffix}"))
    return kept


def signed_of(run: pathlib.Path) -> pathlib.Path:
    """The path of the signed manifest of `run`: a folder made by `init`, signed now if its key is there, or the file
    itself."""
    if not run.is_dir():
        return run
    if (run / MANIFEST_FILE).is_file() and (run / owner_key.FILE_NAME).exists():
        sign_folder(run)
    return run / SIGNED_FILE


def write_signed(path: pathlib.Path, signed: record_pb2.SignedManifest) -> None:
    """Write `signed` to a file atomically. Raises NotPermitted if it cannot be written."""
    write_whole(path, signed.SerializeToString(deterministic=True))

"""A run's folder: manifest.toml that people edit, owner.key that signs it, manifest.signed that nodes take."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

from swarmnode import owner as owner_key
from swarmnode.errors import ManifestError, NotPermitted, UsageError
from swarmnode.manifest.signed import sign
from swarmnode.manifest.spec import Manifest
from swarmnode.manifest.text import MANIFEST_BYTES_MAX, parse, template
from swarmnode.wire import record_pb2

MANIFEST_FILE = "manifest.toml"
SIGNED_FILE = "manifest.signed"


def init(
    folder: pathlib.Path, manifest: Manifest | None = None, origins: Mapping[str, str] | None = None
) -> tuple[pathlib.Path, pathlib.Path]:
    """A new run in `folder`: manifest.toml (commented; the values of `manifest` or the defaults, `origins` says where
    those of some fields come from) and owner.key.

    Returns both paths. Raises UsageError when either exists already, NotPermitted when they cannot be written.
    """
    manifest_path, key_path = folder / MANIFEST_FILE, folder / owner_key.FILE_NAME
    for path in (manifest_path, key_path):
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} exists and is not overwritten; choose another folder, or move it away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotPermitted(f"{folder} cannot be made: {error.strerror}") from error
    owner_key.create_owner(key_path)
    _write_new(manifest_path, template(manifest, origins).encode())
    return manifest_path, key_path


def read_manifest(path: pathlib.Path) -> Manifest:
    """The manifest in a TOML file. Raises ManifestError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MANIFEST_BYTES_MAX + 1)
    except OSError as error:
        hint = "; `swarmnode init` makes one" if isinstance(error, FileNotFoundError) else ""
        raise ManifestError(f"{path}: cannot be read: {error.strerror}{hint}") from error
    try:
        return parse(raw.decode(), str(path))
    except UnicodeDecodeError as error:
        raise ManifestError(f"{path}: not UTF-8 at byte {error.start}") from None


def sign_folder(folder: pathlib.Path) -> record_pb2.SignedManifest:
    """The folder's manifest signed with the folder's key, also written to manifest.signed (whole or not at all)."""
    signed = sign(read_manifest(folder / MANIFEST_FILE), owner_key.load_owner(folder / owner_key.FILE_NAME))
    write_signed(folder / SIGNED_FILE, signed)
    return signed


def signed_of(run: pathlib.Path) -> pathlib.Path:
    """The signed manifest of `run`: a folder of `init`, signed now if its key is there, or the file itself."""
    if not run.is_dir():
        return run
    if (run / MANIFEST_FILE).is_file() and (run / owner_key.FILE_NAME).exists():
        sign_folder(run)
    return run / SIGNED_FILE


def write_signed(path: pathlib.Path, signed: record_pb2.SignedManifest) -> None:
    """`signed` as a file, replaced whole. Raises NotPermitted when it cannot be written."""
    write_whole(path, signed.SerializeToString(deterministic=True))


def write_whole(path: pathlib.Path, raw: bytes) -> None:
    """`raw` as a file, whole or not at all. Raises NotPermitted when it cannot be written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise NotPermitted(f"{path} cannot be written: {error.strerror}") from error


def _write_new(path: pathlib.Path, data: bytes) -> None:
    try:
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError:
        raise UsageError(f"{path} exists and is not overwritten; choose another folder, or move it away") from None
    except OSError as error:
        raise NotPermitted(f"{path} cannot be written: {error.strerror}") from error

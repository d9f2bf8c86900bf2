"""A run's folder: the editable manifest.toml, the signing key owner.key, and manifest.signed for nodes."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from swarmnode import owner as owner_key
from swarmnode.errors import ManifestError, NotPermitted, UsageError
from swarmnode.manifest.signed import sign
from swarmnode.manifest.spec import Manifest
from swarmnode.manifest.text import MANIFEST_BYTES_MAX, parse, template
from swarmnode.whole_file import write_whole
from swarmnode.wire import record_pb2

MANIFEST_FILE = "manifest.toml"
SIGNED_FILE = "manifest.signed"


def init(
    folder: pathlib.Path, manifest: Manifest | None = None, origins: Mapping[str, str] | None = None
) -> tuple[pathlib.Path, pathlib.Path]:
    """Create a run in `folder`: manifest.toml (commented; the values of `manifest` or the defaults, with the `origins`
    of some values) and owner.key.

    Returns both paths. Raises UsageError if either exists already, NotPermitted if they cannot be written.
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
    """Sign the folder's manifest with the folder's key; also write it to manifest.signed (atomically)."""
    signed = sign(read_manifest(folder / MANIFEST_FILE), owner_key.load_owner(folder / owner_key.FILE_NAME))
    write_signed(folder / SIGNED_FILE, signed)
    return signed


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


def _write_new(path: pathlib.Path, data: bytes) -> None:
    try:
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError:
        raise UsageError(f"{path} exists and is not overwritten; choose another folder, or move it away") from None
    except OSError as error:
        raise NotPermitted(f"{path} cannot be written: {error.strerror}") from error

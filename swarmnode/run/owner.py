"""The owner's key, which signs a run's manifest: an Ed25519 private key in a PEM file that only its owner can read."""

from __future__ import annotations

import os
import pathlib
import stat

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.base.errors import ManifestError, NotPermitted, UsageError, cause_of

FILE_NAME = "owner.key"
RECOVERY_FILE = "recovery.key"
FILE_BYTES_MAX = 4096


def create_owner(path: pathlib.Path) -> Ed25519PrivateKey:
    """Write a new key to `path` (PKCS#8 PEM, mode 0600).

    Raises UsageError if the file exists: overwriting it would leave the runs it signed without an owner. Raises
    NotPermitted if the folder cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(
            f"{path} exists; an owner's key is never overwritten: move it away or choose another"
        ) from None
    except OSError as error:
        raise NotPermitted(f"{path} cannot be written: {cause_of(error)}") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)
        file.flush()
        os.fsync(file.fileno())
    return key


def load_owner(path: pathlib.Path) -> Ed25519PrivateKey:
    """The key in `path`. Raises NotPermitted if others can read it, ManifestError if it is missing or not a key."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise ManifestError(f"{path} is missing; `swarmnode init` makes an owner's key") from None
    except OSError as error:
        raise NotPermitted(f"{path} cannot be read: {cause_of(error)}") from error
    with os.fdopen(descriptor, "rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise NotPermitted(f"{path} can be read by others (mode {mode:04o}); say: chmod 600 {path}")
        pem = file.read(FILE_BYTES_MAX + 1)
    if len(pem) > FILE_BYTES_MAX:
        raise ManifestError(f"{path} is longer than {FILE_BYTES_MAX} bytes; an owner's key is a short PEM file")
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        raise ManifestError(f"{path} is not an unencrypted PEM private key; `swarmnode init` makes one") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ManifestError(f"{path} holds a key of another kind; an owner's key is Ed25519")
    return key


def public_bytes(key: Ed25519PrivateKey) -> bytes:
    """The public half, 32 raw bytes."""
    return key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)

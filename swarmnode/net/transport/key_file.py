"""The node key file: libp2p's protobuf of an Ed25519 private key, which p2pd reads too. Only its owner may read it."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from swarmnode.base.atomic_file import atomic_write, write_errors
from swarmnode.base.damaged_file import put_aside, put_aside_unless_file
from swarmnode.base.errors import NotPermitted, cause_of
from swarmnode.base.identity import PUBLIC_KEY_BYTES, SEED_BYTES, Identity

# protobuf PrivateKey{Type: Ed25519 (08 01), Data: 64 bytes (12 40 seed public)}
_PREFIX = bytes.fromhex("08011240")
_FILE_BYTES = len(_PREFIX) + SEED_BYTES + PUBLIC_KEY_BYTES


def load_or_create(path: Path) -> Identity:
    """The identity kept in `path`. If there is none, or a damaged one, which is put aside, a new one is written there
    (mode 0600, folders 0700).

    Raises NotPermitted if the file may not be used as it is, LocalFault if it cannot be written.
    """
    put_aside_unless_file(path)
    try:
        return load(path)
    except FileNotFoundError:
        return create(path)
    except DamagedKey as damaged:
        put_aside(path, f"{damaged}; this machine is a newcomer under a new id")
        return create(path)


class DamagedKey(NotPermitted):
    """A key file that holds no key: a torn disk's, or something else in its place."""


def create(path: Path) -> Identity:
    """The identity in `path`, a new one unless another process was faster, written atomically. Raises LocalFault (disk
    full, read only)."""
    identity = Identity.generate()
    raw = _PREFIX + identity.seed + identity.public_key
    with write_errors(path, _FILE_BYTES, what=f"node key {path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError):
            atomic_write(path, raw, mode=0o600, replace=False)
    return load(path)


def load(path: Path) -> Identity:
    """The identity in `path`. Raises FileNotFoundError, DamagedKey, or NotPermitted with the remedy."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(_FILE_BYTES + 1)
    except FileNotFoundError:
        raise
    except IsADirectoryError:
        raise DamagedKey(f"node key {path} is a folder") from None
    except OSError as error:
        raise NotPermitted(f"node key {path} cannot be read: {cause_of(error)}") from error
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise NotPermitted(f"node key {path} is open to others (mode {mode:04o}): run  chmod 600 {path}")
    if status.st_uid != os.geteuid():
        raise NotPermitted(f"node key {path} belongs to user {status.st_uid}: run  chown {os.geteuid()} {path}")
    if len(raw) != _FILE_BYTES or not raw.startswith(_PREFIX):
        raise DamagedKey(f"{path} is not an Ed25519 node key of libp2p: move it away and a new one will be made")
    identity = Identity.of_seed(raw[len(_PREFIX) : len(_PREFIX) + SEED_BYTES])
    if raw[len(_PREFIX) + SEED_BYTES :] != identity.public_key:
        raise DamagedKey(f"node key {path} is damaged: its two halves do not match; restore or remove it")
    return identity

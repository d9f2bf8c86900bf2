"""The token of a daemon's control API on TCP, in its home: whoever has it may do all that the owner may."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from swarmnode.app.control.socket_path import TOKEN_FILE
from swarmnode.base.atomic_file import atomic_write, write_errors
from swarmnode.base.damaged_file import put_aside, read_small
from swarmnode.base.errors import NoDaemon, NotPermitted

BITS = 256
CHARACTERS_MAX = 4096


def load_or_create(home: Path) -> str:
    """The token of `home`, made and kept for its owner alone (0600) where there is none, or a damaged one, which is put
    aside. Raises LocalFault, NotPermitted."""
    path = home / TOKEN_FILE
    raw = read_small(path, CHARACTERS_MAX)
    if raw is not None and not (raw.strip() and all(33 <= byte < 127 for byte in raw.strip())):
        put_aside(path, "no token")
    if not path.exists():
        with write_errors(path, advice="free space there, or choose another --home"):
            atomic_write(path, f"{AESGCM.generate_key(BITS).hex()}\n".encode(), mode=0o600)
    return load(home)


def load(home: Path) -> str:
    """The token of `home`. Raises NoDaemon where there is none, NotPermitted for a file that others may read."""
    path = home / TOKEN_FILE
    try:
        with path.open() as file:
            token = file.read(CHARACTERS_MAX).strip()
            mode = os.fstat(file.fileno()).st_mode
    except FileNotFoundError:
        raise NoDaemon(f"no {path}: a daemon makes it when it starts with --control-listen") from None
    except (OSError, ValueError) as error:
        raise NotPermitted(f"{path} cannot be read ({error}): use the account that started the daemon") from None
    if mode & 0o077:
        raise NotPermitted(f"{path} can be read by others: chmod 600 it, or remove it for a new one")
    if not token:
        raise NotPermitted(f"{path} is empty: remove it for a new one")
    return token

"""Where a daemon's control socket is: in its home, or, when that path is too long for the kernel, in a short folder."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from swarmnode.errors import LocalFault, NoDaemon, NotPermitted

SOCKET_PATH_BYTES_MAX = 103
"""Longest path of a unix socket: sun_path holds 108 bytes on Linux and 104 on macOS, the closing zero included."""

SOCKET_NAME = "control.sock"
POINTER_NAME = "control.path"


def choose(home: Path) -> Path:
    """The path to bind for the daemon of `home`; a folder made for it is ours alone (0700).

    Raises NotPermitted when the short folder belongs to somebody else, LocalFault when it cannot be made.
    """
    direct = home.resolve() / SOCKET_NAME
    if _fits(direct):
        return direct
    name = hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:16] + ".sock"
    bases = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    for base in bases:
        path = Path(base) / f"swarmnode-{os.getuid()}" / name
        if path.is_absolute() and Path(base).is_dir() and _fits(path):
            _make_private(path.parent)
            return path
    raise LocalFault(f"no folder with a path short enough for a socket: tried {', '.join(filter(None, bases))}")


def publish(home: Path, path: Path) -> None:
    """Write where the socket is when it is not in `home` itself."""
    pointer = home / POINTER_NAME
    if path == home.resolve() / SOCKET_NAME:
        pointer.unlink(missing_ok=True)
        return
    fresh = pointer.with_suffix(".new")
    fresh.write_text(f"{path}\n")
    os.replace(fresh, pointer)


def forget(home: Path, path: Path) -> None:
    """Remove the socket and what `publish` wrote."""
    path.unlink(missing_ok=True)
    (home / POINTER_NAME).unlink(missing_ok=True)


def find(home: Path) -> Path:
    """The socket of the daemon of `home`. Raises NoDaemon when there is none, NotPermitted when it is not for us."""
    path = home.resolve() / SOCKET_NAME
    try:
        path = Path((home / POINTER_NAME).read_text().strip())
    except FileNotFoundError:
        pass
    except OSError as error:
        raise NotPermitted(f"{home / POINTER_NAME}: {error.strerror}") from None
    try:
        found = stat.S_ISSOCK(path.stat().st_mode)
    except PermissionError:
        raise NotPermitted(f"the control socket {path} is not for this user: ask as the user who started it") from None
    except OSError:
        found = False
    if not found:
        raise no_daemon(home)
    if not os.access(path, os.R_OK | os.W_OK):
        raise NotPermitted(f"the control socket {path} is not for this user: ask as the user who started it")
    return path


def no_daemon(home: Path) -> NoDaemon:
    """The error to raise when nobody answers at `home`."""
    return NoDaemon(f"no daemon at {home}: start one with `swarmnode join`, or say where it lives with --home")


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise LocalFault(f"cannot make the socket folder {folder}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NotPermitted(f"{folder} is not a folder of this user alone (0700): remove it, or use a shorter --home")

"""The path of a daemon's control socket: in its home, or in a short folder if that path is too long for the kernel."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from swarmnode.atomic_file import atomic_write
from swarmnode.errors import LocalFault, NoDaemon, NotPermitted, UsageError, os_errors

SOCKET_PATH_BYTES_MAX = 103
"""Longest path of a unix socket: sun_path holds 108 bytes on Linux and 104 on macOS, including the final zero."""

SOCKET_NAME = "control.sock"
POINTER_NAME = "control.path"
LOCK_NAME = "control.lock"


def choose(home: Path) -> Path:
    """The path to bind for the daemon of `home`. A folder made for it is private (0700).

    Raises NotPermitted if the short folder belongs to another user, LocalFault if it cannot be made.
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
    """Record the socket's path in `home`, unless the socket is there itself."""
    pointer = home / POINTER_NAME
    if path == home.resolve() / SOCKET_NAME:
        pointer.unlink(missing_ok=True)
        return
    atomic_write(pointer, f"{path}\n".encode())


def forget(home: Path, path: Path) -> None:
    """Remove the socket and the record made by `publish`."""
    path.unlink(missing_ok=True)
    (home / POINTER_NAME).unlink(missing_ok=True)


def find(home: Path) -> Path:
    """The socket of the daemon of `home`. Raises NoDaemon if there is none, NotPermitted if it belongs to another
    user."""
    path = home.resolve() / SOCKET_NAME
    try:
        path = Path((home / POINTER_NAME).read_text().strip())
    except FileNotFoundError:
        pass
    except OSError as error:
        raise NotPermitted(f"{home / POINTER_NAME}: {error.strerror}") from None
    try:
        is_socket = stat.S_ISSOCK(path.stat().st_mode)
    except PermissionError:
        raise NotPermitted(
            f"the control socket {path} belongs to another user: use the account that started it"
        ) from None
    except OSError:
        is_socket = False
    if not is_socket:
        raise no_daemon(home)
    if not os.access(path, os.R_OK | os.W_OK):
        raise NotPermitted(f"the control socket {path} belongs to another user: use the account that started it")
    return path


def no_daemon(home: Path) -> NoDaemon:
    """The error for a `home` without a running daemon."""
    return NoDaemon(f"no daemon at {home}: start one with `swarmnode join`, or give its folder with --home")


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX


def _make_private(folder: Path) -> None:
    with os_errors(LocalFault, f"cannot make the socket folder {folder}"):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise NotPermitted(f"{folder} is not private to this user (0700): remove it, or use a shorter --home")


def take_home(home: Path) -> int:
    """Hold the lock of `home` until the descriptor, which is returned, is closed or the process dies.

    Raises UsageError if another daemon holds it, LocalFault if it cannot be written.
    """
    path = home / LOCK_NAME
    with os_errors(LocalFault, f"cannot write in {home}", "; give another --home"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        raise UsageError(f"another swarmnode (pid {holder or '?'}) uses {home}: give another --home") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor

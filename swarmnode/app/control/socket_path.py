"""The control sockets of a daemon, in its home, and the lock of that home."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from swarmnode.base import file_lock
from swarmnode.base.damaged_file import put_aside, put_aside_unless_file
from swarmnode.base.errors import LocalFault, NoDaemon, NotPermitted, UsageError, os_errors

SOCKET_NAME = "control.sock"
GRPC_SOCKET_NAME = "grpc.sock"
TOKEN_FILE = "control.token"
LOCK_NAME = "control.lock"


@contextlib.contextmanager
def short_folder(home: Path) -> Iterator[Path]:
    """A path of `home` for the sockets in it. That of a unix socket has about a hundred bytes at most: so it leads
    through a descriptor of `home`, on systems where descriptors have paths. Raises OSError."""
    folder = os.open(home, os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY))
    try:
        through = Path(f"/proc/self/fd/{folder}")
        yield through if through.exists() else home
    finally:
        os.close(folder)


def check(home: Path, name: str = SOCKET_NAME) -> None:
    """Raises NoDaemon unless there is a socket in `home`, NotPermitted if it belongs to another user."""
    path = home.resolve() / name
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


def no_daemon(home: Path) -> NoDaemon:
    """The error for a `home` without a running daemon."""
    return NoDaemon(f"no node runs in {home}: start one with `swarmnode join`, or give its folder with --home")


def take_home(home: Path) -> int:
    """Hold the lock of `home` until the descriptor, which is returned, is closed or the process dies.

    Raises UsageError if another daemon holds it or the disk keeps no locks, LocalFault if it cannot be written.
    """
    put_aside_unless_file(home / LOCK_NAME)
    for name in (SOCKET_NAME, GRPC_SOCKET_NAME):
        if (home / name).is_dir():
            put_aside(home / name, "a folder")
    try:
        with os_errors(LocalFault, f"cannot write in {home}", "; give another --home"):
            return file_lock.take(home / LOCK_NAME, file_lock.this_process(), "give another --home, on a local disk")
    except file_lock.LockHeld as held:
        raise UsageError(f"another swarmnode (pid {held.holder}) uses {home}: give another --home") from None

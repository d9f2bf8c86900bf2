"""Locks of files that hold until the process ends, however it ends: a home, an archive, a data set, sockets.

A file system answers in three ways: it locks, another process holds the lock, or it keeps no locks at all, as network
disks do whose server or mount has none. The last is no other process, and has another remedy.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from swarmnode.base.errors import UsageError, cause_of

HELD = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
"""flock(2) and fcntl(2): the lock belongs to another. Every other errno is the disk's; Python repeats EINTR itself."""

HOLDER_BYTES_MAX = 4096  # as PATH_MAX: a holder is a path at most


class LockHeld(Exception):
    """Another process has the lock. `holder` is its own word, "?" if it has written none."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"held by {holder}")
        self.holder = holder


def this_process() -> str:
    """The word of this process in a lock file: its pid, and the machine, because network disks have several."""
    return f"{os.getpid()} on {socket.gethostname()}"


def take(path: Path, holder: str, remedy: str) -> int:
    """Lock the file `path`, which is made if need be, and write `holder` into it. The lock holds until the returned
    descriptor is closed or the process dies.

    Raises LockHeld, UsageError with `remedy` where the disk keeps no locks, OSError if the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # NFS locks only what can be written
    try:
        if not _lock(descriptor, fcntl.LOCK_EX, path, remedy):
            raise LockHeld(_word(descriptor))
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, os.fsencode(holder), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def holder_of(path: Path) -> str | None:
    """The word of the process that has locked `path`; None if none has, or if there is no such file.

    Raises UsageError where the disk keeps no locks, OSError if the file cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return None if _lock(descriptor, fcntl.LOCK_SH, path, "use a local disk") else _word(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int, path: Path, remedy: str) -> bool:
    """Whether this process has the lock now; another has it otherwise."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            return False
        raise UsageError(
            f"{path.parent} is on a disk that keeps no locks ({cause_of(error)}), as some network disks do: {remedy}"
        ) from error
    return True


def _word(descriptor: int) -> str:
    """The word in a lock file, without this machine's name."""
    word = os.fsdecode(os.pread(descriptor, HOLDER_BYTES_MAX, 0)).strip()
    return word.removesuffix(f" on {socket.gethostname()}") or "?"

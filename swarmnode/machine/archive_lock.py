"""The lock of an archive's folder. It names the home of the process that keeps the archive."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from swarmnode.errors import UsageError

LOCK_FILE = "archive.lock"
HOME_BYTES_MAX = 4096  # as PATH_MAX


def keeper(folder: Path) -> Path | None:
    """The home of the process that keeps an archive in `folder` now, None if none does."""
    with contextlib.suppress(OSError), (folder / LOCK_FILE).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Path(os.fsdecode(file.read(HOME_BYTES_MAX)))
    return None


def hold(folder: Path, home: Path) -> None:
    """Lock the folder for the process of `home` until it ends, however it ends. Raises UsageError if another process'
    archive uses it."""
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        if (holder := keeper(folder)) == home.absolute():
            return  # it is this process, which begins another archive
        raise UsageError(f"the archive of {holder} writes to {folder}: stop it, or choose another") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, os.fsencode(home.absolute()), 0)

"""A disk that does not take what is written: one sentence that says where, how much, and what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from swarmnode.errors import DiskFull, LocalFault

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
ADVICE = "free space there, or choose another folder"


def write_fault(path: Path, error: OSError, nbytes: int | None = None, advice: str = ADVICE) -> LocalFault:
    """The error for a failed write of `nbytes` to `path`. Raises DiskFull itself if space or quota is used up (ENOSPC,
    EDQUOT)."""
    raise_if_full(path, error, nbytes, advice)
    return LocalFault(f"cannot write {path}: {error.strerror or error}; {advice}")


def raise_if_full(path: Path, error: OSError, nbytes: int | None = None, advice: str = ADVICE) -> None:
    """Raises DiskFull where `error`, of a write of `nbytes` to `path`, says that space or quota is used up."""
    if error.errno in FULL:
        raise DiskFull(full_text(path, nbytes, quota=error.errno == errno.EDQUOT, advice=advice)) from error


def full_text(path: Path, nbytes: int | None, *, quota: bool = False, advice: str = ADVICE) -> str:
    """A sentence about a full disk."""
    what = "the disk quota of this user is used up" if quota else "the disk is full"
    wants = "" if nbytes is None else f" needs {nbytes} bytes and"
    return f"{what}: {path}{wants} finds {free_nbytes(path)} bytes free; {advice}"


def free_nbytes(path: Path) -> int:
    """Bytes free for this user on the disk of `path`, which need not exist yet."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return 0


def check_free(folder: Path, nbytes: int, what: str, advice: str = ADVICE) -> None:
    """Raises DiskFull unless `nbytes` more fit below `folder`, and LocalFault if it is not writable."""
    if nbytes > (free := free_nbytes(folder)):
        wants = f"{nbytes} bytes ({nbytes / 1e9:.3g} GB)"
        raise DiskFull(f"the disk is full: {what} in {folder} needs {wants}, {free} are free; {advice}")


def check_writable(folder: Path, advice: str = ADVICE) -> None:
    """Make `folder` and a file in it, and delete the file again. Raises DiskFull, LocalFault."""
    probe = folder / f".write-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x" * 4096)
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
        raise write_fault(folder, error, 4096, advice) from error

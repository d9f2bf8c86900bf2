"""Write files whole or not at all: readers see the old file or the new one, also after a crash or a power cut."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from swarmnode.base.errors import DiskFull, LocalFault, NotPermitted, SwarmnodeError, cause_of

TEMPORARY = ".part"  # how the names of unfinished files end


FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
ADVICE = "free space there, or choose another folder"


@contextlib.contextmanager
def write_errors(
    path: Path,
    nbytes: int | None = None,
    advice: str = ADVICE,
    *,
    kind: type[SwarmnodeError] = LocalFault,
    what: str = "",
) -> Iterator[None]:
    """Raises DiskFull for an OSError of a write of `nbytes` to `path` where space or quota is used up (ENOSPC, EDQUOT),
    else `kind`. `what` failed, in its text; "": the write, with `advice`."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(full_text(path, nbytes, quota=error.errno == errno.EDQUOT, advice=advice)) from error
        why = cause_of(error)
        raise kind(f"{what}: {why}" if what else f"cannot write {path}: {why}; {advice}") from error


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
    with write_errors(folder, 4096, advice):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"x" * 4096)
        finally:
            probe.unlink(missing_ok=True)


def atomic_write(
    path: Path, data: bytes | Iterable[bytes | memoryview], *, mode: int = 0o666, replace: bool = True
) -> None:
    """Write `data`, one buffer or several in order, to `path`.

    A new file has `mode` less the umask. Without `replace` a file that exists stays, and FileExistsError is raised.
    Raises OSError; then nothing has changed at `path`.
    """
    with atomic_file(path, mode=mode, replace=replace) as file:
        for piece in [data] if isinstance(data, bytes) else data:
            view = memoryview(piece).cast("B")
            while view.nbytes:
                view = view[os.write(file.fileno(), view) :]


@contextlib.contextmanager
def atomic_file(path: Path, *, mode: int = 0o666, replace: bool = True) -> Iterator[BinaryIO]:
    """A new file that becomes `path` when the block ends, and is deleted when it raises.

    The file is written beside `path` under a name that no other writer has, synced, and renamed; then the folder is
    synced. A link at `path` is replaced, not followed. Parameters and errors are those of `atomic_write`.
    """
    fresh, descriptor = _new_file(path, mode)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace:
            fresh.replace(path)
        else:
            os.link(fresh, path)  # unlike a rename it never replaces a file
    finally:
        fresh.unlink(missing_ok=True)  # renamed already unless something failed
    _sync_folder(path.parent)


def _new_file(path: Path, mode: int) -> tuple[Path, int]:
    """The name and descriptor of an empty file beside `path`. Names left by a process that died are passed over."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for number in itertools.count():
        fresh = path.with_name(f".{path.name}.{os.getpid()}-{number}{TEMPORARY}")
        with contextlib.suppress(FileExistsError):
            return fresh, os.open(fresh, flags, mode)
    raise AssertionError("unreachable")


def _sync_folder(folder: Path) -> None:
    """Make a new name in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync files only
            raise
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write `content`, or what it writes to a file, to `path` atomically. Raises DiskFull if the disk is, NotPermitted
    if the file cannot be written otherwise."""
    nbytes = len(content) if isinstance(content, bytes) else None
    what = f"{path} cannot be written"
    with write_errors(path, nbytes, kind=NotPermitted, what=what), atomic_file(path) as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            content(file)

"""Write files whole or not at all: readers see the old file or the new one, also after a crash or a power cut."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".part"  # how the names of unfinished files end


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

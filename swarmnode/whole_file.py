"""Write a user's files whole or not at all, with one sentence where that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from swarmnode.atomic_file import atomic_file
from swarmnode.disk import raise_if_full
from swarmnode.errors import NotPermitted


def write_whole(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write `content`, or what it writes to a file, to `path` atomically. Raises DiskFull if the disk is, NotPermitted
    if the file cannot be written otherwise."""
    nbytes = len(content) if isinstance(content, bytes) else None
    try:
        with atomic_file(path) as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
    except OSError as error:
        raise_if_full(path, error, nbytes)
        raise NotPermitted(f"{path} cannot be written: {error.strerror}") from error

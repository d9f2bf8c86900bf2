"""Git LFS: a clone made without it has a small text where each large file should be."""

from __future__ import annotations

from swarmnode.base.errors import DataError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # its first line begins so (specification v1)


def refuse_pointer(head: bytes, name: str) -> None:
    """Raises DataError if `head`, the first bytes of the file `name`, begins a pointer."""
    if head.startswith(LFS_POINTER):
        raise DataError(f"{name} is a pointer of Git LFS, not the file: `git lfs pull` in its folder fetches it")

"""This node's own disk as a port: small named blobs, written whole or not at all."""

from __future__ import annotations

import asyncio
import os
import pathlib
from collections.abc import Sequence

from swarmnode.errors import LocalFault


class FolderStore:
    """ports.Store in one folder. Names are plain file names."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    async def write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        await asyncio.to_thread(self._write, name, parts)

    async def read(self, name: str) -> bytes | None:
        return await asyncio.to_thread(self._read, name)

    def _path(self, name: str) -> pathlib.Path:
        assert name and os.sep not in name and name not in (".", ".."), f"bad blob name {name!r}"
        return self._folder / name

    def _write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        path = self._path(name)
        torn = path.with_name(path.name + ".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(torn, "wb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.replace(torn, path)
        except OSError as error:
            torn.unlink(missing_ok=True)
            raise LocalFault(f"cannot write {path}: {error.strerror}; free space or choose another --home") from error

    def _read(self, name: str) -> bytes | None:
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LocalFault(f"cannot read {self._path(name)}: {error.strerror}") from error

"""Blobs as a port: in a local or shared folder, written atomically."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import io
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from swarmnode.base import file_lock
from swarmnode.base.atomic_file import TEMPORARY, atomic_write, write_errors
from swarmnode.base.errors import DataError, LocalFault, UsageError, cause_of, os_errors
from swarmnode.base.ports import Store
from swarmnode.keep.recovery.tensorfile import scatter

PIECE_NBYTES = 8 << 20  # guess: written and hashed in pieces of this size


LOCK_FILE = "archive.lock"


def keeper(folder: Path) -> Path | None:
    """The home of the process that keeps an archive in `folder` now, None if none does."""
    with contextlib.suppress(OSError, UsageError):  # unreadable, or on a disk where no archive can be kept
        holder = file_lock.holder_of(folder / LOCK_FILE)
        return None if holder is None else Path(holder)
    return None


def hold(folder: Path, home: Path) -> None:
    """Lock the folder for the process of `home` until it ends, however it ends. Raises UsageError if another process'
    archive uses it, or if its disk keeps no locks, LocalFault if it cannot be written."""
    own = str(home.absolute())
    try:
        with os_errors(LocalFault, f"cannot write in {folder}", "; choose another folder for the archive"):
            file_lock.take(folder / LOCK_FILE, own, "keep the archive in a folder on a local disk")
    except file_lock.LockHeld as held:
        if held.holder == own:
            return  # it is this process, which begins another archive
        raise UsageError(f"the archive of {held.holder} writes to {folder}: stop it, or choose another") from None


class FolderStore:
    """ports.Store in one folder, made at the first write. Reads and writes run in threads."""

    def __init__(self, folder: pathlib.Path, advice: str = "free space or choose another --home") -> None:
        self._folder = folder
        self._advice = advice

    async def write(self, name: str, parts: Sequence[bytes | memoryview]) -> str:
        return await asyncio.to_thread(self._write, name, parts)

    async def read(self, name: str, sha256: str | None = None) -> bytes | None:
        return await asyncio.to_thread(self._read, name, sha256)

    async def fill(self, name: str, parts: Sequence[memoryview], sha256: str) -> bool:
        return await asyncio.to_thread(self._fill, name, parts, sha256)

    async def names(self, prefix: str = "") -> dict[str, int]:
        return await asyncio.to_thread(self._names, prefix)

    async def delete(self, name: str) -> None:
        await asyncio.to_thread(self._delete, name)

    def _path(self, name: str) -> pathlib.Path:
        return self._folder / checked(name)

    def _write(self, name: str, parts: Sequence[bytes | memoryview]) -> str:
        path = self._path(name)
        with write_errors(path, sum(memoryview(part).nbytes for part in parts), self._advice):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, _hashed(pieces(parts), whole := hashlib.sha256()))
        return whole.hexdigest()

    def _read(self, name: str, sha256: str | None) -> bytes | None:
        path = self._path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LocalFault(f"cannot read {path}: {cause_of(error)}") from error
        if sha256 is not None:
            check_hash(str(path), hashlib.sha256(data).hexdigest(), sha256)
        return data

    def _fill(self, name: str, parts: Sequence[memoryview], sha256: str) -> bool:
        path = self._path(name)
        expected = sum(part.nbytes for part in parts)
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected:
                    raise DataError(f"{path}: {size} bytes; expected {expected}: truncated? Use another checkpoint")
                whole = hashlib.sha256()
                for piece in pieces(parts):
                    _read_all(file, piece, path)
                    whole.update(piece)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise LocalFault(f"cannot read {path}: {cause_of(error)}") from error
        check_hash(str(path), whole.hexdigest(), sha256)
        return True

    def _names(self, prefix: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        folder = self._folder / prefix.rpartition("/")[0]
        try:
            for path in folder.rglob("*"):
                name = path.relative_to(self._folder).as_posix()
                if name.startswith(prefix) and not name.endswith(TEMPORARY):
                    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile by another node
                        if path.is_file():
                            sizes[name] = path.stat().st_size
        except FileNotFoundError:
            pass
        except OSError as error:
            raise LocalFault(f"cannot list {folder}: {cause_of(error)}") from error
        return dict(sorted(sizes.items()))

    def _delete(self, name: str) -> None:
        path = self._path(name)
        with os_errors(LocalFault, f"cannot delete {path}"):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # only if it is empty

    def __str__(self) -> str:
        return str(self._folder)


def _hashed(parts: Iterable[memoryview], whole: hashlib._Hash) -> Iterator[memoryview]:
    """Pass `parts` on, and add each to the hash `whole`."""
    for piece in parts:
        whole.update(piece)
        yield piece


def checked(name: str) -> str:
    """`name`, asserted to be relative and inside the folder."""
    parts = name.split("/")
    assert all(part and part not in (".", "..") and "\\" not in part for part in parts), f"bad blob name {name!r}"
    return name


def check_hash(where: str, found: str, sha256: str) -> None:
    """Raises DataError unless `found`, the hash of the data read at `where`, is `sha256`."""
    if found != sha256:
        raise DataError(
            f"{where}: damaged: its SHA-256 is {found[:16]}..., not {sha256[:16]}...; use another checkpoint"
        )


def pieces(parts: Sequence[bytes | memoryview]) -> list[memoryview]:
    """`parts` as views of at most PIECE_NBYTES."""
    views = [memoryview(part).cast("B") for part in parts]
    return [view[start : start + PIECE_NBYTES] for view in views for start in range(0, view.nbytes, PIECE_NBYTES)]


def _read_all(file: io.FileIO, piece: memoryview, path: pathlib.Path) -> None:
    while piece.nbytes:
        count = file.readinto(piece)
        if not count:
            raise DataError(f"{path}: it became shorter while it was read; use another checkpoint")
        piece = piece[count:]


T = TypeVar("T")

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
"""Allowed schemes and their packages: fsspec knows many more, some of which run commands or read any host."""

_URL = re.compile(r"([a-z0-9+.-]+)://([A-Za-z0-9][A-Za-z0-9._-]*)(/.*)?\Z")


def is_url(text: str) -> bool:
    return "://" in text


def open_store(text: str) -> Store:
    """The store at `text`, given by this machine's user, or a manifest's bucket that the user accepts: a folder,
    file:///FOLDER, or s3://BUCKET/PREFIX. Keys and endpoint of a bucket come from the environment, as for any tool
    (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on); `text` names no host.

    Raises UsageError for another scheme, or if its package is not installed. Opens nothing yet.
    """
    if text.startswith("file:///"):
        text = text.removeprefix("file://")
    if not is_url(text):
        return FolderStore(pathlib.Path(text).expanduser(), "free space or save elsewhere")
    match = _URL.match(text)
    if match is None or match[1] not in PACKAGES:
        raise UsageError(
            f"{text[:100]!r} is no place for checkpoints: give a folder, or"
            f" {', '.join(f'{scheme}://BUCKET/PREFIX' for scheme in PACKAGES)}"
        )
    try:
        importlib.import_module(PACKAGES[match[1]])
    except ImportError:
        raise UsageError(f"{text[:100]!r} needs the package {PACKAGES[match[1]]}: pip install it") from None
    return BucketStore(match[1], f"{match[2]}{(match[3] or '').rstrip('/')}")


class BucketStore:
    """ports.Store below BUCKET/PREFIX. A blob becomes visible once the bucket has all of it."""

    def __init__(self, scheme: str, root: str) -> None:
        self._scheme = scheme
        self._root = root
        self._files: Any = None

    async def write(self, name: str, parts: Sequence[bytes | memoryview]) -> str:
        def work(files: Any) -> str:
            data = b"".join(parts)
            files.pipe_file(self._path(name), data)
            return hashlib.sha256(data).hexdigest()

        return await asyncio.to_thread(self._do, "write", name, work)

    async def read(self, name: str, sha256: str | None = None) -> bytes | None:
        def work(files: Any) -> bytes | None:
            try:
                data: bytes = files.cat_file(self._path(name))
            except FileNotFoundError:
                return None
            if sha256 is not None:
                check_hash(f"{self}/{name}", hashlib.sha256(data).hexdigest(), sha256)
            return data

        return await asyncio.to_thread(self._do, "read", name, work)

    async def fill(self, name: str, parts: Sequence[memoryview], sha256: str) -> bool:
        return scatter(await self.read(name, sha256), parts, f"{self}/{name}")

    async def names(self, prefix: str = "") -> dict[str, int]:
        def work(files: Any) -> dict[str, int]:
            folder = prefix.rpartition("/")[0]
            try:
                files_found = files.find(f"{self._root}/{folder}".rstrip("/"), detail=True)
            except FileNotFoundError:
                return {}
            skip = len(self._root) + 1
            return {
                path[skip:]: int(row["size"])
                for path, row in sorted(files_found.items())
                if path[skip:].startswith(prefix)
            }

        return await asyncio.to_thread(self._do, "list", prefix, work)

    async def delete(self, name: str) -> None:
        def work(files: Any) -> None:
            with contextlib.suppress(FileNotFoundError):
                files.rm_file(self._path(name))

        await asyncio.to_thread(self._do, "delete", name, work)

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked(name)}"

    def _do(self, verb: str, name: str, work: Callable[[Any], T]) -> T:
        """Run `work` in a thread: fsspec has its own event loop. Raises LocalFault for any error of the bucket."""
        try:
            if self._files is None:
                import fsspec

                self._files = fsspec.filesystem(self._scheme, use_listings_cache=False)
            return work(self._files)
        except _failures() as error:
            reason = cause_of(error)[:200]
            raise LocalFault(
                f"cannot {verb} {self}/{name}: {reason}; see the bucket's name, its keys and its endpoint"
            ) from error

    def __str__(self) -> str:
        return f"{self._scheme}://{self._root}"


def _failures() -> tuple[type[BaseException], ...]:
    """Exceptions of a bucket's client: OSError if fsspec translates, else its own."""
    kinds: list[type[BaseException]] = [OSError]
    with contextlib.suppress(ImportError):
        theirs = importlib.import_module("botocore.exceptions")
        kinds += [theirs.BotoCoreError, theirs.ClientError]
    return tuple(kinds)

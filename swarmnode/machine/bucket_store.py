"""Blobs in a bucket as a port (S3 and compatible stores, through fsspec), and the store for a URL."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from swarmnode.errors import LocalFault, UsageError
from swarmnode.machine.folder_store import FolderStore, check_hash, checked
from swarmnode.ports import Store
from swarmnode.recovery.tensorfile import scatter

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
            reason = " ".join(str(error).split())[:200] or type(error).__name__
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

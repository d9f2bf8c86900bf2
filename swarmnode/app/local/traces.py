"""The traces of swarmnode on a machine: homes of its processes, caches, settings and services, by their size."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swarmnode.app.control.socket_path import LOCK_NAME
from swarmnode.base.atomic_file import write_errors
from swarmnode.base.errors import NotPermitted, Unavailable
from swarmnode.base.file_lock import holder_of
from swarmnode.base.user_folders import default_cache, default_home

KINDS = {
    "node": "what a volunteer's node keeps: its key, its receipts, saved stages, logs",
    "coordinator": "a coordinator's key, history and archive",
    "bootstrap": "a bootstrap's key and logs",
    "archive": "copies of models that `archive` made",
}
"""Homes below ~/.local/share/swarmnode, and what lies in them."""

LEAVE_MAX_S = 120.0  # guess: twice what a service manager gives (TimeoutStopSec in deploy/systemd)
POLL_S = 0.1

OWN = ("node.key", "receipts.bin")
"""Files of a home by which others know this machine again."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A file or folder of swarmnode's. `holder` is the process that uses it now, "" for none."""

    path: Path
    what: str
    nbytes: int
    holder: str = ""


def traces(config: Path) -> list[Trace]:
    """All that is there. `config` is the path of the user's config file."""
    found = []
    for kind, what in KINDS.items():
        home = default_home(kind)
        if home.is_dir():
            found.append(Trace(home, what, size_of(home), holder_of(home / LOCK_NAME) or ""))
    cache = default_cache()
    if cache.is_dir():
        found.append(Trace(cache, "tokens, chunks of text and compiled code, which can be made again", size_of(cache)))
    if config.is_file():
        found.append(Trace(config, "settings", size_of(config)))
    for unit in sorted((config.parent.parent / "systemd" / "user").glob("swarmnode*.service")):
        found.append(Trace(unit, f"a service: first systemctl --user disable --now {unit.stem}", size_of(unit)))
    return found


def remove(trace: Trace, *, keep_identity: bool) -> None:
    """Delete a trace; with `keep_identity` the files of OWN stay. Links are deleted, not followed. Raises NotPermitted
    for the first file that cannot be deleted."""
    with write_errors(trace.path, kind=NotPermitted, what=f"{trace.path} cannot be deleted"):
        if not trace.path.is_dir() or trace.path.is_symlink():
            trace.path.unlink()
        elif not keep_identity:
            shutil.rmtree(trace.path)
        else:
            for entry in [*trace.path.iterdir()]:
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                elif entry.name not in OWN:
                    entry.unlink()
            with contextlib.suppress(OSError):
                trace.path.rmdir()


async def freed(home: Path) -> None:
    """Wait until no process uses `home`. Raises Unavailable after LEAVE_MAX_S."""
    try:
        async with asyncio.timeout(LEAVE_MAX_S):
            while holder_of(home / LOCK_NAME) is not None:  # noqa: ASYNC110  a lock has no event to wait for
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise Unavailable(f"the node in {home} still runs after {LEAVE_MAX_S:g} s: nothing is deleted") from None


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links count as themselves."""
    return sum(entry.lstat().st_size for entry in _files(path))


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir() or path.is_symlink():
        yield path
        return
    for folder, _, names in os.walk(path):
        yield from (Path(folder) / name for name in names)


def remover() -> str:
    """The command that takes the program itself away, by the place that it was installed in."""
    place = Path(sys.prefix).resolve().parts
    if "uv" in place and "tools" in place:
        return "uv tool uninstall swarmnode-trainer"
    if "pipx" in place:
        return "pipx uninstall swarmnode-trainer"
    if sys.prefix == sys.base_prefix:
        return "pip uninstall swarmnode-trainer"
    return f"rm -r {sys.prefix}"

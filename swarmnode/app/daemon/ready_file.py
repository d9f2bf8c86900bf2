"""The file by which a node process tells its parent that it is reachable: small, in its home, written atomically."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swarmnode.base.atomic_file import atomic_write, write_errors
from swarmnode.base.damaged_file import UNREADABLE, put_aside
from swarmnode.base.errors import LocalFault, cause_of
from swarmnode.base.user_folders import default_home

FILE_NAME = "ready.json"
FILE_BYTES_MAX = 64 << 10
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Ready:
    """`addresses` are multiaddrs that end in /p2p/<peer id>; `metrics_address` is host:port; `control` is the socket's
    path; `stage` is None before it is chosen and for a bootstrap; `dashboard` is the URL of a coordinator's page;
    `grpc` is the host:port of the control API on TCP, if it is there."""

    pid: int
    run_id: str
    peer_id: str
    addresses: tuple[str, ...]
    metrics_address: str
    control: str
    stage: int | None = None
    dashboard: str = ""
    grpc: str = ""


def write(home: Path, ready: Ready) -> None:
    """Replace the file of `home`. Raises LocalFault if the disk fails."""
    path = home / FILE_NAME
    with write_errors(path, advice="free space there, or choose another --home"):
        atomic_write(path, json.dumps(dataclasses.asdict(ready)).encode())


def meeting_homes() -> list[Path]:
    """The folders in which a run's meeting points on this machine usually are."""
    return [default_home(kind) for kind in ("coordinator", "bootstrap")]


def running(homes: Sequence[Path]) -> dict[Path, Ready]:
    """The nodes that are ready in some of `homes`. Raises LocalFault as `read`."""
    return {home: ready for home in homes if (ready := read(home)) is not None}


def page_here(run_id: str) -> str:
    """The URL of the page that a coordinator on this machine shows; "" if none does. Raises LocalFault as `read`."""
    pages = [ready.dashboard for ready in running(meeting_homes()).values() if ready.run_id == run_id]
    return next(filter(None, pages), "")


def clear(home: Path) -> None:
    """Remove the file: done first at a daemon's start and last at its end."""
    try:
        (home / FILE_NAME).unlink(missing_ok=True)
    except OSError as error:  # a folder in its place
        put_aside(home / FILE_NAME, cause_of(error))


def read(home: Path) -> Ready | None:
    """The content written by the node of `home`; None if there is none (yet). Raises LocalFault for an invalid file."""
    path = home / FILE_NAME
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as file:  # a pipe has nothing
            raw = json.loads(file.read(FILE_BYTES_MAX))
        return Ready(**{**raw, "addresses": tuple(raw["addresses"])})
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise LocalFault(
            f"{path} is invalid ({error}): stop the node that uses this folder and remove the file"
        ) from None


async def wait(home: Path, pid: int) -> Ready:
    """Wait for the content that process `pid` writes in `home`; older files of other processes are ignored. No
    timeout."""
    while (ready := read(home)) is None or ready.pid != pid:  # noqa: ASYNC110  a file has no event to wait for
        await asyncio.sleep(POLL_S)
    return ready

"""How a node process tells whoever started it that it can be reached: a small file in its home, written whole."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from swarmnode.errors import LocalFault

FILE_NAME = "ready.json"
FILE_BYTES_MAX = 64 << 10
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Ready:
    """`addresses` are multiaddrs that end in /p2p/<peer id>; `metrics_address` is host:port; `control` the socket's
    path; `stage` None while not chosen and for a bootstrap; `dashboard` the URL of a coordinator's page."""

    pid: int
    run_id: str
    peer_id: str
    addresses: tuple[str, ...]
    metrics_address: str
    control: str
    stage: int | None = None
    dashboard: str = ""


def write(home: Path, ready: Ready) -> None:
    """Replace the file of `home`. Raises LocalFault when the disk refuses."""
    path = home / FILE_NAME
    fresh = path.with_suffix(f".{os.getpid()}.new")
    try:
        with fresh.open("w") as file:
            json.dump(dataclasses.asdict(ready), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise LocalFault(f"cannot write {path}: {error.strerror}") from None


def clear(home: Path) -> None:
    """Remove the file: a daemon does this first at start and last at its end."""
    (home / FILE_NAME).unlink(missing_ok=True)


def read(home: Path) -> Ready | None:
    """What the node of `home` wrote; None when it has not (yet). Raises LocalFault for a file that makes no sense."""
    path = home / FILE_NAME
    try:
        with path.open() as file:
            raw = json.loads(file.read(FILE_BYTES_MAX))
        return Ready(**{**raw, "addresses": tuple(raw["addresses"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LocalFault(f"{path} makes no sense ({error}): stop the node that lives there and remove it") from None


async def wait(home: Path, pid: int) -> Ready:
    """What process `pid` writes in `home`, as soon as it does; older files of others are passed over. No bound."""
    while (found := read(home)) is None or found.pid != pid:  # noqa: ASYNC110  a file has no event to wait for
        await asyncio.sleep(POLL_S)
    return found

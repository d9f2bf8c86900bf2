"""A copy of a running swarm made now, by the archive that a process on this machine keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from swarmnode.errors import NoDaemon, SwarmnodeError, Unavailable, UsageError
from swarmnode.machine.archive_lock import keeper
from swarmnode.recovery.archive import FRESH_S

WAIT_S = 180.0  # guess: donors rest for seconds to minutes between two copies, and measuring takes some
POLL_S = 0.5

Note = Callable[[str], None]


def fresh_copy(source: Path, note: Note, wait_s: float = WAIT_S) -> Path | None:
    """The folder of the checkpoints of the run of `source` (the folder of the run, of its archive, or the home of the
    process that keeps that), once the newest is as the swarm was FRESH_S ago or later. None where no archive is kept
    now, or after `wait_s`: `note` is told why."""
    for home in _keepers(source):
        try:
            return Path(asyncio.run(copy_now(home, note, wait_s))["folder"])
        except (NoDaemon, UsageError):
            continue
        except SwarmnodeError as error:
            note(f"no copy of now: {error}; the newest that is kept is taken")
    return None


async def copy_now(home: Path, note: Note, wait_s: float) -> dict[str, Any]:
    """The reply of the archive of `home` when its newest checkpoint is current. Raises Unavailable after `wait_s`,
    UsageError if `home` keeps no archive, and as control.client.ask."""
    from swarmnode.control.client import ask

    loop, said = asyncio.get_running_loop(), ""
    begun_s = loop.time()
    while True:
        waited_s = loop.time() - begun_s
        reply = await asyncio.to_thread(ask, home, "copy", older_s=FRESH_S + waited_s)
        if reply["current"]:
            return reply
        if not said:
            note(f"the archive of {home} is asked for a copy of now")
        elif reply["status"] != said:
            note(reply["status"])
        said = reply["status"]
        if waited_s > wait_s:
            raise Unavailable(f"the archive has none after {waited_s:.0f} s ({said})")
        await asyncio.sleep(POLL_S)


def _keepers(source: Path) -> Iterator[Path]:
    """Homes of the processes that may keep an archive of the run of `source`."""
    from swarmnode.daemon import ready_file
    from swarmnode.manifest import SIGNED_FILE, read_signed, verify

    for folder in (source, source.parent, source / "archive"):
        if (home := keeper(folder)) is not None:
            yield home
            return
    if ready_file.read(source) is not None:
        yield source
    elif (source / SIGNED_FILE).is_file():
        _, run_id = verify(read_signed(source / SIGNED_FILE)[0], None)
        homes = ready_file.running(ready_file.meeting_homes())
        yield from (home for home, ready in homes.items() if ready.run_id == run_id)


__all__ = ["copy_now", "fresh_copy"]

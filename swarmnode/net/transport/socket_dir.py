"""A node's folder of unix sockets among the temporary files: made anew when a cleaner has swept it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from swarmnode.base import file_lock
from swarmnode.base.errors import LocalFault, UsageError, cause_of

PREFIX = "swarmnode-p2p-"
LOCK_NAME = "lock"
FALLBACK = Path("/tmp")  # a unix socket's path is short, TMPDIR may not be, or may be gone
_PATH_BYTES_MAX = 100  # of 108 that a unix socket's address holds on Linux, 104 on macOS
_SOCKET_NAME_CHARACTERS = 24  # "p2pclient-" and eleven more, as hivemind names them


class SocketDir:
    """A folder `/tmp/swarmnode-p2p-<pid>-<random>` (mode 0700), locked while this process lives. `path` changes when
    `renew` has to make another one."""

    def __init__(self, parent: Path | None = None) -> None:
        """Remove the folders of dead nodes and make a new one. Raises LocalFault if that fails."""
        self._parent = parent
        self._make()

    def _make(self) -> None:
        parent = Path(tempfile.gettempdir()) if self._parent is None else self._parent
        reasons = []
        for place in dict.fromkeys((parent, FALLBACK)):
            if len(os.fsencode(place)) + len(PREFIX) + 20 + _SOCKET_NAME_CHARACTERS > _PATH_BYTES_MAX:
                reasons.append(f"{place} is too long for a socket's path")
                continue
            try:
                return self._make_in(place)
            except OSError as error:
                reasons.append(f"{place}: {cause_of(error)}")
            except (UsageError, file_lock.LockHeld) as error:
                reasons.append(str(error))
        raise LocalFault(f"no folder for sockets can be made: {'; '.join(reasons)} (set TMPDIR to a local folder)")

    def _make_in(self, parent: Path) -> None:
        sweep(parent)
        new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{os.getpid()}-", dir=parent))
        try:
            lock = file_lock.take(new / LOCK_NAME, file_lock.this_process(), "set TMPDIR to a local folder")
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        self.path = new.rename(parent / new.name[1:])  # no other process sweeps it before it is locked
        self._lock = lock

    def whole(self, *names: str) -> bool:
        """Whether the folder, its lock and the sockets `names` are where they were made."""
        try:
            locked = os.path.samestat(os.fstat(self._lock), (self.path / LOCK_NAME).stat())
        except OSError:
            return False
        return locked and all((self.path / name).exists() for name in names)

    def renew(self) -> None:
        """Make another folder if something has swept this one. Raises LocalFault."""
        if not self.whole():
            self.remove()
            self._make()

    def remove(self) -> None:
        """Remove the folder and the sockets in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> list[Path]:
    """Remove our user's socket folders that no living process has locked; return them."""
    swept = []
    for path in sorted(parent.glob(f"{PREFIX}*")):
        try:
            if path.stat().st_uid != os.geteuid() or file_lock.holder_of(path / LOCK_NAME) is not None:
                continue
        except (OSError, UsageError):
            continue  # another process is removing it, or nobody can say
        shutil.rmtree(path, ignore_errors=True)
        swept.append(path)
    return swept

"""A private folder for the unix sockets between this node and its p2pd. Folders of dead nodes are removed at start."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from swarmnode.errors import LocalFault

PREFIX = "swarmnode-p2p-"
_PATH_BYTES_MAX = 100  # of 108 that a unix socket's address holds on Linux, 104 on macOS
_SOCKET_NAME_CHARACTERS = 24  # "p2pclient-" and eleven more, as hivemind names them


class SocketDir:
    """A folder `/tmp/swarmnode-p2p-<pid>-<random>` (mode 0700), locked while this process lives."""

    def __init__(self, parent: Path | None = None) -> None:
        """Remove the folders of dead nodes and make a new one. Raises LocalFault if that fails."""
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        if len(os.fsencode(parent)) + len(PREFIX) + 20 + _SOCKET_NAME_CHARACTERS > _PATH_BYTES_MAX:
            parent = Path("/tmp")  # a unix socket's path is short, TMPDIR may not be
        sweep(parent)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LocalFault(f"no folder for sockets can be made in {parent}: {error.strerror}") from error

    def remove(self) -> None:
        """Remove the folder and the sockets in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def sweep(parent: Path) -> list[Path]:
    """Remove our user's socket folders whose process is dead; return them.

    A process is dead if nobody has its pid *and* nobody holds its lock: pids repeat in containers that share a /tmp,
    and a new folder has no lock for a moment.
    """
    swept = []
    for path in sorted(parent.glob(f"{PREFIX}*")):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        try:
            ours = pid.isdigit() and path.stat().st_uid == os.geteuid()
            if not ours or _alive(int(pid)) or not _unlocked(path):
                continue
        except OSError:
            continue  # another process is removing it
        shutil.rmtree(path, ignore_errors=True)
        swept.append(path)
    return swept


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _unlocked(path: Path) -> bool:
    try:
        lock = os.open(path / "lock", os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True

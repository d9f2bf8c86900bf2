"""Who has a lock, and which disks keep none, as the kernel says it by errno."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.app.control.socket_path import take_home
from swarmnode.base import file_lock
from swarmnode.base.errors import UsageError
from tests.support.errno_shim import FLOCK_FAILS, FLOCK_OF_NFS, preloaded

EVERY_LOCK = """
import json, sys
from pathlib import Path
from swarmnode.app.control.socket_path import take_home
from swarmnode.data.set_maker import _alone
from swarmnode.base.errors import SwarmnodeError
from swarmnode.app.machine.folder_store import hold, keeper
from swarmnode.net.transport.socket_dir import SocketDir

home = Path(sys.argv[1])
said = {}
for name, lock in {
    "home": lambda: take_home(home),
    "archive": lambda: hold(home, home),
    "keeper": lambda: keeper(home),
    "data make": lambda: _alone(home, home).__enter__(),
    "sockets": lambda: SocketDir(home).remove(),
}.items():
    try:
        lock()
        said[name] = ""
    except SwarmnodeError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


def locked(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """What each of the project's locks says in a process of `environment`."""
    command = [sys.executable, "-c", EVERY_LOCK, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    told: dict[str, str] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("name", ["ENOLCK", "EOPNOTSUPP", "ENOSYS", "EINVAL", "EBADF", "EIO"])
def test_a_disk_without_locks_is_told_as_such(tmp_path: Path, name: str) -> None:
    number = getattr(errno, name)
    told = locked(tmp_path, preloaded(tmp_path, FLOCK_FAILS.format(number=number)))
    assert told.pop("keeper") == ""
    for what, message in told.items():
        assert os.strerror(number) in message, what
        assert "keeps no locks" in message, what
        assert "local" in message, what
        assert "another swarmnode" not in message and "at work" not in message and "writes to" not in message, what
    assert not list(tmp_path.glob("*swarmnode-p2p-*"))


@pytest.mark.parametrize("name", ["EAGAIN", "EACCES"])
def test_a_lock_that_another_holds_is_told_as_such(tmp_path: Path, name: str) -> None:
    told = locked(tmp_path, preloaded(tmp_path, FLOCK_FAILS.format(number=getattr(errno, name))))
    assert "another swarmnode (pid ?)" in told["home"]
    assert "another `data make` (pid ?)" in told["data make"]
    assert "writes to" in told["archive"]


def test_descriptors_are_open_as_nfs_wants_them(tmp_path: Path) -> None:
    assert set(locked(tmp_path, preloaded(tmp_path, FLOCK_OF_NFS)).values()) == {""}


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    program = (
        "import sys\nfrom pathlib import Path\nfrom swarmnode.app.control.socket_path import take_home\n"
        "take_home(Path(sys.argv[1]))\nprint('locked', flush=True)\nsys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "locked\n"
        yield child
        child.kill()


def test_the_holder_is_named_until_it_dies(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    path = tmp_path / "control.lock"
    assert file_lock.holder_of(path) == str(holder.pid)
    with pytest.raises(UsageError, match=rf"another swarmnode \(pid {holder.pid}\) uses"):
        take_home(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert file_lock.holder_of(path) is None
    os.close(take_home(tmp_path))


def test_a_holder_on_another_machine_is_named_with_it(tmp_path: Path) -> None:
    """A home on a network disk: the pid alone would be looked for in vain."""
    path = tmp_path / "control.lock"
    descriptor = file_lock.take(path, "71 on attic", "")
    try:
        with pytest.raises(UsageError, match=r"another swarmnode \(pid 71 on attic\) uses"):
            take_home(tmp_path)
    finally:
        os.close(descriptor)

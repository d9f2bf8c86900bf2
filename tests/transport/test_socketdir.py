import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.net.transport.socket_dir import PREFIX, SocketDir, sweep


@pytest.fixture
def short() -> Iterator[Path]:
    """pytest's own folders have names too long for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_folder_is_private_and_goes_when_removed(short: Path) -> None:
    folder = SocketDir(short)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert str(os.getpid()) in folder.path.name
    (folder.path / "p2pd").touch()
    folder.remove()
    folder.remove()
    assert list(short.iterdir()) == []


def test_only_the_folders_of_the_dead_are_swept(short: Path) -> None:
    living = SocketDir(short)
    killed, unlocked = (short / f"{PREFIX}{name}" for name in ("1-a", "1-b"))
    for folder in (killed, unlocked):
        folder.mkdir()
        (folder / "p2pd").touch()
    (killed / "lock").touch()
    (short / "else").mkdir()
    assert sweep(short) == [killed, unlocked]
    assert sorted(p.name for p in short.iterdir()) == sorted([living.path.name, "else"])
    living.remove()


def test_a_long_temporary_folder_is_not_used(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    folder = SocketDir(deep)
    assert folder.path.parent == Path("/tmp")
    folder.remove()


def test_a_swept_folder_is_made_anew_and_an_untouched_one_stays(short: Path) -> None:
    folder = SocketDir(short)
    first = folder.path
    (first / "p2pd").touch()
    folder.renew()
    assert folder.path == first
    assert folder.whole("p2pd")
    (first / "p2pd").unlink()
    assert not folder.whole("p2pd")
    (first / "lock").unlink()
    folder.renew()
    assert folder.path != first
    assert folder.whole()
    folder.remove()
    assert list(short.iterdir()) == []


def test_a_temporary_folder_that_is_gone_has_a_substitute(short: Path) -> None:
    parent = short / "tmp"
    parent.mkdir()
    folder = SocketDir(parent)
    shutil.rmtree(parent)
    folder.renew()
    assert folder.path.parent == Path("/tmp")
    folder.remove()

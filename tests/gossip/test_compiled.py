"""Compiled code is loaded from what is this user's alone, and from nothing else."""

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from swarmnode_methods.native_build import Compiled, Library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")

OURS = 1
THEIRS = 666


def compiled(folder: Path, answer: int = OURS, name: str = "answer") -> Compiled:
    source = folder / f"{name}.c"
    source.write_text(f"int answer(void) {{ return {answer}; }}\n")
    return Compiled(name, (source,), ("-shared", "-fPIC"), tuned=False)


def load(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).answer())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def theirs(tmp_path: Path, cache: Path) -> Compiled:
    """What somebody else has built and would have us load."""
    (tmp_path / "theirs").mkdir()
    made = compiled(tmp_path / "theirs", THEIRS)
    assert made.build()
    return made


def test_it_is_built_for_this_user_alone(tmp_path: Path, cache: Path) -> None:
    before = os.umask(0)
    try:
        what = compiled(tmp_path)
        assert Library(what, load, 0).best() == 0, "not built yet"
        assert what.build() and what.build()
    finally:
        os.umask(before)
    assert Library(what, load, 0).best() == OURS
    assert what.path().stat().st_mode & 0o077 == 0 and what.path().parent.stat().st_mode & 0o077 == 0
    assert what.path().is_relative_to(cache)


@pytest.mark.parametrize("mode", [0o757, 0o775, 0o777, 0o1777])
def test_a_folder_that_others_can_write_is_not_looked_into(tmp_path: Path, cache: Path, mode: int) -> None:
    what = compiled(tmp_path)
    assert what.build()
    what.path().parent.chmod(mode)
    assert Library(what, load, 0).best() == 0
    library = Library(what, load, 0)
    assert library.build() and library.best() == OURS, "it is built anew, in a folder of ours"
    assert what.path().parent.stat().st_mode & 0o022 == 0


@pytest.mark.parametrize("mode", [0o757, 0o775, 0o777, 0o602])
def test_a_file_that_others_can_write_is_built_anew(tmp_path: Path, theirs: Compiled, mode: int) -> None:
    what = compiled(tmp_path)
    assert what.build()
    what.path().write_bytes(theirs.path().read_bytes())
    what.path().chmod(mode)
    assert Library(what, load, 0).best() == 0
    library = Library(what, load, 0)
    assert library.build() and library.best() == OURS


def test_links_are_not_followed(tmp_path: Path, theirs: Compiled) -> None:
    what = compiled(tmp_path)
    assert what.build()
    what.path().unlink()
    what.path().symlink_to(theirs.path())
    assert Library(what, load, 0).best() == 0
    library = Library(what, load, 0)
    assert library.build() and library.best() == OURS and not what.path().is_symlink()
    place = what.path().parent
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert Library(what, load, 0).best() == 0 and not what.build()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what_is_theirs", ["file", "folder"])
def test_a_kernel_of_another_user_is_not_loaded(tmp_path: Path, cache: Path, what_is_theirs: str) -> None:
    what = compiled(tmp_path)
    assert what.build()
    os.chown(what.path() if what_is_theirs == "file" else what.path().parent, 12345, 12345)
    assert Library(what, load, 0).best() == 0
    assert what.build() == (what_is_theirs == "file")


def test_the_checked_file_is_the_loaded_one(tmp_path: Path, theirs: Compiled) -> None:
    """Between the look and the load somebody puts another file in its place."""
    what = compiled(tmp_path)
    assert what.build()

    def swapped(path: Path) -> int:
        os.replace(theirs.path(), what.path())
        return load(path)

    assert Library(what, swapped, 0).best() == (OURS if Path("/proc/self/fd").exists() else THEIRS)


def test_two_libraries_are_not_taken_for_each_other(tmp_path: Path, cache: Path) -> None:
    found = []
    for number in (3, 4, 5):
        what = compiled(tmp_path, number, f"answer{number}")
        assert what.build()
        found.append(Library(what, load, 0).best())
    assert found == [3, 4, 5]

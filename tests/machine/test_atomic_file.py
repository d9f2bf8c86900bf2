"""Files are replaced whole or stay as they were."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.base.atomic_file import TEMPORARY, atomic_file, atomic_write


def test_a_file_is_replaced_by_pieces_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    atomic_write(path, [b"new", memoryview(b" and "), b"longer"])
    assert path.read_bytes() == b"new and longer" and os.listdir(tmp_path) == ["a"]


def test_the_old_file_stays_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def pieces() -> Iterator[bytes]:
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        atomic_write(path, pieces())
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_all_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data are synced under the temporary name, the folder after the rename."""
    steps: list[str] = []
    fsync = os.fsync
    path = tmp_path / "a"

    def record(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        steps.append(f"{kind}, {'named' if path.exists() else 'not named'}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    atomic_write(path, b"x")
    assert steps == ["file, not named", "folder, named"]


def test_mode_is_that_asked_for_from_the_first_byte_on(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "key", mode=0o600) as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
        file.write(b"secret")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_links_are_replaced_and_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    path = tmp_path / "a"
    target.write_bytes(b"somebody else's")
    path.symlink_to(target)
    planted = tmp_path / f".a.{os.getpid()}-0{TEMPORARY}"  # a guess of the temporary name leads nowhere
    planted.symlink_to(target)
    atomic_write(path, b"ours")
    assert target.read_bytes() == b"somebody else's" and path.read_bytes() == b"ours" and not path.is_symlink()


def test_a_file_that_must_not_be_replaced_is_kept(tmp_path: Path) -> None:
    atomic_write(tmp_path / "key", b"first", replace=False)
    with pytest.raises(FileExistsError):
        atomic_write(tmp_path / "key", b"second", replace=False)
    assert (tmp_path / "key").read_bytes() == b"first" and os.listdir(tmp_path) == ["key"]

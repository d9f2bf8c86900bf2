"""`uninstall` shows what swarmnode keeps below a user's home, deletes that alone, and touches no node that runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarmnode.app.cli.main import main
from swarmnode.app.control.socket_path import LOCK_NAME
from swarmnode.base.file_lock import take


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home in which swarmnode has run, with a file of somebody else's beside each of its folders."""
    for variable, name in (("DATA", "share"), ("CACHE", "cache"), ("CONFIG", "config")):
        monkeypatch.setenv(f"XDG_{variable}_HOME", str(tmp_path / name))
    monkeypatch.delenv("SWARMNODE_CONFIG", raising=False)
    for name, text in {
        "share/swarmnode/node/node.key": "key",
        "share/swarmnode/node/receipts.bin": "receipts",
        "share/swarmnode/node/saved/stage": "weights",
        "share/swarmnode/coordinator/history.sqlite": "history",
        "cache/swarmnode/a.tokens": "tokens",
        "config/swarmnode/config.toml": "",
        "config/systemd/user/swarmnode.service": "[Unit]",
        "share/other": "not ours",
        "cache/other": "not ours",
        "config/systemd/user/other.service": "not ours",
        "run/owner.key": "an owner's",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "share/swarmnode/node/link").symlink_to(tmp_path / "run")
    return tmp_path


def left(user: Path) -> set[str]:
    return {str(path.relative_to(user)) for path in user.rglob("*") if path.is_file()}


OTHERS = {"share/other", "cache/other", "config/systemd/user/other.service", "run/owner.key"}


def test_without_yes_everything_is_shown_and_stays(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = left(user)
    assert main(["uninstall"]) == 0
    said = capsys.readouterr()
    for name in ("share/swarmnode/node", "share/swarmnode/coordinator", "cache/swarmnode", "config.toml", ".service"):
        assert name in said.out
    assert "systemctl --user disable --now swarmnode" in said.out
    assert "nothing is deleted yet" in said.err and left(user) == before


def test_with_yes_its_files_go_and_those_of_others_stay(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["uninstall", "--yes"]) == 0
    said = capsys.readouterr().err
    assert left(user) == OTHERS, "what a link led to stays, too"
    assert "the program itself goes with: " in said
    assert main(["uninstall", "--yes"]) == 0
    assert "nothing of swarmnode is kept here" in capsys.readouterr().err


def test_key_and_receipts_can_stay(user: Path) -> None:
    assert main(["uninstall", "--yes", "--keep-identity"]) == 0
    assert left(user) == OTHERS | {"share/swarmnode/node/node.key", "share/swarmnode/node/receipts.bin"}


def test_a_home_in_use_is_not_touched(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    descriptor = take(user / "share/swarmnode/node" / LOCK_NAME, "4711", "")
    before = left(user)
    assert main(["uninstall"]) == 0
    assert "logs; process 4711 uses it: `swarmnode leave` first)" in capsys.readouterr().out
    try:
        assert main(["uninstall", "--yes"]) == 2
    finally:
        os.close(descriptor)
    assert "is used by process 4711: say `swarmnode leave` first" in capsys.readouterr().err
    assert left(user) == before


def test_leave_forgets_no_folder_of_ones_own(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["leave", "--forget", "--home", str(user / "run")]) == 2
    assert "is a folder of your own" in capsys.readouterr().err
    assert left(user) >= OTHERS

"""`join --device all`: a process for each accelerator."""

import signal
import sys
from pathlib import Path

import pytest

from swarmnode.app.cli import join
from swarmnode.app.cli.join import device_arguments, join_all, join_each
from swarmnode.model import device as device_module


def test_a_node_has_a_device_a_home_and_a_name_of_its_own() -> None:
    given = ["--device", "all", "swarm1abc", "--lan"]
    found = device_arguments(given, ("swarm1abc",), "cuda:1", Path("/h"), "box")
    assert found == [
        *("--device", "all", "--lan", "--device", "cuda:1", "--home", "/h/cuda-1", "--name", "box cuda-1"),
        *("--metrics-port", "0", "-"),
    ]
    assert device_arguments(["--run", "r", "/ip4/x"], (), "cpu", Path("/h"), "box")[:3] == ["--run", "r", "/ip4/x"]


READS = "import sys; sys.exit(0 if sys.stdin.readline() == 'an invite\\n' else 9)"
LEAVES = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))
os.kill(os.getppid(), signal.SIGTERM)
signal.pause()
"""


def test_each_reads_the_invite_and_a_failure_is_told() -> None:
    assert join_each([[sys.executable, "-c", READS]] * 2, "an invite") == 0
    assert join_each([[sys.executable, "-c", READS]] * 2, "another") == 9
    assert join_each([[sys.executable, "-c", "raise SystemExit(7)"], [sys.executable, "-c", READS]], "an invite") == 7


def test_a_signal_reaches_every_node() -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert join_each([[sys.executable, "-c", LEAVES]], "") == 3
    assert signal.getsignal(signal.SIGTERM) is before


def test_there_is_one_for_each_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(device_module, "devices", lambda: ("cuda:0", "cuda:1"))

    def join_each(commands: list[list[str]], invite: str) -> int:
        started.extend(commands)
        return len(invite)

    monkeypatch.setattr(join, "join_each", join_each)
    assert join_all(["i"], ("i",), Path("/h"), "box", "four") == 4
    assert [one[one.index("--device") + 1] for one in started] == ["cuda:0", "cuda:1"]
    assert capsys.readouterr().err == "one node each on cuda:0, cuda:1\n"

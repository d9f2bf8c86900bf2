"""The commands around the page: mistakes told in one line, and the measurement at a small size."""

from pathlib import Path

import pytest

from benchmarks.swarm import dashboard as bench
from swarmnode.app.api import free_port
from swarmnode.app.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "RUN"),
        (["no-such-run"], "no such folder or file"),
        (["x", "--port", "70000"], "70000"),
        (["RUN", "--bind", "not an address"], "not an address"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "manifest.toml").touch()
    assert main(["coordinator", *(str(tmp_path) if each == "RUN" else each for each in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and told in captured.err and captured.err.count("\n") == 1


def test_up_takes_another_port_when_its_own_is_taken() -> None:
    import socket

    with socket.socket() as holder:
        try:
            holder.bind(("127.0.0.1", 7070))
            holder.listen()
        except OSError:
            pass  # somebody else has it, which is as good
        assert free_port() == 0


@pytest.mark.nightly
def test_the_bench_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WARM_S", 2.0)
    monkeypatch.setattr(bench, "WINDOW_S", 2.0)
    monkeypatch.setattr(bench, "no_browser", lambda: "not looked for")
    told: list[str] = []
    found = bench.run(40, told.append)
    assert told[0].startswith("dashboard http://127.0.0.1:")
    assert found["nodes"] == 40 and 0 < found["server_share"] < 1 and found["skipped"] == "not looked for"
    assert found["assets_packed_bytes"] < found["assets_bytes"] < bench.LIMITS["assets_bytes"]

"""Flag, then variable, then file, then default: which of them counts, and that each says where it is from."""

import json
from pathlib import Path

import pytest

from swarmnode.app.cli.main import main
from swarmnode.app.cli.option import config_file
from swarmnode.base.untrusted_text import readable


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARMNODE_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    config_file._read.cache_clear()
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    assert main(["config", "show", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_each_source_beats_the_next(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(capsys)["name"]["origin"] == "default"
    (here / "config.toml").write_text('max-up = "1Mbit"\nname = "common"\n[join]\nname = "attic"\nstage = 2\n')
    config_file._read.cache_clear()
    found = shown(capsys)
    file = f"file {here / 'config.toml'}"
    assert found["name"] == {"value": "attic", "origin": file} and found["stage"] == {"value": "2", "origin": file}
    assert found["max-up"]["value"] == "1Mbit"
    monkeypatch.setenv("SWARMNODE_MAX_UP", "2Mbit")
    assert shown(capsys)["max-up"] == {"value": "2Mbit", "origin": "environment SWARMNODE_MAX_UP"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_is_read_as_editors_save_it(here: Path, capsys: pytest.CaptureFixture[str], encoding: str) -> None:
    (here / "config.toml").write_bytes('max-up = "1Mbit"\r\nname = "Zoë"\r\n'.encode(encoding))
    config_file._read.cache_clear()
    found = shown(capsys)
    assert (found["max-up"]["value"], found["name"]["value"]) == ("1Mbit", "Zoë")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[join]\nmax-upp = 1", "did you mean max-up?"),
        ("join = 1", "write its settings in a table"),
        ("= 1", "not TOML"),
    ],
)
def test_a_wrong_file_is_one_line(here: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    (here / "config.toml").write_text(text)
    config_file._read.cache_clear()
    assert main(["join", "--help"]) == 78
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_wrong_value_in_a_variable_names_the_option(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARMNODE_HOURS", "noon")
    assert main(["join", "swarm1.x"]) == 2
    assert "hours" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete(here: Path, capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert main(["completion", shell]) == 0
    assert "_SWARMNODE_COMPLETE" in capsys.readouterr().out


def test_logs_of_a_node_that_is_gone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--home", str(here / "nobody")]) == 69
    capsys.readouterr()
    (here / "events.jsonl").write_text(
        '{"ts":"2026-11-21T12:00:00.000Z","level":"info","event":"node.ready","fields":{"serves":1}}\n'
        "torn\n"
        '{"ts":"2026-11-21T12:00:01.000Z","level":"warning","event":"peer.gone","fields":{"peer":"x"}}\n'
    )
    assert main(["logs", "--home", str(here)]) == 0
    assert capsys.readouterr().out == "12:00:00 node.ready serves=2\n12:00:01 peer.gone peer=x\n"
    assert main(["logs", "--home", str(here), "--level", "warning", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["event"] == "peer.gone"


def test_text_of_a_peer_does_nothing_to_the_terminal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a log that another version, or another machine, has written."""
    (here / "events.jsonl").write_text(
        json.dumps(
            {
                "ts": "2026\x1b",
                "level": "info",
                "event": "a\x1b[2J",
                "node": "n\x07",
                "fields": {"b\x1b": "\x1b]0;x\x07"},
            }
        )
        + "\n"
    )
    assert main(["logs", "--home", str(here)]) == 0
    out = capsys.readouterr().out
    assert "[2J" in out and all(line.isprintable() for line in out.splitlines())


def test_a_models_words_move_no_cursor() -> None:
    """What a stranger's model says may be an escape sequence, such as one that writes to the clipboard."""
    assert readable("a\tb\n\x1b]52;c;cm0gLXJm\x07\x9b2J\u202eé") == "a\tb\n ]52;c;cm0gLXJm  2J é"

"""What verbs print by --json holds to a schema."""

import json
from pathlib import Path

import jsonschema
import pytest

from swarmnode.app.cli.main import main

TRACE = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["path", "what", "nbytes", "holder"],
        "additionalProperties": False,
        "properties": {
            "path": {"type": "string"},
            "what": {"type": "string"},
            "nbytes": {"type": "integer", "minimum": 0},
            "holder": {"type": ["string", "null"]},
        },
    },
}


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> object:
    assert main(list(words)) == code
    return json.loads(capsys.readouterr().out)


def test_a_manifest_is_as_its_schema_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["init", run, "--preset", "tiny"]) == 0
    capsys.readouterr()
    shown = printed(capsys, "manifest", "show", run, "--json")
    assert isinstance(shown, dict) and shown["pipeline"]["stages"] == 2
    schema = printed(capsys, "manifest", "schema")
    assert isinstance(schema, dict)
    jsonschema.validate(shown, schema)
    shown["pipeline"]["stages"] = "two"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(shown, schema)
    assert main(["manifest", "show", run, "--json", "--changed"]) == 2


def test_a_difference_has_both_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(tmp_path / name) for name in ("one", "two")]
    for run in runs:
        assert main(["init", run, "--preset", "tiny"]) == 0
    assert main(["manifest", "set", runs[1], "inner.clip_norm=0.5", "about.by=Ada"]) == 0
    capsys.readouterr()
    found = printed(capsys, "manifest", "diff", *runs, "--json", code=1)
    assert isinstance(found, dict) and found["name"] == ["one", "two"]
    assert (found["inner.clip_norm"], found["about.by"]) == ([1.0, 0.5], ["", "Ada"])
    assert printed(capsys, "manifest", "diff", runs[0], runs[0], "--json") == {}


def test_what_is_kept_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    jsonschema.validate(printed(capsys, "uninstall", "--json"), TRACE)
    home = tmp_path / "swarmnode" / "node"
    home.mkdir(parents=True)
    (home / "node.key").write_text("key")
    found = printed(capsys, "uninstall", "--json")
    jsonschema.validate(found, TRACE)
    assert isinstance(found, list) and found and found[0]["nbytes"] >= 3

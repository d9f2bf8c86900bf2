"""`init --data`: the manifest names a data set by its hash, and the run's folder leads to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from swarmnode.cli.init import command
from swarmnode.errors import DataError, UsageError
from swarmnode.manifest.folder import read_manifest
from tests.support.data_sets import data_set


def run(*arguments: str) -> str:
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_run_on_a_data_set(tmp_path: Path) -> None:
    index = data_set(tmp_path / "set")
    place = "https://example.org/set"
    said = run(str(tmp_path / "run"), "--preset", "tiny", "--data", str(tmp_path / "set"), "--location", place)
    assert str(tmp_path / "run" / "data") in said
    made = read_manifest(tmp_path / "run" / "manifest.toml")
    assert (made.data.source, made.data.index, made.data.locations) == ("index", index.digest.hex(), (place,))
    assert (made.data.end_token, made.data.tokenizer, made.model.vocabulary) == (0, "bytes", 256)
    assert (tmp_path / "run" / "data" / "index.json").samefile(tmp_path / "set" / "index.json")
    assert not made.data.names_files, "no machine needs files of its own"


def test_a_bad_data_set_or_place_is_reported(tmp_path: Path) -> None:
    data_set(tmp_path / "set")
    with pytest.raises(DataError, match=f"data make OUT --from {tmp_path}` makes"):
        run(str(tmp_path / "a"), "--data", str(tmp_path))
    with pytest.raises(DataError, match=r"none: no such folder: .*data make"):
        run(str(tmp_path / "a"), "--data", str(tmp_path / "none"))
    for wrong in ("file:///etc", "http://user@host/x", "set"):
        with pytest.raises(UsageError, match="allowed is"):
            run(str(tmp_path / "b"), "--data", str(tmp_path / "set"), "--location", wrong)
    alone = CliRunner().invoke(command, [str(tmp_path / "c"), "--location", "https://example.org/x"])
    assert alone.exit_code == 2 and "give both" in alone.output
    assert not any((tmp_path / name).exists() for name in "abc"), "nothing is left of what was refused"
    (tmp_path / "set" / "index.json").write_text("{}")
    with pytest.raises(DataError, match="index.json"):
        run(str(tmp_path / "d"), "--data", str(tmp_path / "set"))

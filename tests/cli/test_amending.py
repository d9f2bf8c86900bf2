"""`amend` and `owner` as commands: what lands in the run's folder, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode import manifest as manifests
from swarmnode import owner
from swarmnode.cli.main import main
from swarmnode.cli.owner import chain_of
from swarmnode.manifest import PRESETS, SIGNED_FILE

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    manifests.init(folder, PRESETS["tiny"])
    manifests.sign_folder(folder)
    return folder


def key_of(path: Path) -> bytes:
    return owner.public_bytes(owner.load_owner(path))


def run_id(run: Path) -> str:
    return manifests.verify(manifests.read_signed(run / SIGNED_FILE)[0], None)[1]


def amend(run: Path, change: str = "inner.clip_norm=0.5") -> int:
    return main(["amend", str(run), change, "--from-round", "3"])


def test_an_added_key_replaces_a_lost_one(run: Path, tmp_path: Path, capsys: Capture) -> None:
    first, spare, identity = run / owner.FILE_NAME, tmp_path / "spare.key", run_id(run)
    mine = key_of(first)
    assert main(["owner", "new", str(spare)]) == 0
    assert capsys.readouterr().out.strip() == key_of(spare).hex()
    assert main(["owner", "add", str(run), str(spare)]) == 0
    assert f"owners {mine.hex()[:16]}, {key_of(spare).hex()[:16]}" in capsys.readouterr().out
    assert main(["owner", "add", str(run), key_of(spare).hex()]) == 0, "again, by its hex digits"
    assert chain_of(run).owners == (mine, key_of(spare))

    first.rename(tmp_path / "lost.key")
    first.write_bytes(spare.read_bytes())
    first.chmod(0o600)
    assert main(["owner", "rotate", str(run)]) == 0
    fresh = key_of(first)
    assert chain_of(run).owners == (fresh,) and fresh not in (mine, key_of(spare))
    assert [key_of(path) for path in run.glob("owner-*.key")] == [key_of(spare)], "the present key is kept"
    assert first.stat().st_mode & 0o077 == 0 and run_id(run) == identity
    assert amend(run) == 0 and chain_of(run).newest.inner.clip_norm == 0.5

    capsys.readouterr()
    first.unlink()
    (tmp_path / "lost.key").rename(first)
    assert amend(run, "inner.clip_norm=0.4") != 0, "a replaced key signs no more"
    assert "owner" in capsys.readouterr().err
    assert main(["owner", "rotate", str(run)]) == 78 and "not the key of an owner in force" in capsys.readouterr().err
    assert chain_of(run).newest.inner.clip_norm == 0.5 and not list(run.glob("*.new"))


@pytest.mark.parametrize("key", ["ab", "nowhere.key", "g" * 64])
def test_a_malformed_key_is_not_added(run: Path, key: str, capsys: Capture) -> None:
    before = (run / SIGNED_FILE).read_bytes()
    assert main(["owner", "add", str(run), key]) == 2 and "64 hex digits" in capsys.readouterr().err
    assert (run / SIGNED_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("inner.clip_norm", "give FIELD=VALUE"),
        ("inner.clip_norm=-1", "allowed is"),
        ("evaluation.prompt_tokens=9", "do not compare"),
        ("pipeline.boundary=fp32", "begin another run"),
    ],
)
def test_a_refused_amendment_leaves_the_run_as_it_is(run: Path, change: str, why: str, capsys: Capture) -> None:
    before = (run / SIGNED_FILE).read_bytes()
    assert amend(run, change) == 2 and why in capsys.readouterr().err
    assert (run / SIGNED_FILE).read_bytes() == before

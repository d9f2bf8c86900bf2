"""`amend` and `owner` as commands: what lands in the run's folder, and what they refuse."""

import json
import math
from pathlib import Path

import pytest

from swarmnode.app.cli.main import main
from swarmnode.app.cli.owner import AHEAD_PERIODS, chain_of
from swarmnode.app.daemon import ready_file
from swarmnode.run import manifest as manifests
from swarmnode.run import owner
from swarmnode.run.manifest.folder import SIGNED_FILE, init, sign_folder
from swarmnode.run.manifest.recipe import PRESETS
from swarmnode.train.node.access_list import PERIOD_S
from tests.support.web_folder import web_folder

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    init(folder, PRESETS["tiny"])
    sign_folder(folder)
    return folder


def key_of(path: Path) -> bytes:
    return owner.public_bytes(owner.load_owner(path))


def run_id(run: Path) -> str:
    return manifests.verify(manifests.read_signed(run / SIGNED_FILE)[0], None)[1]


def amend(run: Path, change: str = "inner.clip_norm=0.5") -> int:
    return main(["amend", str(run), change, "--from-round", "3"])


def test_an_amendment_without_a_round_is_from_one_that_all_hear_of_before(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    page = tmp_path / "page" / "api" / "v1" / "summary"
    home = tmp_path / "home"
    samples_per_s = 50.0
    page.parent.mkdir(parents=True)
    round_samples = PRESETS["tiny"].gossip.round_samples
    done = {"phase": "training", "samples": 10 * round_samples, "tokens": 5120 * round_samples}
    page.write_text(json.dumps(done | {"tokens_per_s": 512.0 * samples_per_s}))
    assert main(["amend", str(run), "inner.clip_norm=0.5", "--home", str(home)]) == 2
    assert "give --from-round N" in capsys.readouterr().err
    home.mkdir()
    with web_folder(tmp_path / "page") as (url, _):
        ready_file.write(home, ready_file.Ready(1, "", "", (), "", "", dashboard=url))
        assert main(["amend", str(run), "inner.clip_norm=0.5", "--home", str(home)]) == 0
    ahead = math.ceil(AHEAD_PERIODS * PERIOD_S * samples_per_s / round_samples)
    assert chain_of(run).chain[0].from_round == 10 + 1 + ahead


def test_an_added_key_replaces_a_lost_one(run: Path, tmp_path: Path, capsys: Capture) -> None:
    first = run / owner.FILE_NAME
    spare = tmp_path / "spare.key"
    identity = run_id(run)
    mine = key_of(first)
    assert main(["access", str(run)]) == 0
    assert "the list is empty: it admits and excludes no machine by name" in capsys.readouterr().err
    assert main(["owner", "new", str(spare)]) == 0
    assert capsys.readouterr().out.strip() == key_of(spare).hex()
    assert main(["owner", "add", str(run), str(spare)]) == 0
    assert f"owners {mine.hex()[:16]}, {key_of(spare).hex()[:16]}" in capsys.readouterr().out
    assert main(["owner", "add", str(run), key_of(spare).hex()]) == 0, "again, by its hex digits"
    assert chain_of(run).owners == (mine, key_of(spare))

    first.rename(tmp_path / "lost.key")
    first.write_bytes(spare.read_bytes())
    first.chmod(0o600)
    capsys.readouterr()
    assert main(["owner", "rotate", str(run)]) == 0
    assert "no invite or warrant of earlier keys works any more; `swarmnode invite RUN`" in capsys.readouterr().err
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
        ("model.width=512", "another shape"),
    ],
)
def test_a_refused_amendment_leaves_the_run_as_it_is(run: Path, change: str, why: str, capsys: Capture) -> None:
    before = (run / SIGNED_FILE).read_bytes()
    assert amend(run, change) == 2 and why in capsys.readouterr().err
    assert (run / SIGNED_FILE).read_bytes() == before

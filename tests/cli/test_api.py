"""`import swarmnode`: runs to look at, plans, comparisons, a method from a package of its own."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import swarmnode
from swarmnode.app.api import _from_told
from swarmnode.app.cli.main import main
from swarmnode.app.dashboard.history import history_path
from swarmnode.base import plugin
from swarmnode.base.errors import ManifestError, RemoteFault, Unavailable, UsageError
from swarmnode.run.admission.invite import Invite, encode
from swarmnode.run.manifest import parse
from swarmnode.run.manifest.recipe import PRESETS
from swarmsim.scenario import chosen
from tests.support.watched import RUN, TINY, watched_run

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = EXAMPLES / "own-method"


def install(site: Path) -> None:
    """examples/own-method, as pip would leave it in `site`."""
    info = site / "swarmnode_cautious-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: swarmnode-cautious\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[swarmnode.methods]\ncautious = cautious_rules:METHODS\n")


PROGRAM = """
import torch
from swarmnode.train.gossip.outer import outer
from swarmnode.run.manifest import GossipSpec, Manifest, parse, template
spec = GossipSpec(method="cautious", codec="fp32", group=0)
assert parse(template(Manifest(gossip=spec)), "own").gossip == spec
method = outer(spec, torch.tensor([1.0, -1.0, 2.0, 0.5]))
method.momentum.copy_(torch.tensor([0.0, 10.0, 0.0, 0.0]))  # that of the second element goes against its progress
method.phi.zero_()
method.message(1)
method.apply(1, 1.0, [])
print(*method.phi.tolist())
"""


def with_own_method(site: Path) -> dict[str, str]:
    """The environment of a process in which the package is installed: what a manifest may say is read once."""
    install(site)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(OWN), str(EXAMPLES.parent)])}


def test_a_method_of_a_package_of_its_own_is_a_method(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=with_own_method(tmp_path),
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    nesterov = 0.7 + 0.9 * 0.7  # the first step
    expected = [nesterov / 0.75, 0.0, 2.0 * nesterov / 0.75, 0.5 * nesterov / 0.75]
    assert [float(value) for value in done.stdout.split()] == pytest.approx(expected)


def test_a_method_that_nobody_installed_is_named() -> None:
    with pytest.raises(ManifestError, match="cautious"):
        parse('[gossip]\nmethod = "cautious"\n', "own")


async def test_a_run_is_looked_at_by_its_page_and_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched_run(tmp_path, 40) as w:
        fleet = w.fake_fleet
        for _ in range(2):  # a point every second tick
            w.board.live.tick()
        by_page = await asyncio.to_thread(swarmnode.connect, w.board.url)
        history = await asyncio.to_thread(by_page.history)
        assert by_page.run_id == RUN and history.name == TINY.name
        with pytest.raises(RemoteFault, match="not the page of a run"):
            _from_told({"points": [[1]]}, w.board.url)
        monkeypatch.setattr("swarmnode.app.daemon.ready_file.page_here", lambda run_id: w.board.url)
        invite = encode(Invite(RUN, b"k" * 32, (f"/ip4/127.0.0.1/tcp/1/p2p/{fleet.nodes[0].identity.peer_id}",)))
        assert (await asyncio.to_thread(swarmnode.connect, invite)).page == w.board.url
    rows = history.rows()
    last = max(rows, key=lambda row: row["samples"])  # what was validated before may be heard of later
    assert last["samples"] == fleet.samples and last["tokens"] == fleet.samples * TINY.model.context
    assert len(rows) == len(history.points) + len(history.validations) and len(history.points) > 0
    assert [row["time_s"] for row in rows] == sorted(row["time_s"] for row in rows)
    assert list(history.to_pandas().columns) == list(last)
    assert history_path(tmp_path, RUN).is_file()
    by_folder = swarmnode.connect(tmp_path)
    assert by_folder.run_id == RUN and by_folder.history().points == [list(point) for point in history.points]
    kept = by_folder.history()
    assert (kept.name, kept.context) == (TINY.name, TINY.model.context), "the folder holds no manifest"
    assert [{**row, "time_s": round(row["time_s"], 1)} for row in kept.rows()] == rows, "the page tells tenths"
    with pytest.raises(Unavailable):
        by_page.history()


def test_a_column_that_no_row_has_is_left_out() -> None:
    known = swarmnode.RunHistory("a", [(1.0, 8, 5.0, None, 2, 2, 0, 10, 4), (2.0, 16, 5.0, 3.0, 2, 2, 0, 20, 8)], [], 4)
    first, second = known.rows()
    assert list(first) == list(second) and "loss_validation" not in first
    assert (first["loss_train"], second["loss_train"], second["tokens"]) == (None, 3.0, 64)
    bare = swarmnode.RunHistory("a", [(1.0, 8, 5.0, None, 2, 2, 0, 10, 4)], [])
    assert set(bare.rows()[0]).isdisjoint({"tokens", "loss_train", "loss_validation"})
    assert all(value is not None for value in bare.rows()[0].values())


def test_a_folder_that_is_no_run_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no history"):
        swarmnode.connect(tmp_path)
    with pytest.raises(UsageError, match="no folder, no URL and no invite"):
        swarmnode.connect("nothing")
    with pytest.raises(UsageError, match="nothing to compare"):
        swarmnode.compare([])
    with pytest.raises(UsageError, match="pip install no-such-library"):
        plugin.library("no_such_library", "this")
    with pytest.raises(AttributeError, match="no attribute 'down'"):
        swarmnode.down  # type: ignore[attr-defined]  # noqa: B018


def test_a_plan_is_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    run = EXAMPLES / "home-8b.toml"
    fleet = EXAMPLES / "home-8b.csv"
    assert main(["plan", str(run), str(fleet), "--tokens", "1e8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    planned = swarmnode.plan(run, fleet, 1e8)
    assert (planned.tokens_per_s, planned.days, planned.limit) == (told["tokens_per_s"], told["days"], told["limit"])
    assert swarmnode.plan(PRESETS["tiny"], fleet, stages=1).stages[0].part.layers.start == 0


def curve(name: str, floor: float, samples: int) -> swarmnode.RunHistory:
    validations = [(n, float(n), floor + 100.0 / (n + 100)) for n in range(0, samples + 1, 100)]
    return swarmnode.RunHistory(name, [(n, n, 1, 3.0, 1, 1, 0, 10 * n, n) for n, _, _ in validations], validations, 8)


def test_runs_are_compared_at_the_samples_that_all_reached() -> None:
    compared = swarmnode.compare([curve("a", 1.0, 2000), curve("a", 1.2, 1000), curve("b", 2.0, 3000)])
    assert compared.samples == 1000
    first, second = compared.rows()
    assert (first["name"], first["runs"], second["name"], second["runs"]) == ("a", 2, "b", 1)
    assert first["loss_validation"] == pytest.approx(1.1 + second["loss_validation"] - 2.0)
    assert first["spread"] == pytest.approx(0.2 / 2**0.5) and second["spread"] is None
    assert first["sent_nbytes"] == 10_000 and first["time_s"] == 1000.0
    texts = "".join(ElementTree.fromstring(compared.svg()).itertext())
    assert texts.count("a, 2 seeds ± ") == 1 and texts.count("b, one seed") == 1, (
        "a file of its own, one name for all seeds"
    )
    assert compared.svg().count("<polyline") == 3 and "<table" in compared._repr_html_()


@pytest.mark.parametrize("name", swarmnode.PAPERS)
def test_a_papers_settings_are_a_manifests(name: str) -> None:
    changes = swarmnode.paper(name, inner_batch=64)
    manifest = chosen("methods", None, None, changes).manifest
    assert manifest.gossip.method == swarmnode.PAPERS[name].method
    assert manifest.gossip.round_samples == 64 * swarmnode.PAPERS[name].inner_steps
    with pytest.raises(UsageError, match="sparseloco"):
        swarmnode.paper("attention", inner_batch=64)

"""`up` as a command: which manifest it takes, where it puts things, what it ends with. Nodes are stood in for."""

import asyncio
import json
import pathlib
from dataclasses import replace

import jsonschema
import pytest

import swarmnode
from swarmnode.app.cli.main import main
from swarmnode.app.cli.schema import schema_of
from swarmnode.app.daemon import ready_file
from swarmnode.app.daemon.ready_file import Ready
from swarmnode.app.local.run_folder import prepare
from swarmnode.base.errors import LocalFault, ManifestError, UsageError
from swarmnode.run import manifest as manifests
from swarmnode.run.manifest.folder import init
from swarmnode.run.manifest.recipe import PRESETS
from tests.support import drive

TINY = PRESETS["tiny"]


@pytest.fixture
def run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    init(tmp_path / "run", TINY)
    return pathlib.Path("run")


def test_a_folder_is_signed_and_gets_a_session_of_its_own(run: pathlib.Path) -> None:
    first = prepare(run, 4, None, "now")
    second = prepare(run, 4, None, "now")
    assert first.manifest == TINY
    assert first.signed == run / "manifest.signed"
    assert (first.folder, second.folder) == (run / "up-now", run / "up-now-2")
    assert first.run_id == second.run_id
    _, copied = manifests.read_signed(first.folder / "manifest.signed", first.run_id)
    assert copied == TINY


def test_other_stages_make_another_run(run: pathlib.Path) -> None:
    same = prepare(run, 4, 2, "a")
    other = prepare(run, 4, 4, "b")
    assert same.run_id == prepare(run, 4, None, "c").run_id != other.run_id
    assert other.manifest.pipeline.stages == 4
    assert other.signed.parent == run  # the manifest's relative paths begin there
    with pytest.raises(ManifestError, match="stages"):
        prepare(run, 40, 40, "d")
    with pytest.raises(UsageError, match="--nodes 1 cannot serve 2 stages"):
        prepare(run, 1, None, "e")
    assert sorted(path.name for path in run.iterdir() if path.is_dir()) == ["up-a", "up-b", "up-c"]


def test_a_signed_manifest_keeps_its_stages(run: pathlib.Path) -> None:
    prepared = prepare(run, 4, None, "a")
    again = prepare(prepared.signed, 4, None, "b")
    assert (again.run_id, again.folder) == (prepared.run_id, pathlib.Path("runs/tiny-b"))
    with pytest.raises(UsageError, match="signed for 2 stages"):
        prepare(prepared.signed, 4, 4, "c")
    session = prepare(prepared.folder, 4, None, "d")
    assert (session.run_id, session.folder) == (prepared.run_id, prepared.folder / "up-d")


def test_without_a_run_the_demo_gets_a_new_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = prepare(None, 4, None, "now")
    second = prepare(None, 4, 2, "now")
    assert first.manifest == PRESETS["demo"]
    assert second.manifest.pipeline.stages == 2
    assert first.folder != second.folder
    names = ["manifest.schema.json", "manifest.signed", "manifest.toml", "owner.key"]
    assert sorted(path.name for path in first.folder.iterdir()) == names


@pytest.fixture
def _fell_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.app.local.child.node_command", drive.fake_command)
    monkeypatch.setattr("swarmnode.app.local.session.PERIOD_S", 0.1)


@pytest.mark.usefixtures("_fell_back")
def test_json_is_the_only_thing_on_stdout(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["up", str(run), "--nodes", "2", "--rounds", "1", "--json"])
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    jsonschema.validate(found, schema_of("up"))
    assert found["exit_reasons"] == {"node-00": "left", "node-01": "left"}
    assert found["run"] in captured.err
    assert code == 2  # the stand-ins save no stages, so that no model can be exported
    assert found["model"] is None
    assert "no saved stage" in found["failure"]


@pytest.mark.usefixtures("_fell_back")
def test_people_get_lines_and_a_summary(run: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["up", str(run), "--nodes", "2", "--samples", "64"])
    captured = capsys.readouterr()
    assert "2 nodes are ready" in captured.out
    assert "trained  " in captured.out
    assert captured.err.startswith("swarmnode: no model was exported: no saved stage")
    (report,) = run.rglob("REPORT.md")
    assert f"report: {report}" in captured.out and "energy | not measured" in report.read_text()


@pytest.mark.usefixtures("_fell_back")
async def test_python_runs_a_swarm_where_a_loop_runs_already(
    run: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a notebook; nothing is printed but progress."""
    summary = swarmnode.up(run, nodes=2, rounds=1, dashboard=False)
    assert summary.totals.round >= 1 and summary.exit_reasons == {"node-00": "left", "node-01": "left"}
    assert summary.failure is not None and "no saved stage" in summary.failure and summary.exit_code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "2 nodes are ready" in captured.err
    with pytest.raises(UsageError, match="--nodes 1 cannot serve 2 stages"):
        swarmnode.up(run, nodes=1)


@pytest.mark.usefixtures("_fell_back")
def test_a_swarm_that_does_not_start_is_one_line(
    run: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE", "crash")
    assert main(["up", str(run), "--nodes", "2", "--json"]) == 70
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "swarmnode: node-01 ended while starting: exit 70: swarmnode: no memory for node-01" in captured.err
    assert "Traceback" not in captured.err


def test_text_and_tokenizer_are_opened_before_anything_is_signed(
    run: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "no.json").write_text("no tokenizer")
    for data, told in (
        (manifests.DataSpec(source="index", index="0" * 64), "is not on this machine"),
        (manifests.DataSpec(tokenizer="no.json"), "no.json"),
    ):
        (run / "manifest.toml").write_text(manifests.template(replace(TINY, data=data)))
        assert main(["up", str(run), "--nodes", "2", "--json", "--cache", "cache"]) == 78
        captured = capsys.readouterr()
        assert captured.out == "" and told in captured.err and captured.err.count("\n") == 1
    assert not (run / "manifest.signed").exists() and not list(run.glob("up-*"))


async def test_the_ready_file_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    assert ready_file.read(tmp_path) is None
    said = Ready(1, "ab" * 32, "peer", ("/ip4/127.0.0.1/tcp/1/p2p/x",), "127.0.0.1:9", "/tmp/s", 2)
    ready_file.write(tmp_path, said)
    assert ready_file.read(tmp_path) == said
    assert [path.name for path in tmp_path.iterdir()] == ["ready.json"]
    assert (await asyncio.wait_for(ready_file.wait(tmp_path, 1), 60)) == said
    (tmp_path / "ready.json").write_text('{"pid": 1}')
    with pytest.raises(LocalFault, match="is invalid"):
        ready_file.read(tmp_path)
    ready_file.clear(tmp_path)
    ready_file.clear(tmp_path)
    assert ready_file.read(tmp_path) is None
    with pytest.raises(LocalFault, match="cannot write"):
        ready_file.write(tmp_path / "missing", said)


async def test_the_ready_file_of_another_process_is_waited_past(tmp_path: pathlib.Path) -> None:
    ready_file.write(tmp_path, Ready(1, "", "old", (), "", ""))
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        waiting = group.create_task(ready_file.wait(tmp_path, 2))
        await asyncio.sleep(0)
        ready_file.write(tmp_path, Ready(2, "", "new", (), "", ""))
    assert waiting.result().peer_id == "new"
